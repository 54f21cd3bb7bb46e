"""``train_neox.py TP PP STAGE STEPS LOAD SAVE DATA OPTIONS``: trains a small model with gpt-neox; LOAD: or "none"."""

import json
import os
import sys

from megatron.neox_arguments import NeoXArgs
from megatron.training import pretrain

OPTIONS = """{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 64, "norm": "layernorm",
    "max_position_embeddings": 64, "attention_config": [[["global"], 4]], "attention_dropout": 0.0,
    "make_vocab_size_divisible_by": 8, "tokenizer_type": "CharLevelTokenizer", "vocab_file": "none", "min_lr": 1e-3,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}}, "weight_decay": 0.1,
    "lr_decay_style": "cosine", "warmup": 0.0, "gradient_clipping": 1.0, "precision": "bfloat16", "train_iters": 12,
    "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "train_batch_size": 8, "eval_iters": 0,
    "train_micro_batch_size_per_gpu": 2, "lr_decay_iters": 12, "eval_interval": 1000, "log_interval": 1,
    "steps_per_print": 1, "use_wandb": false, "distributed_backend": "gloo", "data_impl": "mmap",
    "checkpoint_factor": 4, "hidden_dropout": 0.0}"""
tp, pp, stage, steps = map(int, sys.argv[1:5])
load, save, data, more = sys.argv[5:9]
rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
options = json.loads(OPTIONS) | json.loads(more) | {f"{name}_data_paths": [data] for name in ("train", "valid", "test")}
options |= {"pipe_parallel_size": pp, "model_parallel_size": tp, "zero_optimization": {"stage": stage}}
options |= {"gradient_accumulation_steps": 4 * tp * pp // world_size, "exit_interval": steps, "save": save}
neox_args = NeoXArgs.from_dict(options | ({} if load == "none" else {"load": load}))
neox_args.rank, neox_args.local_rank, neox_args.world_size = rank, local_rank, world_size
neox_args.configure_distributed_args()
neox_args.build_tokenizer()
pretrain(neox_args=neox_args)

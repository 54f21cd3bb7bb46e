"""``train_neox.py TP PP STAGE STEPS LOAD SAVE DATA ARGUMENTS``: trains a small model with gpt-neox.

LOAD may be "none"; ARGUMENTS: a JSON object of gpt-neox's arguments.
"""

import json
import os
import sys

from megatron.neox_arguments import NeoXArgs
from megatron.training import pretrain

tp, pp, stage, steps = map(int, sys.argv[1:5])
load, save, data, more = sys.argv[5:9]
world = int(os.environ["WORLD_SIZE"])
neox_args = NeoXArgs.from_dict(
    {
        "pipe_parallel_size": pp,
        "model_parallel_size": tp,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "norm": "layernorm",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "weight_decay": 0.1,
        "attention_config": [[["global"], 4]],
        "make_vocab_size_divisible_by": 8,
        "tokenizer_type": "CharLevelTokenizer",
        "vocab_file": "none",
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}},
        "lr_decay_style": "cosine",
        "min_lr": 1e-3,
        "warmup": 0.0,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "precision": "bfloat16",
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8 // (2 * (world // (tp * pp))),
        "train_iters": 12,
        "lr_decay_iters": 12,
        "eval_iters": 0,
        "eval_interval": 1000,
        "log_interval": 1,
        "steps_per_print": 1,
        "use_wandb": False,
        "distributed_backend": "gloo",
        "data_impl": "mmap",
        **{f"{split}_data_paths": [data] for split in ("train", "valid", "test")},
        "load": None if load == "none" else load,
        "save": save,
        "checkpoint_factor": 4,
        "exit_interval": steps,
        **json.loads(more),
    }
)
neox_args.rank, neox_args.local_rank, neox_args.world_size = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), world
neox_args.configure_distributed_args()
neox_args.build_tokenizer()
pretrain(neox_args=neox_args)

"""Megatron Core's GPTModel in DeepSpeed's engine. It goes on at any tensor- and data-parallel degree and ZeRO stage.

torchrun --nproc_per_node 2 examples/megatron_core.py --tensor_parallel 2 --save_dir saved
torchrun --nproc_per_node 3 examples/megatron_core.py --tensor_parallel 1 --resume_from saved
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec as layers
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig

import elastic_ckpt.megatron

GLOBAL_BATCH, STEPS, SAVE_AT, VOCABULARY, LENGTH = 12, 8, 4, 64, 16
CONFIG = {
    "train_batch_size": GLOBAL_BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # else, on CPU, DeepSpeed compiles an Adam of its own
}


def build(tensor_parallel: int) -> GPTModel:
    """Two layers in the style of Llama."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    initialize_rng_tracker(inference_rng_tracker=True)  # there is no dropout, for which it would be
    if not torch.cuda.is_available():  # Megatron Core asks CUDA for the device of its buffers
        torch.cuda.current_device = lambda: torch.device("cpu")
    size = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64}
    llama = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    plain = {"add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False}
    parallel = {"tensor_model_parallel_size": tensor_parallel, "use_cpu_initialization": True}
    torch.manual_seed(1)
    config = TransformerConfig(**size, **llama, **plain, **parallel)
    return GPTModel(config, layers(normalization="RMSNorm"), VOCABULARY, LENGTH, position_embedding_type="rope")


def loss_of(engine: deepspeed.DeepSpeedEngine, step: int) -> torch.Tensor:
    """Of this rank's share of a step's global batch, which is that of its whole tensor-parallel group."""
    starts = torch.randint(VOCABULARY, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = ((starts + torch.arange(LENGTH + 1)) % VOCABULARY)[rank::ranks].to(engine.device)
    positions = torch.arange(LENGTH, device=rows.device).expand(len(rows), -1)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=rows.device).triu(1)
    return engine(rows[:, :-1].contiguous(), positions, hidden, labels=rows[:, 1:].contiguous()).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor_parallel", type=int, required=True, help="ranks that share a layer")
    parser.add_argument("--save_dir")
    parser.add_argument("--resume_from")
    options = parser.parse_args()
    elastic_ckpt.install()
    deepspeed.init_distributed()
    model, mpu = build(options.tensor_parallel), elastic_ckpt.megatron.mpu()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), mpu=mpu, config=CONFIG)
    if options.resume_from:
        engine.load_checkpoint(options.resume_from)
    for step in range(engine.global_steps + 1, STEPS + 1):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        deepspeed.comm.all_reduce(mean := loss.detach() / engine.world_size)
        if engine.global_rank == 0:
            print(f"step {step}: loss {mean.item():.6f}")
        if options.save_dir and step == SAVE_AT:
            engine.save_checkpoint(options.save_dir)


if __name__ == "__main__":
    main()

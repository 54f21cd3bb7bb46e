"""All that the benchmarks use of DeepSpeed's (0.19) private parts.

The pieces of an engine come from DeepSpeed's own maps, not from elastic_ckpt: what a load restored is judged by them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a parameter: elements ``start`` to ``start + numel``, at ``offset`` of a flat partition."""

    name: str
    start: int
    numel: int
    flat: int
    offset: int


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The optimizer inside ZeRO's."""
    return engine.optimizer.optimizer


def masters(engine: Any) -> list[torch.Tensor]:
    """This rank's flat fp32 partitions."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def pieces(engine: Any) -> list[Piece]:
    """What this rank holds of every parameter."""
    if engine.zero_optimization_stage() == 3:
        return list(_pieces_of_zero3(engine))
    return list(_pieces_of_zero12(engine))


def _pieces_of_zero3(engine: Any) -> Iterator[Piece]:
    rank = dist.get_rank()
    for name, param in engine.module.named_parameters():
        flat, offset, _ = engine.optimizer.grad_position[engine.optimizer.get_param_id(param)]
        step = param.ds_tensor.ds_numel
        numel = min(step, param.ds_numel - rank * step)
        if numel > 0:
            yield Piece(name, rank * step, numel, flat, offset)


def _pieces_of_zero12(engine: Any) -> Iterator[Piece]:
    for name, param in engine.module.named_parameters():
        mapping = param._hp_mapping
        if mapping is not None:
            there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Piece(name, there.start, there.numel, mapping.param_group_index, here.start)


def drop_states(engine: Any) -> None:
    """Forget the optimizer's states, and every reference that DeepSpeed keeps to their memory."""
    base_optimizer(engine).state.clear()
    if engine.zero_optimization_stage() == 3:
        return
    for param in engine.module.parameters():
        if param._hp_mapping is not None:
            param._hp_mapping.optim_fragment = {}
    engine.optimizer._hp_optimizer_states_linked = False


def link_states(engine: Any) -> None:
    """Let DeepSpeed's public getters find states that the optimizer has been given since it was built."""
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def low_precision(engine: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """What this rank holds of the low-precision weights: name, first element, flat tensor without padding.

    Of what ZeRO-3 keeps gathered, both the partition and the whole.
    """
    rank = dist.get_rank()
    for name, param in engine.module.named_parameters():
        if engine.zero_optimization_stage() < 3:
            yield name, 0, param.data.view(-1)
            continue
        start = rank * param.ds_tensor.ds_numel
        numel = max(min(param.ds_tensor.ds_numel, param.ds_numel - start), 0)
        yield name, start, param.ds_tensor.data.view(-1)[:numel]
        if param.ds_status == ZeroParamStatus.AVAILABLE:
            yield name, 0, param.data.view(-1)


def prefer_universal(engine: Any, wanted: bool) -> None:
    """``"checkpoint": {"load_universal": ...}`` of a live engine."""
    engine._config.load_universal_checkpoint = wanted


def set_elastic_options(engine: Any, **options: Any) -> None:
    """``"elastic_checkpoint": {...}`` of a live engine."""
    engine._config._param_dict["elastic_checkpoint"] = options


@contextmanager
def unchecked_for_duplicates() -> Iterator[None]:
    """Build engines without a check that looks for each parameter in the list of all: minutes for 10,000 of them."""
    check = DeepSpeedEngine._check_for_duplicates
    DeepSpeedEngine._check_for_duplicates = lambda self, optimizer: None
    try:
        yield
    finally:
        DeepSpeedEngine._check_for_duplicates = check


def set_saved_counters(engine: Any, steps: int) -> None:
    """Make an engine believe that it has trained."""
    engine.global_steps = steps
    engine.global_samples = steps * engine.train_batch_size()
    engine.micro_steps = steps


def believe_in_others(rank: int, world_size: int) -> None:
    """Make this process a rank of a job that has no others: torch's ``fake`` group answers collectives at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  it takes time to import

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # shared memory of all ranks

"""Accessors of a live ``DeepSpeedEngine``'s private attributes, its tensors apart. All are local."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


def base_optimizer(engine: Any) -> Any:
    """The user's optimizer, inside DeepSpeed's or by itself; ``None`` if there is none."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def has_optimizer(engine: Any) -> bool:
    """Whether a live engine has an optimizer; ``trainer.validate`` and the like create it without one."""
    base = base_optimizer(engine)
    return base is not None and not isinstance(base, (DummyOptim, DeepSpeedZeRoOffload))


def flat_master_numels(engine: Any) -> list[int] | None:
    """Elements of each flat fp32 master partition of this rank, padding included; ``None`` without ZeRO.

    The attributes are those of ZeRO-3, of ZeRO-1 and 2, and of ``BF16_Optimizer``.
    """
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    masters = next((getattr(engine.optimizer, name) for name in names if hasattr(engine.optimizer, name)), None)
    return None if masters is None else [master.numel() for master in masters]


def partition_group(engine: Any) -> Any:
    """The process group over which ZeRO-3 partitions an engine's parameters.

    With a device mesh for sequence parallelism it spans all ranks, unlike ``optimizer.dp_process_group``.
    """
    return next((param.ds_process_group for param in engine.param_names), engine.seq_data_parallel_group)


def dp_group_of(engine: Any) -> Any:
    """The process group over which the optimizer is partitioned, else the data-parallel group."""
    return getattr(engine.optimizer, "dp_process_group", None) or engine.seq_data_parallel_group


def keeps_own_masters(engine: Any) -> bool:
    """Whether an optimizer without ZeRO keeps fp32 masters beside fp16 or bf16 weights."""
    return hasattr(engine.optimizer, "refresh_fp32_params")


def numbered_params(engine: Any) -> list[list[torch.nn.Parameter]]:
    """Parameters by param group, as an optimizer without ZeRO numbers them."""
    groups = getattr(engine.optimizer, "fp16_groups", None)
    return [list(group) for group in groups or (group["params"] for group in base_optimizer(engine).param_groups)]


def holds_gradients(engine: Any) -> bool:
    """Whether accumulated gradients wait for a step; each optimizer has its own attribute for them."""
    if engine.zero_optimization_stage() == 0:
        return any(param.grad is not None for param in engine.module.parameters())
    partitions = getattr(engine.optimizer, "averaged_gradients", None) or {}
    in_bf16 = getattr(engine.optimizer, "fp32_groups_has_gradients", ())  # BF16_Optimizer
    return any(gradient is not None for gradient in partitions.values()) or any(any(group) for group in in_bf16)


def loss_scaler(engine: Any) -> Any:
    """The object that scales the loss; ``None`` if the engine does not train in fp16.

    A ``LossScaler`` or ``DynamicLossScaler`` of the partitioned optimizers, a ``LossScaleConfig`` of the others
    (loss_scaler.py), with the same fields.
    """
    if not engine.fp16_enabled():
        return None
    config = getattr(engine.optimizer, "loss_scale_config", None)
    return config if config is not None else getattr(engine.optimizer, "loss_scaler", None)


def separate_steps(engine: Any) -> None:
    """Give every flat tensor its own ``step``.

    DeepSpeed's universal load of ZeRO-3 (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``) puts one tensor into
    all of them, which torch's optimizers then advance once for each.
    """
    for state in getattr(base_optimizer(engine), "state", {}).values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def ds_config(engine: Any) -> Mapping[str, Any]:
    """The engine's DeepSpeed config as a dict, unknown top-level keys included."""
    return engine._config._param_dict or {}


def zero_param_shapes(engine: Any) -> Sequence[Mapping[str, Any]]:
    """Names and shapes in each flat buffer of a ZeRO optimizer, as DeepSpeed saves them (``param_shapes``)."""
    shapes: Sequence[Mapping[str, Any]] = engine._get_zero_param_shapes()
    return shapes


def load_universal_flag(engine: Any) -> bool:
    """``"checkpoint": {"load_universal": true}`` in the DeepSpeed config."""
    return bool(engine.load_universal_checkpoint())


@contextmanager
def universal_flag(engine: Any, value: bool) -> Iterator[None]:
    """Set ``load_universal`` to what the folder holds while DeepSpeed's own loader runs."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = value
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before

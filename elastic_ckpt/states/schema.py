"""The states that each supported optimizer keeps for one flat tensor.

A state is *elementwise* (one value an element, cut like the parameter) or *scalar* (one value for the tensor,
``step``). Optimizers that are not listed here are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ckpt.errors import UnsupportedError

_DEEPSPEED_ADAMS = ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", "deepspeed.ops.adam.fused_adam.FusedAdam")

ScalarMaker = Callable[[float, Mapping[str, Any], torch.Tensor], Any]


@dataclass(frozen=True)
class StateSchema:
    """States of one optimizer.

    Attributes:
        optimizer: its class name.
        elementwise: names of its elementwise states, sorted.
        scalars: names of its scalar states, sorted.
        make_scalar: builds a scalar state's live form from (value, param group, flat tensor); a new object at each
            call, since optimizers update it in place.
    """

    optimizer: str
    elementwise: tuple[str, ...]
    scalars: tuple[str, ...]
    make_scalar: ScalarMaker


def schema_of(optimizer: torch.optim.Optimizer) -> StateSchema:
    """The schema of a live base optimizer.

    Raises:
        UnsupportedError: its class is not listed, or its groups disagree on ``amsgrad``.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        amsgrad = {bool(group.get("amsgrad")) for group in optimizer.param_groups}
        if amsgrad == {True, False}:
            raise UnsupportedError(f"{name} with amsgrad in some param groups only is not supported yet")
        extra = ("max_exp_avg_sq",) if amsgrad == {True} else ()
        return StateSchema(name, ("exp_avg", "exp_avg_sq", *extra), ("step",), _tensor_step)
    if name in _DEEPSPEED_ADAMS:
        return StateSchema(name, ("exp_avg", "exp_avg_sq"), ("step",), _int_step)
    raise UnsupportedError(
        f"the states of optimizer {name} are not known yet",
        expected="torch.optim.Adam, torch.optim.AdamW, DeepSpeedCPUAdam or DeepSpeed's FusedAdam",
        found=name,
        remedy="load at the topology it was saved with, or with load_optimizer_states=False",
    )


def unknown_states(optimizer: torch.optim.Optimizer) -> StateSchema:
    """The schema to use where states are left alone: it names no state at all."""
    kind = type(optimizer)
    return StateSchema(f"{kind.__module__}.{kind.__qualname__}", (), (), _int_step)


def _tensor_step(value: float, group: Mapping[str, Any], flat: torch.Tensor) -> torch.Tensor:
    """As ``torch.optim.adam._init_group`` makes it: on the parameter's device only for capturable and fused."""
    on_device = group.get("capturable") or group.get("fused")
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    dtype = torch.float64 if wide else torch.float32
    return torch.tensor(float(value), dtype=dtype, device=flat.device if on_device else "cpu")


def _int_step(value: float, group: Mapping[str, Any], flat: torch.Tensor) -> int:
    return int(value)

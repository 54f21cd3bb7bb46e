"""Hyperparameters of saved param groups, in one form whatever optimizer saved them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_ckpt.formats.pickled import PickledFile, materialise

_STEP = "step"
_NOT_READ = ("params", "param_names")
Groups = tuple[Mapping[str, Any], ...]
Scalars = tuple[tuple[str, float], ...]


def read_groups(file: PickledFile, param_groups: Iterable[Mapping[str, Any]]) -> Groups:
    """Hyperparameters of every param group; tensors (a capturable ``lr``) become Python numbers."""
    groups = []
    for group in param_groups:
        values = materialise(file, {key: value for key, value in group.items() if key not in _NOT_READ})
        groups.append({key: value.item() if hasattr(value, "item") else value for key, value in values.items()})
    return tuple(groups)


def with_group_step(scalars: Scalars, has_states: bool, group: Mapping[str, Any]) -> Scalars:
    """Scalar states of a parameter; NVIDIA apex's FusedAdam counts steps in the param group (``fused_adam.py``)."""
    counts = _is_fused(group) and has_states and _STEP not in dict(scalars) and isinstance(group.get(_STEP), int)
    return tuple(sorted((*scalars, (_STEP, group[_STEP])))) if counts else scalars


def normal_groups(groups: Sequence[Mapping[str, Any]], is_bitsandbytes: bool) -> Groups:
    """Groups without the step count where it is a state; bitsandbytes' kind of weight decay told as torch tells it."""
    decoupled = {"decoupled_weight_decay": True} if is_bitsandbytes else {}
    return tuple(
        {**{k: v for k, v in group.items() if k != _STEP or not _is_fused(group)}, **decoupled} for group in groups
    )


def _is_fused(group: Mapping[str, Any]) -> bool:
    """DeepSpeed's and apex's fused optimizers; others may count steps in the group for purposes of their own."""
    return "bias_correction" in group

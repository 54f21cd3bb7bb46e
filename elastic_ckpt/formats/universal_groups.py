"""Param groups of universal checkpoints: which group each of ZeRO's flat tensors is in.

``param_shapes`` of a model-states file lists the parameters of each flat tensor, and ``zero/optimizer_state.pt`` the
numbers of flat tensors in each param group: the files of one conversion agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import DamagedError, listed
from elastic_ckpt.formats.base import CONVERT_AGAIN
from elastic_ckpt.formats.model_states import ModelShard

_PROBLEM = "the param groups of the universal checkpoint are not those of its model-states files"
_REMEDY = f"files of two conversions are mixed, or one is damaged: {CONVERT_AGAIN}, or load the native checkpoint"


def group_of_flats(members: Sequence[Sequence[int]], models: Sequence[ModelShard], path: str) -> Mapping[int, int]:
    """The param group of each flat tensor.

    Args:
        members: per param group, the numbers of its flat tensors.
        models: the model-states files of all model-parallel ranks.
        path: of the optimizer's file.

    Raises:
        DamagedError: a flat tensor is in two groups, in none though it has parameters, or in no model-states file.
    """
    group_of: dict[int, int] = {}
    for number, flats in enumerate(members):
        for flat in flats:
            if flat in group_of:
                expected = "each flat tensor in one param group"
                found = f"number {flat} in param groups {group_of[flat]} and {number}"
                raise DamagedError(_PROBLEM, path, expected, found, remedy=_REMEDY)
            group_of[flat] = number
    most = max((len(model.param_shapes) for model in models), default=0)
    if unknown := [flat for flat in group_of if flat >= most]:
        expected = f"numbers of {counted(most, 'flat tensor')}, as param_shapes in {models[0].path} lists"
        found = f"number {unknown[0]} in param group {group_of[unknown[0]]}"
        raise DamagedError(_PROBLEM, path, expected, found, remedy=_REMEDY)
    for model in models:
        for flat, named_shapes in enumerate(model.param_shapes):
            if named_shapes and flat not in group_of:
                names = [name for name, _ in named_shapes]
                expected = f"flat tensor {flat} in a param group, which has " + listed(names) + f" by {model.path}"
                found = f"{counted(len(members), 'param group')} without it"
                raise DamagedError(_PROBLEM, path, expected, found, parameter=names, remedy=_REMEDY)
    return group_of

"""Features in a checkpoint's files that only DeepSpeed's own loader restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core.training_state import ONE_BIT_OPTIMIZERS, Features
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_config import config_section

_ONE_BIT_STATES = {"worker_error", "server_error", "momentum_accumulator", "lamb_coeff_freeze", "scaling_coeff"}


def features_in(file: PickledFile) -> Features:
    """The features of a model-states or optimizer-states file. Local."""
    tree = file.tree if isinstance(file.tree, Mapping) else {}
    experts = tree.get("num_experts") or ()
    states = _base_state(file).get("state")
    keys = [set(each) for each in states.values() if isinstance(each, Mapping)] if isinstance(states, Mapping) else []
    optimizer = str(config_section(file, "optimizer").get("type", "")).lower()
    mics = config_section(file, "zero_optimization").get("mics_shard_size", 0)
    return Features(
        experts=tuple(experts) if isinstance(experts, (list, tuple)) else (experts,),
        expert_groups=tuple(sorted({str(group.get("name")) for group in base_groups(file) if group.get("moe")})),
        one_bit=optimizer in ONE_BIT_OPTIMIZERS or any(_ONE_BIT_STATES & each for each in keys),
        mics=max(mics, 0) if isinstance(mics, int) else 0,
    )


def base_groups(file: PickledFile) -> list[Mapping[str, Any]]:
    """The base optimizer's param groups in a file; empty without an optimizer."""
    return [group for group in _base_state(file).get("param_groups") or () if isinstance(group, Mapping)]


def _base_state(file: PickledFile) -> Mapping[str, Any]:
    """The base optimizer's ``state_dict``, wherever the ZeRO stage puts it."""
    tree = file.tree if isinstance(file.tree, Mapping) else {}
    state = tree.get("optimizer_state_dict", tree.get("optimizer"))
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    return state if isinstance(state, Mapping) else {}


def refuse_features(features: Features, file: str) -> None:
    """Raise :class:`UnsupportedError` for what cannot be restored at another topology, by name."""
    if features.names:
        raise UnsupportedError(
            f"the checkpoint was saved with {features.names}, whose parameters or states are not laid out as ZeRO's "
            "and cannot be cut for another topology yet",
            file=file,
            expected="a run of plain ZeRO",
            found=features.names,
            remedy="resume it with the number of ranks, the layout and the optimizer that saved it",
        )

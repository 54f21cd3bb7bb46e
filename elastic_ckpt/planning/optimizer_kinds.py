"""Infers a checkpoint's optimizer from states and hyperparameters: DeepSpeed saves neither class nor name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_ckpt.core.local_state import FlatPartition, LocalState
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.state_kinds import SCRATCH
from elastic_ckpt.errors import MismatchError, listed

#: Family -> the names its members give to the same states.
_FAMILIES: Mapping[str, tuple[tuple[str, ...], ...]] = {"adam": (("exp_avg", "exp_avg_sq"), ("state1", "state2"))}
#: Hyperparameters that distinguish kinds of optimizers.
_MARKS = frozenset(
    {"betas", "momentum", "dampening", "nesterov", "rho", "centered", "lr_decay", "etas", "lambd"}
    | {"beta2_decay", "ns_steps", "ns_method", "momentum_decay", "initial_accumulator_value", "eps", "use_muon", "d"}
)
#: Values that an optimizer without these hyperparameters implies.
_USUAL = {"maximize": False, "bias_correction": True}
_ADAM_MARKS = frozenset({"amsgrad", "bias_correction"})
OTHER_OPTIMIZER = "resume with the optimizer that saved it, or with load_optimizer_states=False"
#: State of bitsandbytes' LAMB and LARS only: the norm of an update.
UPDATE_NORM = "unorm_vec"


def renamed_states(
    metadata: CheckpointMetadata, local_state: LocalState, name: str, saved: frozenset[str], live: frozenset[str]
) -> Mapping[str, str] | None:
    """Live state -> saved state, if both optimizers are of one family and name states differently; else ``None``."""
    parameter = metadata.parameters[name]
    tensors = [metadata.tensors.get((name, key)) for key in saved]  # members of one flat tensor may differ in states
    plain = all(tensor is None or tensor.shape == parameter.shape for tensor in tensors)
    if not plain or any(state.key == UPDATE_NORM for state in parameter.replicated):
        return None
    if saved == set(_FAMILIES["adam"][0]) and not _is_adam(metadata.groups[parameter.group]):
        return None  # another optimizer with states of these names
    spellings = _FAMILIES.get(local_state.family or "", ())
    theirs = next((names for names in spellings if set(names) == saved), None)
    ours = next((names for names in spellings if set(names) == live), None)
    return None if theirs is None or ours is None else dict(zip(ours, theirs, strict=True))


def refuse_lost_choices(
    metadata: CheckpointMetadata, local_state: LocalState, flat: FlatPartition, members: Sequence[str]
) -> None:
    """Refuse a hyperparameter that only one Adam has, unless its value is the other's (:class:`MismatchError`)."""
    live = _hyperparameters(local_state, flat)
    for number in sorted({metadata.parameters[name].group for name in members}):
        saved = metadata.groups[number]
        for key, usual in _USUAL.items():
            if saved and live and (key in saved) != (key in live) and bool({**live, **saved}[key]) != usual:
                problem = f'"{key}" of param group {number} cannot be expressed in the other optimizer'
                expected, found = (group.get(key, f"{usual}, always") for group in (live, saved))
                both = f"{expected} (live optimizer {local_state.optimizer})", f"{found} in the checkpoint"
                raise metadata.error(MismatchError, problem, members, *both, OTHER_OPTIMIZER)


def saved_optimizer(metadata: CheckpointMetadata) -> str:
    """The optimizer that saved a checkpoint, for messages."""
    return optimizer_of(metadata.state_keys, metadata.groups[0] if metadata.groups else {})


def optimizer_of(keys: Sequence[str], group: Mapping[str, Any]) -> str:
    """The optimizer with these tensor states and hyperparameters, for messages."""
    if {"state1"} <= set(keys):
        return f"a bitsandbytes optimizer with {listed(keys)}"
    if set(keys) == {"exp_avg", "exp_avg_sq"} and _is_adam(group):
        if "bias_correction" in group:
            return "DeepSpeed's or apex's Adam"
        return "torch.optim.AdamW" if group.get("decoupled_weight_decay") else "torch.optim.Adam"
    return f"an optimizer with {listed(keys) or 'no tensor states'}"


def refuse_other_kind(
    metadata: CheckpointMetadata, local_state: LocalState, flat: FlatPartition, members: Sequence[str]
) -> None:
    """Refuse states that, by the hyperparameters, another kind of optimizer saved (:class:`MismatchError`)."""

    def other_kind(live: Iterable[str], saved: Iterable[str]) -> MismatchError:
        problem = "the checkpoint was saved by another kind of optimizer, whose states have the same names"
        expected = f"{listed(live) if live else 'nothing'} (live optimizer {local_state.optimizer})"
        found = listed(saved) if saved else "nothing"
        return metadata.error(MismatchError, problem, members, expected, found, OTHER_OPTIMIZER)

    own = _hyperparameters(local_state, flat)
    live = {key: value for key, value in own.items() if key in local_state.defaults or not local_state.defaults}
    for number in sorted({metadata.parameters[name].group for name in members}):
        saved = metadata.groups[number]
        if not saved:  # as in BLOOM's universal checkpoint, which a note reports
            continue
        if "use_muon" in own and "use_muon" in saved:  # its Adam half takes over what its helper optimizer knows
            continue
        # a user may have added entries that the optimizer does not know
        adams = _is_adam(saved) and (_is_adam(live) or bool(_ADAM_MARKS & (set(saved) - set(live))))
        unlike = not _MARKS & set(live) <= set(saved) or ("eps" in saved and "eps" not in live)
        if adams != _is_adam(live) or (unlike and not adams):
            raise other_kind(live, list(map(str, saved)))
    replicated = {state.key for state in metadata.parameters[members[0]].replicated}
    scratch = {state.key for state in flat.states or () if state.layout == SCRATCH}
    if (UPDATE_NORM in replicated) != (UPDATE_NORM in scratch) and flat.states is not None:
        raise other_kind(scratch, replicated)


def _hyperparameters(local_state: LocalState, flat: FlatPartition) -> Mapping[str, Any]:
    return local_state.groups[flat.group].hyperparameters if flat.group < len(local_state.groups) else {}


def _is_adam(group: Mapping[str, Any]) -> bool:
    return "betas" in group and "eps" in group and bool(_ADAM_MARKS & set(group))

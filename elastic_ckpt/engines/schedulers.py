"""A saved lr scheduler for param groups that were rebuilt. Pure.

Schedulers keep their rates by position of the param group. Where groups were merged, split or put in another order,
each of these lists is put together anew, entry by entry, from the saved group that the live one takes its
hyperparameters from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.errors import MismatchError

#: Lists with one entry for each param group, in the state dicts of ``torch.optim.lr_scheduler`` and of DeepSpeed.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "eta_mins"}
)
#: Lists of anything else.
_NOT_PER_GROUP = frozenset({"_milestones", "milestones", "_schedule_phases"})
#: Lists of the state dicts of schedulers inside.
_NESTED = frozenset({"_schedulers"})


def fit_scheduler(
    saved: Mapping[str, Any], live: Mapping[str, Any], sources: Sequence[Sequence[int]], saved_groups: int
) -> dict[str, Any]:
    """The saved state dict of a scheduler, with its lists in the order of the live param groups.

    Args:
        saved: state dict from the checkpoint.
        live: state dict of the live scheduler: gives the entries of groups without a source.
        sources: per live group, the saved groups it takes its hyperparameters from.
        saved_groups: number of param groups in the checkpoint.

    Raises:
        MismatchError: a list of which it is not known whether it goes by param group, or merged groups for which the
            scheduler had different plans.
    """
    if [tuple(source) for source in sources] == [(number,) for number in range(saved_groups)]:
        return dict(saved)
    fitted: dict[str, Any] = {}
    for key, value in saved.items():
        if key in _NESTED:
            inner = [*(live.get(key) or ()), *({} for _ in value)]
            fitted[key] = [
                fit_scheduler(state, now, sources, saved_groups) for state, now in zip(value, inner, strict=False)
            ]
        elif key in _PER_GROUP and isinstance(value, (list, tuple)):
            fitted[key] = _reorder(key, value, live.get(key), sources, saved_groups)
        elif key not in _NOT_PER_GROUP and _may_go_by_group(value, saved_groups):
            raise _unknown(key, value, f"{key!r} has as many entries as there were groups")
        else:
            fitted[key] = value
    return fitted


def _may_go_by_group(value: Any, saved_groups: int) -> bool:
    """Whether anything in a value, at any depth, has as many entries as there were groups."""
    if isinstance(value, Mapping):
        numbered = len(value) == saved_groups and all(isinstance(key, int) for key in value)
        return numbered or any(_may_go_by_group(inner, saved_groups) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return len(value) == saved_groups or any(_may_go_by_group(inner, saved_groups) for inner in value)
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))  # of a tensor or an array
    return bool(shape) and shape[0] == saved_groups


def _reorder(
    key: str, saved: Sequence[Any], live: Any, sources: Sequence[Sequence[int]], saved_groups: int
) -> list[Any]:
    if len(saved) != saved_groups:
        raise _unknown(key, saved, f"{saved_groups} entries, one for each saved group")
    if not all(sources) and (not isinstance(live, (list, tuple)) or len(live) != len(sources)):
        raise _unknown(key, live, f"the live scheduler has {len(sources)} entries, one for each live group")
    for merged in sources:
        if any(saved[source] != saved[merged[0]] for source in merged):
            raise _unknown(key, [saved[source] for source in merged], f"one value for merged groups {list(merged)}")
    return [saved[source[0]] if source else live[number] for number, source in enumerate(sources)]


def _unknown(key: str, value: Any, expected: str) -> MismatchError:
    return MismatchError(
        "param groups were rebuilt since the save, and it is not known how this lr scheduler keeps its state by group",
        expected=expected,
        found=f"{key}: {value!r}"[:200],
        remedy="build the groups as they were saved, or load with load_lr_scheduler_states=False",
    )

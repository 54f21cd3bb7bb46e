"""Hyperparameters of the live run that the saved ones replace: maybe changed on purpose, which a load undoes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.read_plan import SchedulerPlan
from elastic_ckpt.core.values import PerRank, TensorValue
from elastic_ckpt.planning.param_groups import with_first_beta

#: What optimizers count or estimate in their param groups as they step, and begin anew in a new one.
_OF_STEPS = frozenset(
    {"step", "k", "d", "d_max", "d_hat", "d_numerator", "d_denom", "weight_sum", "lr_max", "lr_sum"}
    | {"scheduled_lr", "train_mode", "n_avg", "sk_l1", "gsq_weighted", "numerator_weighted"}
)
_LR = "lr"
_INITIAL = "initial_lr"


def describe_replaced(
    local_state: LocalState, hyperparameters: Sequence[Mapping[str, Any]], scheduler: SchedulerPlan
) -> str:
    """In words, which live values are replaced, and the config lines that keep those that some keep; empty if none is.

    ``hyperparameters``: per live group, the values to set; a restored ``scheduler`` sets some anyway.
    """
    known = (local_state.defaults | {_INITIAL}) - _OF_STEPS - scheduler.sets
    numbers: dict[str, list[int]] = {}
    keys = set[str]()
    for number, (group, values) in enumerate(zip(local_state.groups, hyperparameters, strict=False)):
        live = group.hyperparameters
        saved = dict(values)
        if scheduler.sets_first_beta and "betas" in live and "betas" in saved:
            saved["betas"] = with_first_beta(live["betas"], saved["betas"])
        # an engine may not know of its schedule, which torch's mark with this value
        changed = dict(_changed(live, saved, known - {_LR} if _INITIAL in live else known))
        keys |= changed.keys()
        if changed:
            numbers.setdefault(", ".join(changed.values()), []).append(number)
    if not numbers:
        return ""
    where = "; ".join(f"{text} (param groups {', '.join(map(str, at))})" for text, at in numbers.items())
    keep_all = '"elastic_checkpoint": {"param_groups": "keep_live"}'
    text = f"saved hyperparameters replace those of the live run (live -> saved): {where}"
    single = sorted(keys - {_INITIAL})
    ways = []
    if single:
        ways.append(f'"elastic_checkpoint": {{"states": {json.dumps(dict.fromkeys(single, "fresh"))}}}')
    if single or scheduler.is_restored:
        ways.append(f"{keep_all} for all hyperparameters")
    if ways:
        which = f"the live {', '.join(single)}" if single and _INITIAL in keys else "the live ones"
        text += f"; to keep {which}: {', or '.join(ways)}"
    if _INITIAL in keys and not scheduler.is_restored:
        text += f"; {_INITIAL} is in the state of the schedule outside of the engine, too, which continues from that"
    return text


def _changed(live: Mapping[str, Any], saved: Mapping[str, Any], known: Set[str]) -> Iterator[tuple[str, str]]:
    for key in sorted(known & live.keys() & saved.keys()):
        mine = _plain(live[key])
        other = _plain(saved[key])
        if mine is not None and other is not None and mine != other:
            yield key, f"{key} {live[key]} -> {saved[key]}"


def _plain(value: Any) -> Any:
    """A value that can be compared: a number, a text, or a list of them; ``None``: it is of another kind."""
    if isinstance(value, (list, tuple)):
        elements = [_plain(each) for each in value]
        return None if None in elements else elements
    if isinstance(value, (PerRank, TensorValue)) or not isinstance(value, (bool, int, float, str)):
        return None
    return value

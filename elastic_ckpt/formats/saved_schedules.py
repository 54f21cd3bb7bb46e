"""What the files of one save cannot differ in of the lr scheduler's state, of which ZeRO-3 writes one a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ckpt.core.values import is_number

#: What no rank changes by itself, as some do a rate or the best of a metric: the rates that a schedule starts from, and
#: how far it went, in torch's schedulers and in DeepSpeed's.
_OF_ALL_RANKS = frozenset({"base_lrs", "last_epoch", "last_batch_iteration", "_step_count", "total_steps"})
#: Schedulers in schedulers, as SequentialLR keeps them.
_MOST_DEPTH = 4
#: A path in the state, and a number or numbers.
Fact = tuple[str, Any]


def schedule_facts(state: Any) -> tuple[Fact, ...] | None:
    """The facts of a scheduler's state that are the same on all ranks; ``None`` without a scheduler."""
    if state is None:
        return None
    return tuple(_facts(state, "", 0, set()))


def _facts(state: Any, above: str, depth: int, seen: set[int]) -> Iterator[Fact]:
    if depth > _MOST_DEPTH or id(state) in seen:
        return
    seen.add(id(state))
    if isinstance(state, Mapping):
        entries = [*state.items()]
    elif isinstance(state, (list, tuple)):
        entries = [*enumerate(state)]
    else:
        return
    for key, value in entries:
        path = f"{above}{str(key)[:40]} / "
        if key in _OF_ALL_RANKS:
            values = value if isinstance(value, (list, tuple)) else [value]
            yield path, [each if is_number(each) else type(each).__name__ for each in values]
        else:
            yield from _facts(value, path, depth + 1, seen)

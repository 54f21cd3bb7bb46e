"""What a scheduler and its param groups were before a state was loaded, and how they become that again. Local."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_ckpt.core.logs import logger_of

logger = logger_of(__name__)


def state_and_undo(scheduler: Any, groups: Sequence[dict[str, Any]]) -> tuple[Any, Callable[[], None]]:
    """A copy of an lr scheduler's state, and what gives it and the param groups theirs back, live tensors in place."""
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    live: list[Any] = [state, *({key: value for key, value in group.items() if key != "params"} for group in groups)]
    tensors = list(_tensors_in(live))
    elements = [tensor.detach().clone() for tensor in tensors]
    before, *values = copy.deepcopy(live, {id(tensor): tensor for tensor in tensors})

    def undo() -> None:
        try:
            scheduler.load_state_dict(before)
        except Exception:  # a scheduler that cannot load even its own state; the first error is the one to show
            logger.exception("elastic_ckpt could not restore the state of the lr scheduler")
        for tensor, saved in zip(tensors, elements, strict=True):
            tensor.detach().copy_(saved)
        for group, kept in zip(groups, values, strict=True):
            group.update(kept)

    return before, undo


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors_in(value)

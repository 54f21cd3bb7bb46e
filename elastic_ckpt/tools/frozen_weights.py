"""Frozen weights that a save has left out, such as the base model of an adapter."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ckpt.core.metadata import FROZEN, WEIGHTS, CheckpointMetadata
from elastic_ckpt.core.quantized_weights import weight_of

#: A parameter of LoRA, after the name of the module that it adapts.
_ADAPTER = re.compile(r"(?:(.*?)\.)?lora_\w+")
_REASON = ": it was saved without them (exclude_frozen_parameters=True)"


@dataclass(frozen=True)
class FrozenLeftOut:
    """That a checkpoint lacks frozen weights, and why that is known."""

    is_certain: bool  # it has adapters without the modules that they adapt; else the model may have none
    reason: str

    @property
    def what(self) -> str:
        """The weights, in words."""
        return "the frozen weights" if self.is_certain else "frozen weights, if the model has any,"

    def __str__(self) -> str:
        return f"{self.what} are not in this checkpoint{self.reason}"


def frozen_left_out(metadata: CheckpointMetadata) -> FrozenLeftOut | None:
    """What is known of frozen weights that the save has left out.

    ZeRO-2 and 3 list frozen parameters, even if there are none, unless they are excluded. Below, only an adapter shows
    that there were some.
    """
    source = metadata.source
    if source.frozen_recorded and not source.foreign:
        return None
    weights = {name for name, key in metadata.tensors if key in WEIGHTS and weight_of(name) is None}
    if _has_adapter_alone(weights.union(metadata.aliases)):
        return FrozenLeftOut(True, "" if source.foreign else _REASON)
    has_frozen = any(weight_of(name) is None for name in metadata.names(FROZEN))
    if has_frozen or source.foreign or source.zero_stage < 2:
        return None
    return FrozenLeftOut(False, _REASON)


def _has_adapter_alone(names: Iterable[str]) -> bool:
    """Whether an adapter's parameter is there, and no other weight of the module that it adapts."""
    adapted: set[str] = set()
    others: list[str] = []
    for name in names:
        if (adapter := _ADAPTER.match(name)) is not None:
            adapted.add(adapter[1] or "")
        else:
            others.append(name)
    others.sort()
    return not all(_has_below(others, module) for module in adapted)


def _has_below(names: Sequence[str], module: str) -> bool:
    """Whether one of some sorted names is of a module, or of one inside of it; empty: of the model."""
    prefix = f"{module}." if module else ""
    place = bisect_left(names, prefix)
    return place < len(names) and names[place].startswith(prefix)

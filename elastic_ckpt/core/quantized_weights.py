"""Entries of a state dict that describe how a frozen weight is quantized, and belong to it. Pure.

bitsandbytes keeps a weight of 4 bits beside ``<weight>.absmax``, ``.quant_map``, ``.nested_*`` and ``.quant_state.*``,
and one of 8 bits beside ``<module>.SCB`` and ``<module>.weight_format`` (``Linear4bit`` and ``Linear8bitLt`` of
bitsandbytes). They are neither parameters nor buffers, so DeepSpeed saves them also where it leaves the weight out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

_OF_WEIGHT = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = "quant_state"
_OF_MODULE = ("SCB", "weight_format")


def weight_of(entry: str) -> str | None:
    """The name of the weight that an entry describes, if its name is one of these."""
    owner, _, last = entry.rpartition(".")
    if last in _OF_MODULE and owner:
        return f"{owner}.weight"
    if last in _OF_WEIGHT and owner:
        return owner
    weight, separator, _ = entry.rpartition(f".{_STATE}.")
    return weight if separator else None


def described_weights(entries: Iterable[str], weights: Collection[str]) -> dict[str, str]:
    """Entry -> weight, of those that describe one of these weights."""
    pairs = ((entry, weight_of(entry)) for entry in entries)
    return {entry: weight for entry, weight in pairs if weight is not None and weight in weights}

"""Reads JSON of a checkpoint, which may take many times as much memory as its text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from elastic_ckpt.errors import UnsupportedError

#: Text that is read of a file at most: the largest header that the library of safetensors reads.
MOST_JSON_NBYTES = 100_000_000
#: Bytes that Python takes at most for what a sign begins or separates, and for a character, which may be a wide one.
_COSTS: Mapping[bytes, int] = MappingProxyType({b"{": 250, b"[": 90, b":": 160, b",": 70})
_COST_OF_ASCII, _COST_OF_OTHERS = 7, 10
_MOST_MEMORY_NBYTES = 1 << 30


def parse_json(text: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or has a key twice.
        UnsupportedError: it might take more than 1 GiB.
    """
    needed = len(text) * (_COST_OF_ASCII if text.isascii() else _COST_OF_OTHERS)
    needed += sum(cost * text.count(sign) for sign, cost in _COSTS.items())
    if needed > _MOST_MEMORY_NBYTES:
        raise UnsupportedError(
            "this file has more JSON than is read",
            expected=f"JSON that takes at most {_MOST_MEMORY_NBYTES} bytes of memory",
            found=f"{len(text)} bytes of text, which may take {needed}",
            remedy="save fewer tensors in one file",
        )
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("two entries of one name")
    return found

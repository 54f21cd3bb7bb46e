"""Refuses bytes in what modules keep beside parameters and buffers (``get_extra_state``).

A module's ``set_extra_state`` may unpickle them with all that a pickle may do: Transformer Engine's does, of a tensor
of uint8 or of an ``io.BytesIO`` (its ``module/base.py``). Whether bytes are a pickle cannot be told from the bytes, so
those of a file that is not trusted are given to no module.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.errors import Remedy, UnsafePickleError

_BYTES = (bytes, bytearray, io.BytesIO)


def refuse_packed(path: str, entries: Mapping[Any, Any]) -> None:
    """Raise :class:`UnsafePickleError` for the first entry of extra state that has bytes.

    Args:
        path: of the file.
        entries: of a state dict, as this package's reader has made them.
    """
    for name, value in entries.items():
        if isinstance(name, str) and is_extra_state(name) and has_bytes(value):
            problem = "the extra state of a module (get_extra_state) has bytes, which the module may unpickle"
            expected = "tensors, numbers, texts and containers of them, which no module takes for a pickle"
            trusted = Remedy(when="if you trust whoever wrote the file", config={"trust_pickle": True})
            found = type(value).__name__
            raise UnsafePickleError(problem, path, expected, found, parameter=name, remedy=trusted)


def has_bytes(value: Any) -> bool:
    """Whether a value is or contains bytes, or is itself an array or a tensor of them."""
    import torch  # noqa: PLC0415  who makes values has it

    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.uint8, torch.int8) and value.numel() > 0
    if isinstance(value, np.ndarray):
        return value.dtype.itemsize == 1 and value.size > 0
    seen: set[int] = set()
    rest = [value]
    while rest:
        node = rest.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, _BYTES):
            return True
        rest += _parts_of(node)
    return False


def _parts_of(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return [*node.keys(), *node.values()]
    if isinstance(node, (list, tuple, set, frozenset)):
        return node
    return list(getattr(node, "__dict__", {}).values())

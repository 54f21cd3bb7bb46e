"""The header of a safetensors file, for writers that do not have all tensors in memory.

The format: :mod:`elastic_ckpt.formats.safetensors`. The library itself serializes whole tensors only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.formats.safetensors import DTYPES, METADATA
from elastic_ckpt.tools.logical import Whole

_ALIGNMENT = 8


def layout(tensors: Iterable[Whole], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and the byte offset of each tensor in the file.

    Tensors are in the library's order, by descending item size and then by name, so that each is aligned.
    """
    header: dict[str, object] = {METADATA: dict(metadata)}
    starts, position = {}, 0
    for tensor in sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.name)):
        starts[tensor.name] = position
        offsets = [position, position := position + tensor.nbytes]
        header[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    prefix = struct.pack("<Q", len(text)) + text
    return prefix, {name: len(prefix) + start for name, start in starts.items()}

"""The header of a safetensors file, for writers that do not have all tensors in memory.

The format is that of https://github.com/huggingface/safetensors#format (0.8.0): the header's length as a little-endian
64-bit integer, the header as JSON, and the tensors in row-major order, without gaps. The library itself serializes
whole tensors only.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elastic_ckpt.core.metadata import ITEMSIZE

METADATA = "__metadata__"
#: torch dtype -> its name in the format.
DTYPES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "complex64": "C64",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
    }
)
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: FQN, torch dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


def layout(entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and the byte offset of each tensor in the file.

    Tensors are in the library's order, by descending item size and then by name, so that each is aligned.
    """
    ordered = sorted(entries, key=lambda entry: (-ITEMSIZE[entry.dtype], entry.name))
    header: dict[str, object] = {METADATA: dict(metadata)}
    starts, position = {}, 0
    for entry in ordered:
        starts[entry.name] = position
        offsets = [position, position := position + entry.nbytes]
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    prefix = struct.pack("<Q", len(text)) + text
    return prefix, {name: len(prefix) + start for name, start in starts.items()}

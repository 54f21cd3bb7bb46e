"""The header of a safetensors file, for writers that do not have all tensors in memory.

The format is that of https://github.com/huggingface/safetensors#format (0.8.0): the header's length as a little-endian
64-bit integer, the header as JSON, and the tensors in row-major order, without gaps. The library itself serializes
whole tensors only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.tools.logical import Whole

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

"""Sizes and exact conversions of dtypes, by name, for code that does not import torch."""

from __future__ import annotations

from types import MappingProxyType

_BY_SIZE = {
    1: ("bool", "int8", "uint8"),
    2: ("float16", "bfloat16", "int16", "uint16"),
    4: ("float32", "int32", "uint32", "complex32"),
    8: ("float64", "int64", "uint64", "complex64"),
    16: ("complex128",),
}
_FLOAT8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
#: Bytes of one element.
ITEMSIZE = MappingProxyType(
    {name: size for size, names in _BY_SIZE.items() for name in names} | {f"float8_{kind}": 1 for kind in _FLOAT8}
)

_EXACT = {(source, target) for source in ("bfloat16", "float16") for target in ("float32", "float64")}
_EXACT.add(("float32", "float64"))

#: Conversions that round but keep the exponent range: nothing overflows or vanishes.
_ROUNDING = {("float32", "bfloat16"), ("float16", "bfloat16")}

_FLOATING = {"float64", "float32", "float16", "bfloat16"}


def converts_exactly(source: str, target: str) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or (source, target) in _EXACT


def converts_by_rounding(source: str, target: str) -> bool:
    """Whether ``target`` has the range of ``source`` at lower precision."""
    return (source, target) in _ROUNDING


def is_floating(dtype: str) -> bool:
    """Whether it is a floating-point dtype that torch converts to others."""
    return dtype in _FLOATING

"""Sizes and exact conversions of dtypes, by name: for code that must not touch torch."""

from __future__ import annotations

from types import MappingProxyType

#: Bytes of one element.
ITEMSIZE = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "bool": 1,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
    }
)

_EXACT = {
    ("bfloat16", "float32"),
    ("bfloat16", "float64"),
    ("float16", "float32"),
    ("float16", "float64"),
    ("float32", "float64"),
}

#: Conversions that round, and keep the range: no value becomes infinite or zero that is not next to it.
_ROUNDING = {("float32", "bfloat16"), ("float16", "bfloat16")}

_FLOATING = {"float64", "float32", "float16", "bfloat16"}


def converts_exactly(source: str, target: str) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or (source, target) in _EXACT


def converts_by_rounding(source: str, target: str) -> bool:
    """Whether ``target`` has the range of ``source`` and fewer digits."""
    return (source, target) in _ROUNDING


def is_floating(dtype: str) -> bool:
    """Whether it is a floating-point type that torch can convert to another one."""
    return dtype in _FLOATING

"""numpy arrays and scalars in untrusted pickles, rebuilt from their bytes.

numpy's own reconstruction hands the pickle's state to ``dtype.__setstate__``, which believes it: a hostile or damaged
state can spoil numpy's shared dtypes for the whole process. So a pickle meets these stand-ins instead, which take
plain numeric dtypes only and check sizes. :func:`finished` turns a stand-in into the array or scalar it stands for.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np

_NUMERIC = re.compile(r"[?biufc]\d{0,2}")


class DtypeStandIn:
    """Stands in for ``numpy.dtype(spec, align, copy)``."""

    def __init__(self, spec: Any = None, align: Any = False, copy: Any = True) -> None:
        self.spec = spec.decode("ascii") if isinstance(spec, bytes) else spec
        self.byteorder = "|"

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        self.byteorder = order.decode("ascii") if isinstance(order, bytes) else order

    def dtype(self) -> np.dtype[Any]:
        """The dtype itself.

        Raises:
            pickle.UnpicklingError: it is not a plain numeric one.
        """
        if not isinstance(self.spec, str) or not _NUMERIC.fullmatch(self.spec) or self.byteorder not in "<>|=":
            raise pickle.UnpicklingError(f"Unsupported GLOBAL numpy.dtype of {self.spec!r}: numeric ones only")
        dtype = np.dtype(self.spec)
        return dtype if self.byteorder in "|=" else dtype.newbyteorder("<" if self.byteorder == "<" else ">")


class ArrayStandIn:
    """Stands in for an array between its creation and its state."""

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, is_fortran, data = state
        self.value = _from_bytes(dtype, data, math.prod(shape)).reshape(shape, order="F" if is_fortran else "C")


def reconstruct(kind: Any, shape: Any, typecode: Any) -> ArrayStandIn:
    """Stands in for ``numpy._core.multiarray._reconstruct``, whose arguments are placeholders."""
    return ArrayStandIn()


def scalar(dtype: Any, data: Any) -> Any:
    """Stands in for ``numpy._core.multiarray.scalar``."""
    return _from_bytes(dtype, data, 1)[0]


def _from_bytes(dtype: Any, data: Any, numel: int) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, DtypeStandIn):
        raise pickle.UnpicklingError("an array without a dtype")
    plain = dtype.dtype()
    if not isinstance(data, bytes) or len(data) != numel * plain.itemsize:
        raise pickle.UnpicklingError(f"bytes that are not an array of {numel} {plain}")
    return np.frombuffer(data, dtype=plain).astype(plain.newbyteorder("="))


def finished(leaf: Any) -> Any:
    """The array that a stand-in stands for; any other object as it is."""
    return leaf.value if isinstance(leaf, ArrayStandIn) else leaf.dtype() if isinstance(leaf, DtypeStandIn) else leaf

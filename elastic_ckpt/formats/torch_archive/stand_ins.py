"""Objects that a pickle's globals make: plain data in place of classes of torch, numpy, DeepSpeed and Megatron.

A stand-in becomes the real object only outside of this package, at a live engine (:mod:`elastic_ckpt.formats.pickled`).
"""

from __future__ import annotations

import math
import pickle
import re
from typing import TYPE_CHECKING, Any

from elastic_ckpt.errors import UnsafePickleError

if TYPE_CHECKING:
    import numpy as np

_NUMERIC = re.compile(r"[?biufc]\d{0,2}")
#: ``deepspeed.runtime.zero.config.ZeroStageEnum``, as Python 3.11.0 to 3.11.3 pickle it by name.
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


def unsafe_error(found: str) -> UnsafePickleError:
    """A name, or a use of it, that is not on the closed list."""
    return UnsafePickleError(
        "this file asks for a Python class or function that is not on the list of safe globals",
        expected="tensors, containers, numbers, strings, and DeepSpeed's own small classes",
        found=f"Unsupported GLOBAL {found}"[:300],
        remedy="if you trust whoever wrote the file: torch.serialization.add_safe_globals([TheClass]) before loading, "
        'or "elastic_checkpoint": {"trust_pickle": true}',
    )


class Size(tuple[int, ...]):
    """``torch.Size``."""

    __slots__ = ()

    def __new__(cls, sizes: Any = ()) -> Size:
        if type(sizes) not in (tuple, list) or not {int}.issuperset(map(type, sizes)):
            raise pickle.UnpicklingError("a torch.Size that is no list of integers")
        return super().__new__(cls, sizes)


class StandIn:
    """An object of a class on the closed list: its qualified name and constructor arguments; attributes are its state.

    An enum member has its value, or with ``is_by_name`` its name, as argument.
    """

    __slots__ = ("__dict__", "args", "is_by_name", "name")
    is_plain_key = True

    def __init__(self, name: str, args: tuple[Any, ...] = (), is_by_name: bool = False) -> None:
        self.name, self.args, self.is_by_name = name, args, is_by_name

    def __int__(self) -> int:
        return _STAGES[self.args[0]] if self.is_by_name else int(self.args[0])

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


class DtypeStandIn:
    """``numpy.dtype(spec, align, copy)``; numpy's own ``__setstate__`` does not check a hostile state."""

    __slots__ = ("byteorder", "spec")

    def __init__(self, spec: Any = None, align: Any = False, copy: Any = True) -> None:
        self.spec = spec.decode("ascii") if isinstance(spec, bytes) else spec
        self.byteorder = "|"

    def __repr__(self) -> str:
        return f"numpy.dtype({self.byteorder}{self.spec})"

    def set_state(self, state: Any) -> None:
        order = state[1]
        self.byteorder = order.decode("ascii") if isinstance(order, bytes) else order

    def dtype(self) -> np.dtype[Any]:
        """The dtype itself; a :class:`pickle.UnpicklingError` unless it is a plain numeric one."""
        import numpy as np  # noqa: PLC0415  few files need it

        if (
            not isinstance(self.spec, str)
            or not _NUMERIC.fullmatch(self.spec)
            or self.byteorder not in ("<", ">", "|", "=")
        ):
            spec = self.spec if isinstance(self.spec, str) else type(self.spec).__name__
            raise unsafe_error(f"numpy.dtype of {spec}: numeric ones only")
        return np.dtype(self.spec).newbyteorder(self.byteorder)  # type: ignore[arg-type]


class ArrayStandIn:
    """``numpy.ndarray``, between its creation and its state."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] | None = None

    def __repr__(self) -> str:  # by which files are compared
        return repr(self.value)

    def set_state(self, state: Any) -> None:
        _version, shape, dtype, is_fortran, data = state
        self.value = numpy_array(dtype, data, Size(shape)).reshape(shape, order="F" if is_fortran else "C")

    def array(self) -> np.ndarray[Any, Any]:
        """The array itself."""
        if self.value is None:
            raise pickle.UnpicklingError("an array without data")
        return self.value


def numpy_array(dtype: Any, data: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A flat array in native byte order; :class:`pickle.UnpicklingError` if ``data`` is of another size."""
    import numpy as np  # noqa: PLC0415  few files need it

    if not isinstance(dtype, DtypeStandIn):
        raise pickle.UnpicklingError("an array without a dtype")
    plain, numel = dtype.dtype(), math.prod(shape)
    if not isinstance(data, (bytes, bytearray)) or len(data) != numel * plain.itemsize:
        raise pickle.UnpicklingError(f"bytes that are not an array of {numel} {plain}")
    return np.frombuffer(data, dtype=plain).astype(plain.newbyteorder("="))

"""Objects that a pickle's globals make: plain data in place of classes of torch, numpy, DeepSpeed and Megatron.

A stand-in becomes the real object only outside of this package, at a live engine (:mod:`elastic_ckpt.formats.pickled`).
"""

from __future__ import annotations

import math
import pickle
import re
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core.shapes import checked_shape
from elastic_ckpt.formats.torch_archive.calls import STATE, Call, Global, Unmade, unsafe_error

if TYPE_CHECKING:
    import numpy as np

#: Numbers, strings of one length, dates and durations.
_PLAIN_DTYPE = re.compile(r"[?biufc]\d{0,2}|[US]\d{1,6}|[mM]8")
_UNIT = re.compile(rb"[a-zA-Z]{1,2}")
#: ``deepspeed.runtime.zero.config.ZeroStageEnum``, as Python 3.11.0 to 3.11.3 pickle it by name.
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


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
    """``numpy.dtype(spec, align, copy)`` of plain data; numpy's own ``__setstate__`` does not check a hostile state."""

    __slots__ = ("byteorder", "spec")
    is_plain_key = True

    def __init__(self, spec: str) -> None:
        self.spec, self.byteorder = spec, "|"

    def __repr__(self) -> str:
        return f"numpy.dtype({self.byteorder}{self.spec})"

    def set_state(self, state: Any) -> None:
        order, more, (itemsize, alignment, flags) = state[1], state[2:5], state[5:8]
        is_number = (itemsize, alignment, flags) == (-1, -1, 0)
        is_text = self.spec[0] in "SU" and (alignment, flags) in ((1, 0), (4, 8)) and itemsize == self.dtype().itemsize
        if more != (None, None, None) or not (is_number or is_text):
            raise pickle.UnpicklingError("a dtype with parts, or of another size")
        self.byteorder = order.decode("ascii") if isinstance(order, bytes) else order
        if self.spec[0] in "mM" and len(state) > 8:  # a unit, and how many of it
            unit, count = state[8][1][:2]
            if unit != b"generic":
                if not _UNIT.fullmatch(unit) or type(count) is not int:
                    raise pickle.UnpicklingError("a date without a unit")
                self.spec = f"{self.spec[:2]}[{count}{unit.decode()}]"

    def dtype(self) -> np.dtype[Any]:
        """The dtype itself."""
        import numpy as np  # noqa: PLC0415  few files need it

        if self.byteorder not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("a dtype without a byte order")
        dtype: np.dtype[Any] = np.dtype(self.spec)
        return dtype.newbyteorder(self.byteorder) if self.byteorder == ">" else dtype  # type: ignore[arg-type]


def dtype_stand_in(allowed: bool, spec: Any = None, align: Any = False, copy: Any = True) -> DtypeStandIn | Call:
    """``numpy.dtype`` of plain data; any other one is numpy's own if the user ``allowed`` that, and else refused."""
    import numpy as np  # noqa: PLC0415  few files need it

    text = spec.decode("ascii") if isinstance(spec, bytes) else spec
    if isinstance(text, str) and _PLAIN_DTYPE.fullmatch(text):
        return DtypeStandIn(text)
    if allowed:
        return Call(Global("numpy.dtype", users=np.dtype), (spec, align, copy))
    shown = text[:100] if isinstance(text, str) else type(text).__name__
    raise unsafe_error(f"numpy.dtype of {shown}: numbers, strings and dates only; add_safe_globals([numpy.dtype])")


class ArrayStandIn:
    """``numpy.ndarray``, between its creation and its state; its value is then the array, or stands for it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] | Call | Unmade | None = None

    def __repr__(self) -> str:  # by which files are compared
        return repr(self.value)

    def set_state(self, state: Any) -> None:
        _version, shape, dtype, is_fortran, data = state
        if type(dtype) is Call:
            import numpy as np  # noqa: PLC0415  few files need it

            self.value = Call(Global("numpy.ndarray", users=np.ndarray), ((0,),), is_new=True)
            self.value.steps.append((STATE, [state]))
            return
        array = numpy_array(dtype, data, checked_shape(Size(shape)))
        self.value = array.reshape(shape, order="F" if is_fortran else "C")

    def array(self) -> Any:
        """The array itself."""
        if self.value is None:
            raise pickle.UnpicklingError("an array without data")
        return self.value


def numpy_scalar(dtype: Any, data: Any) -> Any:
    """``numpy.core.multiarray.scalar``."""
    if type(dtype) is Call:
        import numpy as np  # noqa: PLC0415  few files need it

        return Call(Global("numpy.scalar", users=np.float64(0).__reduce__()[0]), (dtype, data))
    return numpy_array(dtype, data, ())[0]


def numpy_array(dtype: Any, data: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A flat array in native byte order; :class:`pickle.UnpicklingError` if ``data`` is of another size."""
    import numpy as np  # noqa: PLC0415  few files need it

    if type(dtype) is Unmade:
        raise dtype.error
    if not isinstance(dtype, DtypeStandIn):
        raise pickle.UnpicklingError("an array without a dtype")
    plain, numel = dtype.dtype(), math.prod(shape)
    if not isinstance(data, (bytes, bytearray)) or len(data) != numel * plain.itemsize:
        raise pickle.UnpicklingError(f"bytes that are not an array of {numel} {plain}")
    return np.frombuffer(data, dtype=plain).astype(plain.newbyteorder("="))

"""Makes numpy's arrays and dtypes, without its own ``__setstate__`` ever seeing what a file says about memory.

``dtype.__setstate__`` trusts offsets, sizes and flags, by which arrays of such a dtype reach anywhere. Packages such as
megatron.core allow ``numpy.dtype`` where they are imported, in the user's place, who knows nothing of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from elastic_ckpt.formats.torch_archive.globals import ARRAY, DTYPE
from elastic_ckpt.formats.torch_archive.known_values import check_printable

#: Largest element of a dtype with fields, or of a text.
_MOST_ITEM_NBYTES = 1 << 16


def make_numpy(name: str, args: tuple[Any, ...]) -> Any:
    """An array or a dtype, before its state."""
    if name == DTYPE:
        return np.dtype(args[0], False, True)
    return np.ndarray((0,), "b") if name == ARRAY else np.frombuffer(*args[:2]).reshape(args[2], order=args[3])


def set_array_state(array: np.ndarray[Any, Any], state: tuple[Any, ...]) -> None:
    """Give an array its shape, dtype and elements; :class:`ValueError` if they do not belong together."""
    _version, shape, dtype, _is_fortran, elements = state
    numel = math.prod(shape)
    if isinstance(elements, list):  # of objects, or of records that have some
        if len(elements) != numel or dtype.itemsize > _MOST_ITEM_NBYTES:
            raise ValueError(f"an array of {numel} elements with {len(elements)} objects")
    elif not isinstance(elements, (bytes, bytearray)) or len(elements) != numel * dtype.itemsize or dtype.hasobject:
        raise ValueError(f"an array of {numel} elements without their bytes")
    array.__setstate__(state)
    check_printable(array)


def set_dtype_state(dtype: np.dtype[Any], state: tuple[Any, ...]) -> None:
    """Give a dtype with fields or parts the state of one that numpy builds of the same; raises what numpy does."""
    _version, order, parts, names, fields, itemsize, *_ = state
    if parts is not None:
        built = np.dtype((parts[0], parts[1]))
    elif names:
        formats = [fields[name][0] for name in names]
        offsets = [fields[name][1] for name in names]
        if not 0 < itemsize <= _MOST_ITEM_NBYTES:
            raise ValueError(f"records of {itemsize} bytes")
        built = np.dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": itemsize})
    else:
        built = dtype.newbyteorder(order)
    if built.itemsize != dtype.itemsize or built.itemsize > _MOST_ITEM_NBYTES:
        raise ValueError(f"a dtype of {dtype.itemsize} bytes whose parts have {built.itemsize}")
    dtype.__setstate__(built.__reduce__()[2])  # type: ignore[attr-defined]

"""Tensors that stay in their file, and functions with which ``torch.save`` has them rebuilt, as references or calls.

Source: ``torch/_utils.py`` and ``torch/_tensor.py``, torch 1.6 to 2.15.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ckpt.core.flat_ranges import checked_shape, checked_tensor_shape
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, Remedy, UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import Call, Global, described, refuse_errors
from elastic_ckpt.formats.torch_archive.known_values import DTYPES, LAYOUTS

#: dtype of each of torch's typed storages.
_STORAGES = {
    "UntypedStorage": "uint8",
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128"},
    "ComplexFloatStorage": "complex64",
    # integers that stand for the numbers of a quantized tensor
    **{"QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32"},
}
#: Under what names storages are pickled: nothing else below ``torch`` is imported because its name ends so.
STORAGE_NAMES = frozenset(
    (
        *map("torch.{}".format, _STORAGES),
        # as torch has them: of numbers alone
        *(f"torch.cuda.{name}" for name in _STORAGES if not name.startswith(("Q", "Untyped"))),
        "torch.storage.UntypedStorage",
    )
)
#: The storage class of each dtype that has one.
STORAGE_OF = {dtype: f"torch.{name}" for name, dtype in _STORAGES.items() if name != "UntypedStorage"}
_MOST_ELEMENTS = 1 << 62
#: Keys of storages are small numbers.
_MOST_KEY_LENGTH = 256
#: Bytes of a part of a tensor that may be more than its storage has: strides of 0 repeat elements without end.
_MOST_REPEATED_NBYTES = 1 << 16
#: What makes tensors that are not dense, by the name of the call (:mod:`elastic_ckpt.formats.objects`).
SPARSE = "torch._utils._rebuild_sparse_tensor"
QUANTIZED = "torch._utils._rebuild_qtensor"
META = "torch._utils._rebuild_meta_tensor_no_storage"
CHANGED = "torch._utils.set_tensor_metadata"
NESTED = "torch._utils._rebuild_nested_tensor"
WRAPPER = "torch._utils._rebuild_wrapper_subclass"
PARAMETER = "torch.nn.Parameter"
OTHER_FORM = "save it in another form"


@dataclass(slots=True, unsafe_hash=True)  # not frozen: that takes five times as long to make, and there are many
class TensorRef:
    """A tensor that stays in its file. Immutable."""

    dtype: str  # of torch, by name
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    byte_offset: int  # of its first element in the file
    is_parameter: bool = False  # saved as ``nn.Parameter``
    swap_id: str | None = None  # name of the swap file with its data, if on NVMe; its own bytes are missing or stale
    # of whoever makes a tensor of it, on the rank that read the file
    requires_grad: bool = field(default=False, compare=False)
    attributes: Any = field(default=None, compare=False)
    # in bytes; tensors of one storage share memory, and one without its size has a storage of its own
    storage_offset: int = field(default=0, compare=False)
    storage_nbytes: int = field(default=0, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:  # ranks exchange thousands: no names of fields
        return TensorRef, (self.dtype, self.shape, self.stride, self.byte_offset, self.is_parameter, self.swap_id)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are consecutive, in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != step:
                return not self.numel
            step *= size
        return True

    @property
    def reach(self) -> int:
        """Elements from the first to the last that it touches, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(slots=True, unsafe_hash=True)  # as TensorRef
class StorageRef:
    """A storage that stays in its file: dtype, bytes, and offset of the first. Immutable."""

    dtype: str
    nbytes: int
    byte_offset: int


def storage_id(persistent_id: Any) -> tuple[str, str, int, Any]:
    """The dtype, key, size in bytes and view of ``("storage", type, key, location, numel[, view])``.

    Raises :class:`pickle.UnpicklingError` for any other persistent id.
    """
    if type(persistent_id) is not tuple or len(persistent_id) not in (5, 6) or persistent_id[0] != "storage":
        raise pickle.UnpicklingError("a persistent id that is no storage's")
    kind, key, _location, numel = persistent_id[1:5]
    is_known = type(kind) is Global and type(key) is str and len(key) <= _MOST_KEY_LENGTH
    if not is_known or type(numel) is not int or not 0 <= numel < _MOST_ELEMENTS:
        raise pickle.UnpicklingError("a storage without type, key or size")
    if kind.name not in STORAGE_NAMES:
        raise kind.error or kind_error(f"a {kind.name}")
    dtype = _STORAGES[kind.name.rpartition(".")[2]]
    return dtype, key, numel * ITEMSIZE[dtype.removeprefix("q")], persistent_id[5] if len(persistent_id) == 6 else None


def _rebuild(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any = None,
    _hooks: Any = None,
    metadata: Any = None,
    *,
    dtype: str | None = None,
) -> Any:
    if type(storage) is not StorageRef or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise pickle.UnpicklingError("a tensor without storage, size or strides")
    dtype = dtype or storage.dtype
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise kind_error(f"a tensor of torch.{dtype}")
    if len(size) != len(stride) or type(offset) is not int:
        raise pickle.UnpicklingError(f"a tensor of {len(size)} sizes and {len(stride)} strides")
    size = checked_tensor_shape(size)
    stride = checked_shape(stride)
    end = (offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))) * itemsize
    if 0 in size:
        offset = 0  # it has no elements that could be elsewhere
    elif offset < 0 or end > storage.nbytes:
        raise pickle.UnpicklingError(f"a storage has {storage.nbytes} bytes, but a tensor of {size} ends at byte {end}")
    start = offset * itemsize
    nbytes = storage.nbytes
    ref = TensorRef(dtype, size, stride, storage.byte_offset + start, False, None, grad is True, None, start, nbytes)
    return _changed(ref, metadata) if metadata else ref


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    if not _is_dtype(dtype):
        raise pickle.UnpicklingError("a tensor without a dtype")
    name = dtype.name.removeprefix("torch.")
    return _rebuild(storage, offset, size, stride, grad, hooks, metadata, dtype=name)


def _changed(ref: TensorRef, metadata: Any) -> Call:
    """A tensor whose elements are the conjugates, or the negatives, of its bytes."""
    if type(metadata) is not dict or not {"conj", "neg"}.issuperset(metadata) or {True} != set(metadata.values()):
        kinds = sorted(map(str, metadata)) if type(metadata) is dict else described(metadata)
        raise kind_error(f"a tensor with {kinds}")
    if not ref.dtype.startswith("complex" if "conj" in metadata else ("complex", "float", "bfloat")):
        raise pickle.UnpicklingError(f"a tensor of torch.{ref.dtype} that is conjugated or negated")
    return Call(Global(CHANGED), (ref, tuple(sorted(metadata))), "tensor")


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, params: Any, grad: Any, _hooks: Any = None) -> Call:
    """Integers with a scale and a zero point for all, or for each index of a dimension."""
    if type(storage) is not StorageRef or not storage.dtype.startswith("q") or type(params) is not tuple or not params:
        raise pickle.UnpicklingError("a quantized tensor without storage or parameters")
    ref = _rebuild(storage, offset, size, stride, dtype=storage.dtype[1:])
    _check_parts(ref)
    scheme, *numbers = params
    if type(scheme) is Global and scheme.name in ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams"):
        scales, zero_points, axis = numbers
        _check_parts(scales, zero_points)
        is_known = type(axis) is int and 0 <= axis < len(size) and scales.shape == zero_points.shape == (size[axis],)
    else:
        is_known = type(scheme) is Global and scheme.name == "torch.per_tensor_affine"
        is_known = is_known and tuple(map(type, numbers)) == (float, int)
    if not is_known:
        raise pickle.UnpicklingError(f"a quantized tensor by {described(scheme)} with parameters of another kind")
    return Call(Global(QUANTIZED), (storage, offset, ref.shape, ref.stride, grad is True, *params), "tensor")


def _sparse(layout: Any, parts: Any) -> Call:
    """Indices and values, a size, and of COO whether the indices are unique and sorted."""
    if not _is_layout(layout) or not layout.name.startswith("torch.sparse_") or type(parts) is not tuple:
        raise pickle.UnpicklingError("a sparse tensor without layout or parts")
    count = 2 if layout.name == "torch.sparse_coo" else 3
    *tensors, size = parts[: count + 1]
    _check_parts(*tensors)
    more = parts[count + 1 :]
    is_known = len(tensors) == count and isinstance(size, tuple) and math.prod(checked_shape(size)) < _MOST_ELEMENTS
    if not is_known or (more and (count, *map(type, more)) != (2, bool)):
        raise pickle.UnpicklingError("a sparse tensor of other parts")
    return Call(Global(SPARSE), (layout, *parts), "tensor")


def _nested(*parts: Any) -> Call:
    """Tensors of different shapes in one buffer: that, their sizes, strides and offsets."""
    _check_parts(*parts)
    if len(parts) != 4:
        raise pickle.UnpicklingError(f"a nested tensor of {len(parts)} parts")
    return Call(Global(NESTED), parts, "tensor")


def _check_parts(*parts: Any) -> None:
    """Refuse what is no tensor, or has more elements than its storage: torch looks at each of them."""
    refuse_errors(*parts)
    for part in parts:
        nbytes = part.numel * ITEMSIZE[part.dtype] if type(part) is TensorRef else -1
        if not 0 <= nbytes <= max(part.storage_nbytes, _MOST_REPEATED_NBYTES):
            raise pickle.UnpicklingError("a part of a tensor that is none, or is larger than its storage")


def _is_dtype(value: Any) -> bool:
    return type(value) is Global and value.name in DTYPES


def _is_layout(value: Any) -> bool:
    return type(value) is Global and value.name in LAYOUTS


def _meta(dtype: Any, size: Any, stride: Any, grad: Any) -> Call:
    """A tensor that has no bytes at all."""
    if not _is_dtype(dtype) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise pickle.UnpicklingError("a tensor on meta without dtype, size or strides")
    if len(size) != len(stride):
        raise pickle.UnpicklingError(f"a tensor of {len(size)} sizes and {len(stride)} strides")
    return Call(Global(META), (dtype, checked_shape(size), checked_shape(stride), grad is True), "tensor")


def _wrapper(
    cls: Any, dtype: Any, size: Any, stride: Any, offset: Any, layout: Any, _device: Any = None, grad: Any = None
) -> Call:
    """A tensor without bytes of its own, of a class that the user allowed: its attributes are tensors."""
    if type(cls) is not Global:
        raise pickle.UnpicklingError("a tensor without a class")
    if cls.users is None:
        raise cls.error or subclass_error(cls.name)
    if not _is_dtype(dtype) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise pickle.UnpicklingError("a tensor of a class without dtype, size or strides")
    if len(size) != len(stride) or type(offset) is not int or offset < 0 or not _is_layout(layout):
        raise pickle.UnpicklingError(f"a tensor of a class of {len(size)} sizes and {len(stride)} strides")
    return Call(cls, (dtype, checked_shape(size), checked_shape(stride), offset, layout, grad is True), "wrapper")


def _rebuild_parameter(data: Any, requires_grad: Any, _hooks: Any, state: Any = None) -> TensorRef | Call:
    if type(data) is Call and data.how == "tensor":
        return _with_state(Call(Global(PARAMETER), (data, requires_grad is True), "tensor"), state)
    ref: TensorRef = _with_state(data, state)
    return replace(ref, is_parameter=True, requires_grad=requires_grad is True)


def _rebuild_from_type(function: Any, cls: Any, args: Any, state: Any) -> TensorRef | Call:
    """A tensor of a class, or with attributes."""
    if type(cls) is not Global or type(function) is not Global or type(args) is not tuple:
        raise pickle.UnpicklingError("a tensor without class or arguments")
    if function.name not in (*REBUILD, *UNREADABLE) or function.call is _rebuild_from_type:
        raise pickle.UnpicklingError("a tensor that is rebuilt by an unknown function")
    if function.call is None:
        raise function.error or kind_error(function.name)
    data = function.call(*args)
    if cls.name == "torch.nn.parameter.Parameter":
        return _rebuild_parameter(data, type(data) is TensorRef and data.requires_grad, None, state)
    if cls.name == "torch.Tensor":
        return _with_state(data, state)
    if cls.users is None:
        raise cls.error or subclass_error(cls.name)
    is_wrapper = type(data) is Call and data.how == "wrapper"
    made = data if is_wrapper else Call(cls, (data,), "subclass")
    made.steps.append(("state", [state]))
    return made


def _with_state(data: Any, state: Any) -> Any:
    """The tensor with attributes; DeepSpeed's optimizer swapper names a tensor's file by its ``ds_id``."""
    is_call = type(data) is Call and data.how == "tensor"
    if type(data) is not TensorRef and not is_call:
        raise pickle.UnpicklingError("a parameter that is no tensor")
    attributes = state[0] if type(state) is tuple and state else state  # with the values of slots
    if not attributes:
        return data
    if type(attributes) is not dict:
        raise pickle.UnpicklingError("attributes of a tensor that are no dictionary")
    if is_call:
        data.steps.append(("state", [attributes]))
        return data
    # Muon's momenta that stay in memory are marked: they name what a swapped tensor would, and hold their values
    swap_id = attributes.get("ds_id") if attributes.get("swappable") is not False else None
    return replace(data, swap_id=swap_id if isinstance(swap_id, str) else data.swap_id, attributes=attributes)


def kind_error(found: str) -> UnsupportedError:
    """A tensor that has no bytes of its own, or where only those can be read."""
    problem = "this file holds a tensor of a kind that cannot be read by its bytes"
    return UnsupportedError(problem, expected="a dense tensor of a plain dtype", found=found[:300], remedy=OTHER_FORM)


def subclass_error(name: str) -> UnsupportedError:
    """A tensor of a class of its own."""
    problem = "this file holds a tensor of a class of its own, whose parts cannot be cut for another topology"
    allow = "torch.serialization.add_safe_globals([TheClass])"
    own_class = Remedy(when="if it is a class of your own in the client state", code=allow)
    of_torchao = replace(AT_ITS_TOPOLOGY, when="if it is of torchao's 8- or 4-bit formats")
    remedy = of_torchao, own_class
    return UnsupportedError(problem, expected="torch.Tensor", found=name[:300], remedy=remedy)


#: Functions that rebuild tensors, by qualified name.
REBUILD: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type": _rebuild_from_type,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.tensor._rebuild_from_type": _rebuild_from_type,
    **{SPARSE: _sparse, QUANTIZED: _quantized, META: _meta, NESTED: _nested, WRAPPER: _wrapper},
}
#: Those of tensors that nobody makes here.
_OF_DEVICES = ("device_tensor_from_numpy", "device_tensor_from_cpu_tensor")
_KINDS = ("sparse_csr_tensor", "xla_tensor", "mkldnn_tensor", *_OF_DEVICES)
UNREADABLE = frozenset(f"torch._utils._rebuild_{kind}" for kind in _KINDS)

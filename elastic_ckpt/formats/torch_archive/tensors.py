"""The functions with which ``torch.save`` has tensors rebuilt, here as references to their bytes.

Source: ``torch/_utils.py`` and ``torch/_tensor.py``, torch 1.6 to 2.15.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.shapes import checked_shape
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import STATE, SUBCLASS, Call, Global, described
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

#: dtype of each of torch's typed storages.
_STORAGES = {
    "UntypedStorage": "uint8",
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128"},
    "ComplexFloatStorage": "complex64",
    # integers that stand for the numbers of a quantized tensor
    **{"QInt8Storage": "int8", "QUInt8Storage": "uint8", "QInt32Storage": "int32"},
}
#: Keys of storages are small numbers.
_MOST_ELEMENTS, _MOST_KEY_LENGTH = 1 << 62, 256


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
    name = kind.name.rpartition(".")[2]
    if name not in _STORAGES:
        raise kind_error(f"a {kind.name}")
    dtype = _STORAGES[name]
    return dtype, key, numel * ITEMSIZE[dtype], persistent_id[5] if len(persistent_id) == 6 else None


def _rebuild(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, _hooks: Any = None, metadata: Any = None
) -> TensorRef:
    return _tensor(storage, None, offset, size, stride, grad, metadata)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef:
    if type(dtype) is not Global:
        raise pickle.UnpicklingError("a tensor without a dtype")
    return _tensor(storage, dtype.name.removeprefix("torch."), offset, size, stride, grad, metadata)


def _tensor(
    storage: Any, dtype: str | None, offset: Any, size: Any, stride: Any, grad: Any, metadata: Any
) -> TensorRef:
    if type(storage) is not StorageRef or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise pickle.UnpicklingError("a tensor without storage, size or strides")
    dtype = dtype or storage.dtype
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise kind_error(f"a tensor of torch.{dtype}")
    if metadata:  # its elements are the conjugates, or the negatives, of its bytes
        kinds = sorted(map(str, metadata)) if type(metadata) is dict else described(metadata)
        raise kind_error(f"a tensor with {kinds}")
    if len(size) != len(stride) or type(offset) is not int:
        raise pickle.UnpicklingError(f"a tensor of {len(size)} sizes and {len(stride)} strides")
    size, stride = checked_shape(size), checked_shape(stride)
    end = (offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))) * itemsize
    if 0 in size:
        offset = 0  # it has no elements that could be elsewhere
    elif offset < 0 or end > storage.nbytes:
        what = f"a tensor of {size} ends at byte {end}"
        raise pickle.UnpicklingError(f"a storage has {storage.nbytes} bytes, but {what}")
    start = offset * itemsize
    return TensorRef(
        dtype, size, stride, storage.byte_offset + start, False, None, grad is True, None, start, storage.nbytes
    )


def _rebuild_parameter(data: Any, requires_grad: Any, _hooks: Any, state: Any = None) -> TensorRef:
    return replace(_with_state(data, state), is_parameter=True, requires_grad=requires_grad is True)


def _rebuild_from_type(function: Any, cls: Any, args: Any, state: Any) -> TensorRef | Call:
    """A tensor of a class, or with attributes."""
    if type(cls) is not Global or type(function) is not Global or type(args) is not tuple:
        raise pickle.UnpicklingError("a tensor without class or arguments")
    if function.name not in (*REBUILD, *NOT_DENSE) or function.call is _rebuild_from_type:
        raise pickle.UnpicklingError("a tensor that is rebuilt by an unknown function")
    if function.call is None:
        raise function.error or kind_error(function.name)
    data = function.call(*args)
    if cls.name in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return replace(_with_state(data, state), is_parameter=cls.name != "torch.Tensor")
    if cls.users is None:
        raise cls.error or subclass_error(cls.name)
    made = Call(cls, (data,), SUBCLASS)
    made.steps.append((STATE, [state]))
    return made


def _with_state(data: Any, state: Any) -> TensorRef:
    """The tensor with attributes; DeepSpeed's optimizer swapper names a tensor's file by its ``ds_id``."""
    if type(data) is not TensorRef:
        raise pickle.UnpicklingError("a parameter that is no tensor")
    attributes = state[0] if type(state) is tuple and state else state  # with the values of slots
    if not attributes:
        return data
    if type(attributes) is not dict:
        raise pickle.UnpicklingError("attributes of a tensor that are no dictionary")
    swap_id = attributes.get("ds_id")
    return replace(data, swap_id=swap_id if isinstance(swap_id, str) else data.swap_id, attributes=attributes)


def kind_error(found: str) -> UnsupportedError:
    """A tensor that has no bytes of its own, or where only those can be read."""
    return UnsupportedError(
        "this file holds a tensor of a kind that cannot be read by its bytes",
        expected="a dense tensor of a plain dtype",
        found=found[:300],
        remedy="save it in another form",
    )


def subclass_error(name: str) -> UnsupportedError:
    """A tensor of a class of its own."""
    return UnsupportedError(
        "this file holds a tensor of a class of its own, whose parts cannot be cut for another topology",
        expected="torch.Tensor",
        found=name[:300],
        remedy="the 8- and 4-bit formats of torchao are not supported: load at the topology it was saved with; a class "
        "of your own in the client state: torch.serialization.add_safe_globals([TheClass])",
    )


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
}
#: Those of other tensors, which check their parts.
NOT_DENSE = frozenset(
    f"torch._utils._rebuild_{kind}"
    for kind in (
        *("sparse_tensor", "sparse_csr_tensor", "qtensor", "meta_tensor_no_storage", "wrapper_subclass", "xla_tensor"),
        *("mkldnn_tensor", "nested_tensor", "device_tensor_from_numpy", "device_tensor_from_cpu_tensor"),
    )
)

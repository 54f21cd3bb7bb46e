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
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.torch_archive.unpickler import Global, described

#: dtype of each of torch's typed storages.
_STORAGES = {
    "UntypedStorage": "uint8",
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128"},
    **{"ComplexFloatStorage": "complex64"},
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
        raise _kind_error(f"a {kind.name}")
    dtype = _STORAGES[name]
    return dtype, key, numel * ITEMSIZE[dtype], persistent_id[5] if len(persistent_id) == 6 else None


def _rebuild(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any = None, _hooks: Any = None, metadata: Any = None
) -> TensorRef:
    return _tensor(storage, None, offset, size, stride, metadata)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef:
    if type(dtype) is not Global and type(dtype).__name__ != "dtype":  # the real one of a trusted pickle
        raise pickle.UnpicklingError("a tensor without a dtype")
    return _tensor(storage, str(dtype).removeprefix("torch."), offset, size, stride, metadata)


def _tensor(storage: Any, dtype: str | None, offset: Any, size: Any, stride: Any, metadata: Any) -> TensorRef:
    if type(storage) is not StorageRef or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise pickle.UnpicklingError("a tensor without storage, size or strides")
    dtype = dtype or storage.dtype
    if metadata:
        kinds = sorted(filter(str.isidentifier, metadata)) if type(metadata) is dict else described(metadata)
        raise _kind_error(f"a tensor with {kinds}")
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise _kind_error(f"a tensor of torch.{dtype}")
    if len(size) != len(stride) or type(offset) is not int:
        raise pickle.UnpicklingError(f"a tensor of {len(size)} sizes and {len(stride)} strides")
    size, stride = checked_shape(size), checked_shape(stride)
    end = (offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))) * itemsize
    if 0 in size:
        offset = 0  # it has no elements that could be elsewhere
    elif offset < 0 or end > storage.nbytes:
        what = f"a tensor of {size} ends at byte {end}"
        raise pickle.UnpicklingError(f"a storage has {storage.nbytes} bytes, but {what}")
    return TensorRef(dtype, size, stride, storage.byte_offset + offset * itemsize)


def _rebuild_parameter(data: Any, _requires_grad: Any, _hooks: Any, state: Any = None) -> TensorRef:
    return replace(_with_state(data, state), is_parameter=True)


def _rebuild_from_type(function: Any, cls: Any, args: Any, state: Any) -> TensorRef:
    """A tensor of a class, or with attributes."""
    name = cls.name if type(cls) is Global else f"{cls.__module__}.{cls.__qualname__}"
    if name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise subclass_error(name)
    call = function.call if type(function) is Global else function
    if call not in (_rebuild, _rebuild_v3, _rebuild_parameter) or type(args) is not tuple:
        raise pickle.UnpicklingError("a tensor that is rebuilt by an unknown function")
    ref = _with_state(call(*args), state)
    return ref if name == "torch.Tensor" else replace(ref, is_parameter=True)


def _with_state(data: Any, state: Any) -> TensorRef:
    if type(data) is not TensorRef:
        raise pickle.UnpicklingError("a parameter that is no tensor")
    attributes = state[0] if type(state) is tuple and state else state  # with the values of slots
    # DeepSpeed's optimizer swapper names a tensor's file by ds_id
    swap_id = attributes.get("ds_id") if type(attributes) is dict else None
    return replace(data, swap_id=swap_id) if isinstance(swap_id, str) else data


def _unsupported(name: str) -> Callable[..., TensorRef]:
    def refuse(*_args: Any) -> TensorRef:
        raise _kind_error(f"torch._utils.{name}")

    return refuse


def _kind_error(found: str) -> UnsupportedError:
    return UnsupportedError(
        "this file holds a tensor of a kind that cannot be read by its bytes",
        expected="a dense tensor of a plain dtype, neither conjugated nor negated lazily",
        found=found[:300],
        remedy="resolve or densify it before saving, or load at the topology it was saved with",
    )


def subclass_error(name: str) -> UnsupportedError:
    """A tensor of a class of its own."""
    return UnsupportedError(
        "this file holds a tensor of a class of its own, whose parts cannot be cut for another topology",
        expected="torch.Tensor",
        found=name[:300],
        remedy="load at the topology it was saved with; the 8- and 4-bit formats of torchao are not supported",
    )


_NOT_DENSE = (
    *("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_qtensor", "_rebuild_mkldnn_tensor"),
    *("_rebuild_nested_tensor", "_rebuild_wrapper_subclass", "_rebuild_meta_tensor_no_storage"),
    *("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_xla_tensor"),
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
    **{f"torch._utils.{name}": _unsupported(name) for name in _NOT_DENSE},
}

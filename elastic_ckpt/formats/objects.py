"""Makes the objects that a file holds, for whoever resumes: what the job that saved it had, and torch.load returns.

Here, and only here, code runs that a file asks for: classes and functions that the user allowed or trusts. Others are a
closed list, with arguments that are checked.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import ElasticCkptError, UnsafePickleError, UnsupportedError, refuse_used_up
from elastic_ckpt.formats.pickled import PickledFile, read_into, unreadable
from elastic_ckpt.formats.torch_archive.calls import (
    ITEMS,
    PAIRS,
    PLAIN_CLASSES,
    STATE,
    Call,
    Global,
    Unmade,
    unsafe_error,
)
from elastic_ckpt.formats.torch_archive.globals import is_attribute
from elastic_ckpt.formats.torch_archive.stand_ins import ArrayStandIn, DtypeStandIn, Size, StandIn
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.torch_archive.tensors import CHANGED, PARAMETER, SUBCLASS, StorageRef
from elastic_ckpt.formats.torch_archive.tree import replace_leaves
from elastic_ckpt.storage.local import open_stream

if TYPE_CHECKING:
    import torch

#: Why an entry is not made; that a file is damaged is no reason to go on without one.
_NOT_MADE = (UnsafePickleError, UnsupportedError)
#: torch counts no further.
_MOST_ELEMENTS = 1 << 62
#: What one of Python's own classes may be made of.
_PARTS = (str, int, float, bytes, type, datetime.timedelta, datetime.tzinfo, type(None))
#: Attributes that objects may get for each byte of the file, and in addition: many can be given the same ones.
_MOST_ATTRIBUTES, _MOST_MORE_ATTRIBUTES = 1, 1 << 16
_MODULES: Mapping[str, Any] = {
    each.__name__: each for each in (builtins, collections, datetime, decimal, fractions, types)
}


def materialise(file: PickledFile, node: Any) -> Any:
    """The tree below ``node`` as the job that saved it had it; for what lies outside the model, not for weights.

    Tensors of one storage share memory. Objects of DeepSpeed and Megatron become real ones if their classes are
    imported already; else stand-ins remain. torch is imported only for what is torch's.

    Raises :class:`UnsafePickleError` or :class:`UnsupportedError` for what is not made, and :class:`DamagedError` for a
    file that has shrunk.
    """
    maker = _Maker(file)
    try:
        return replace_leaves(node, maker.made, maker.give)
    except ElasticCkptError:
        raise
    except Exception as error:  # of keys that cannot be hashed, or take too long
        raise maker.failed(node, error) from error


def materialise_entries(
    file: PickledFile, entries: Mapping[Any, Any], may_skip: Callable[[Any], bool]
) -> tuple[dict[Any, Any], dict[Any, ElasticCkptError]]:
    """:func:`materialise` of a dictionary, without those entries that are not made and may be left out, which say why.

    An entry that is not made, and may not be left out, is an error that names it.
    """
    try:
        return materialise(file, dict(entries)), {}
    except _NOT_MADE:
        errors = dict(_refused(file, entries))
    for key, error in errors.items():
        if not may_skip(key):
            raise error
    return materialise(file, {key: value for key, value in entries.items() if key not in errors}), errors


def _refused(file: PickledFile, entries: Mapping[Any, Any]) -> Iterator[tuple[Any, ElasticCkptError]]:
    for key, value in entries.items():
        try:
            materialise(file, {key: value})
        except _NOT_MADE as error:
            name = repr(key)[:100] if isinstance(key, (str, int)) else f"of a {type(key).__name__}"
            remedy = f'{error.remedy}; or go on without it: "elastic_checkpoint": {{"on_unreadable_entry": "skip"}}'
            details = {**error.details, "file": file.path, "remedy": remedy}
            yield key, type(error)(f"the entry {name} of the client state: {error.problem}", **details)


class _Maker:
    """Makes the objects of one tree: tensors of one storage share it."""

    def __init__(self, file: PickledFile) -> None:
        self._file = file
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._typed: dict[tuple[int, int], Any] = {}
        self._attributes_left = _MOST_ATTRIBUTES * file.nbytes + _MOST_MORE_ATTRIBUTES

    def made(self, leaf: Any) -> Any:
        """What a leaf stands for."""
        if isinstance(leaf, Unmade):
            raise leaf.error
        try:
            return self._made(leaf)
        except ElasticCkptError:
            raise
        except Exception as error:  # arguments of a constructor can raise anything
            raise self.failed(leaf, error) from error

    def _made(self, leaf: Any) -> Any:
        make: Mapping[type, Callable[[Any], Any]] = {
            TensorRef: self._tensor,
            StorageRef: self._storage_itself,
            Size: _size,
            ArrayStandIn: ArrayStandIn.array,
            DtypeStandIn: DtypeStandIn.dtype,
            Global: _named,
            Call: _called,
            StandIn: _real_object,
        }
        return make[type(leaf)](leaf) if type(leaf) in make else leaf

    def give(self, call: Call, made: Any, steps: list[tuple[str, list[Any]]]) -> None:
        """Give an object its states and items, as :mod:`pickle` does."""
        try:
            for kind, values in steps:
                if kind == STATE:
                    self._charge(values[0])
                    _set_state(call, made, values[0])
                elif kind == PAIRS:
                    for key, value in zip(values[::2], values[1::2], strict=True):
                        made[key] = value
                else:
                    _extend(made, kind, values)
        except ElasticCkptError:
            raise
        except Exception as error:
            raise self.failed(call, error) from error

    def _charge(self, state: Any) -> None:
        for each in (*state, state) if isinstance(state, tuple) else (state,):
            self._attributes_left -= len(each) if isinstance(each, (dict, tuple)) else 0
        if self._attributes_left < 0:
            raise ValueError("objects that are given the same many attributes again and again")

    def failed(self, leaf: Any, error: Exception) -> ElasticCkptError:
        """The error of what raised another one, or is not made."""
        refuse_used_up(error, self._file.path)
        while isinstance(leaf, Call):  # its result was called
            leaf = leaf.function
        name = leaf if isinstance(leaf, Global) else type(leaf).__name__
        return UnsupportedError(
            "an object of this file cannot be made again",
            file=self._file.path,
            found=f"{name}: {type(error).__name__}: {error}"[:300],
            remedy="save it in another form",
        )

    def _storage(self, start: int, nbytes: int) -> torch.UntypedStorage:
        import torch  # noqa: PLC0415

        if not nbytes:
            return torch.UntypedStorage(0)
        if start not in self._storages:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            with open_stream(self._file.path) as stream:
                read_into(self._file, stream, start, memoryview(buffer.numpy()))  # type: ignore[arg-type]
            self._storages[start] = buffer.untyped_storage()
        if self._storages[start].nbytes() != nbytes:
            raise unreadable(self._file.path, f"a storage of {nbytes} bytes, and of others, at byte {start}")
        return self._storages[start]

    def _storage_itself(self, ref: StorageRef) -> Any:
        key = ref.byte_offset, ref.nbytes
        if key not in self._typed:
            self._typed[key] = _typed(self._storage(*key), ref.dtype)
        return self._typed[key]

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        import torch  # noqa: PLC0415

        if ref.numel >= _MOST_ELEMENTS:
            raise unreadable(self._file.path, f"a tensor of {ref.shape}")
        itemsize = ITEMSIZE[ref.dtype]
        nbytes = ref.storage_nbytes or ref.reach * itemsize  # of who has no storages, a tensor has its own
        storage = self._storage(ref.byte_offset - ref.storage_offset, nbytes)
        new = torch.empty(0, dtype=getattr(torch, ref.dtype))
        new.set_(storage, ref.storage_offset // itemsize, ref.shape, ref.stride)
        if ref.is_parameter:
            new = torch.nn.Parameter(new, ref.requires_grad)
        elif ref.requires_grad:
            new.requires_grad_()
        self._charge(ref.attributes)
        _set_attributes(new, ref.attributes or {})
        return new


def _size(leaf: Size) -> Any:
    import torch  # noqa: PLC0415  whoever resumes has it; who only looks need not

    return torch.Size(leaf)


def _typed(storage: torch.UntypedStorage, dtype: str) -> Any:
    import torch  # noqa: PLC0415

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=getattr(torch, dtype), _internal=True)


def _set_attributes(tensor: torch.Tensor, attributes: Mapping[Any, Any]) -> None:
    for key in attributes:
        if type(key) is not str or key.startswith("__") or hasattr(type(tensor), key):
            raise unsafe_error(f"an attribute of a tensor named {key}")
    vars(tensor).update(attributes)


def _named(leaf: Global) -> Any:
    """The class or dtype that a name is of."""
    if leaf.error is not None:
        raise leaf.error
    if leaf.users is not None:
        return leaf.users
    module, _, name = leaf.name.rpartition(".")
    if module == "torch":
        import torch  # noqa: F401, PLC0415
    found = getattr(
        sys.modules.get(module), name, None
    )  # never imported from here: that would run code at a file's wish
    if isinstance(found, type) or (module == "torch" and found is not None and not callable(found)):
        return found
    raise UnsupportedError(
        "this file holds the name of a class or function that is not there",
        found=leaf.name[:300],
        remedy="import its module before loading",
    )


def _called(call: Call) -> Any:
    """The result of a call whose arguments are real."""
    function = call.function
    if not isinstance(function, Global):
        return function(*call.args)
    if function.users is not None:
        return function.users.__new__(function.users, *call.args) if call.is_new else function.users(*call.args)
    if function.name in PLAIN_CLASSES:
        return _of_python(function.name, call.args)
    return _TENSORS[function.name](*call.args)


def _of_python(name: str, args: tuple[Any, ...]) -> Any:
    for arg in args:
        if not isinstance(arg, _PARTS) and arg != ():
            raise unsafe_error(f"{name} of a {type(arg).__name__}")
    module, _, cls = name.rpartition(".")
    return getattr(_MODULES[module], cls)(*args)


def _set_state(call: Call, made: Any, state: Any) -> None:
    import torch  # noqa: PLC0415

    is_users = not isinstance(call.function, Global) or call.function.users is not None
    if isinstance(made, torch.Tensor) and not is_users:
        own = getattr(type(made), "__setstate__", None)
        if call.function.name == SUBCLASS and own is not torch.Tensor.__setstate__:
            made.__setstate__(state)
        else:
            _set_attributes(made, state[0] if isinstance(state, tuple) else state or {})
    elif is_users and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        slots = None
        if isinstance(state, tuple) and len(state) == 2:
            state, slots = state
        if not is_users and not all(map(is_attribute, state)):  # it may have got more keys since it was read
            raise unsafe_error(f"an attribute of {call} that is no plain one")
        vars(made).update(state or {})
        for key, value in (slots or {}).items():
            setattr(made, key, value)


def _extend(made: Any, kind: str, values: list[Any]) -> None:
    if kind == ITEMS and hasattr(made, "extend"):
        made.extend(values)
        return
    add = made.append if kind == ITEMS else made.add
    for value in values:
        add(value)


def _changed(tensor: torch.Tensor, kinds: tuple[str, ...]) -> torch.Tensor:
    import torch  # noqa: PLC0415

    torch._utils.set_tensor_metadata(tensor, dict.fromkeys(kinds, True))
    return tensor


def _parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    import torch  # noqa: PLC0415

    return torch.nn.Parameter(tensor, requires_grad)


def _sparse(layout: Any, parts: tuple[Any, ...]) -> torch.Tensor:
    """A sparse tensor, whose indices are checked: torch.load does not, and they are addresses."""
    import torch  # noqa: PLC0415

    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = parts
        known = coalesced[0] if coalesced else None
        return torch.sparse_coo_tensor(indices, values, size, is_coalesced=known, check_invariants=True)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True)


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    import torch  # noqa: PLC0415

    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=requires_grad)


def _quantized(integers: torch.Tensor, params: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    import torch  # noqa: PLC0415

    if params[0] is not torch.per_tensor_affine:
        scales, zero_points, axis = params[1:]
        count = integers.shape[axis] if type(axis) is int and 0 <= axis < integers.ndim else None
        if not all(isinstance(each, torch.Tensor) and each.shape == (count,) for each in (scales, zero_points)):
            raise ValueError("scales of a quantized tensor that are not one for each channel")
    storage = _typed(integers.untyped_storage(), "q" + str(integers.dtype).removeprefix("torch."))
    shape, stride = tuple(integers.shape), integers.stride()
    hooks: Any = collections.OrderedDict()
    offset = integers.storage_offset()
    return torch._utils._rebuild_qtensor(storage, offset, shape, stride, params, requires_grad, hooks)


#: What makes tensors that are no references, by the name of the call.
_TENSORS: Mapping[str, Callable[..., Any]] = {
    CHANGED: _changed,
    PARAMETER: _parameter,
    SUBCLASS: lambda tensor, cls: tensor.as_subclass(cls),
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_qtensor": _quantized,
}


def _real_object(leaf: StandIn) -> Any:
    module, _, name = leaf.name.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)  # never imported from here: that would run code at a file's wish
    if not isinstance(cls, type):
        return leaf
    if leaf.name == "torch.device":
        return cls(*leaf.args)
    if leaf.name == "torch.layout":
        found = getattr(sys.modules[module], str(leaf.args[0]).removeprefix("torch."), None)
        return found if isinstance(found, cls) else leaf
    if issubclass(cls, Enum):
        return cls[leaf.args[0]] if leaf.is_by_name else cls(*leaf.args)
    new = cls.__new__(cls)
    vars(new).update(vars(leaf))
    return new

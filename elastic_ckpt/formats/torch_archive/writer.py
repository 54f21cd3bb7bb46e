"""Writes a tree that was read as a pickle again: what was understood of a file, and none of the bytes that were read.

Classes are named, not imported, so that a file can be written where DeepSpeed and Megatron are not installed. Only
names of the closed list, and those that the user allowed, can be in a tree. Protocol 2, as ``torch.save`` writes it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import Call, Global, Size, Step, refuse_errors, unsafe_error
from elastic_ckpt.formats.torch_archive.globals import ARRAY, BUFFER, DTYPE, MULTIARRAY
from elastic_ckpt.formats.torch_archive.known_values import LAYOUTS
from elastic_ckpt.formats.torch_archive.tensors import (
    CHANGED,
    PARAMETER,
    QUANTIZED,
    SPARSE,
    STORAGE_OF,
    StorageRef,
    TensorRef,
    kind_error,
)

_PROTOCOL = 2
_REBUILD = "torch._utils._rebuild_tensor_v2"
_REBUILD_WITH_DTYPE = "torch._utils._rebuild_tensor_v3"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_REBUILD_PARAMETER_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
_REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_PythonsPickler: Any = pickle._Pickler


class TreePickler(_PythonsPickler):  # type: ignore[misc]
    """Python's own pickler, which also knows what stands for an object in a tree. Storages become persistent ids."""

    def __init__(self, stream: Any, protocol: int = _PROTOCOL) -> None:
        super().__init__(stream, protocol)
        #: The storage of each key, in order.
        self.storages: dict[str, StorageRef] = {}
        self._keys: dict[tuple[int, int], str] = {}
        self._names: dict[str, Global] = {}

    def persistent_id(self, obj: Any) -> Any:
        """That of a storage: one for the same bytes, whose dtype is that of who names it first."""
        if type(obj) is not StorageRef:
            return None
        where = (obj.byte_offset, obj.nbytes) if obj.nbytes else (-1, len(self._keys))
        key = self._keys.setdefault(where, str(len(self._keys)))
        first = self.storages.setdefault(key, obj)
        numel = first.nbytes // ITEMSIZE[first.dtype.removeprefix("q")]
        return "storage", Global(STORAGE_OF[first.dtype]), key, "cpu", numel

    def save_reduced(self, obj: Any, name: str, args: tuple[Any, ...]) -> None:
        """Write a call of a function of the closed list, whose result is ``obj``."""
        self.save_name(name)
        self.save(args)
        self.write(pickle.REDUCE)
        self.memoize(obj)

    def save_name(self, name: str) -> None:
        """Write the name of a class or function."""
        shared = self._names.setdefault(name, Global(name))
        if id(shared) in self.memo:
            self.save(shared)
            return
        module, _, in_module = name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{in_module}\n".encode())
        self.memoize(shared)

    def save_global_name(self, obj: Global) -> None:
        """Write a class, or a value such as a dtype. No function is a value."""
        refuse_errors(obj)
        if obj.is_function:
            raise unsafe_error(f"{obj.name}, a function that is not called")
        qualname = getattr(obj.users, "__qualname__", obj.name.rpartition(".")[2])
        if "." in qualname or not obj.name.isprintable():
            problem = "an object of a class that is defined in another class, or in a function, cannot be written"
            raise UnsupportedError(problem, found=obj.name[:300], remedy="define the class at the top of its module")
        if obj.name in LAYOUTS:
            self.save_reduced(obj, "torch.serialization._get_layout", (obj.name,))
            return
        self.save_name(obj.name)

    def save_size(self, obj: Size) -> None:
        """Write a ``torch.Size``."""
        self.save_reduced(obj, "torch.Size", (tuple(obj),))

    def save_tensor(self, obj: TensorRef) -> None:
        """Write a tensor, its class and its attributes."""
        grad = obj.requires_grad
        hooks: OrderedDict[Any, Any] = OrderedDict()
        function, args = self._rebuilding(obj, grad and not obj.is_parameter)
        if obj.is_parameter:
            data = Call(Global(function), args)
            if obj.attributes:
                self.save_reduced(obj, _REBUILD_PARAMETER_WITH_STATE, (data, grad, hooks, obj.attributes))
            else:
                self.save_reduced(obj, _REBUILD_PARAMETER, (data, grad, hooks))
        elif obj.attributes:
            of_class = (Global(function), Global("torch.Tensor"), args, obj.attributes)
            self.save_reduced(obj, _REBUILD_FROM_TYPE, of_class)
        else:
            self.save_reduced(obj, function, args)

    def _rebuilding(
        self, ref: TensorRef, requires_grad: bool, metadata: Mapping[str, bool] | None = None
    ) -> tuple[str, tuple[Any, ...]]:
        """The function that rebuilds a tensor, and its arguments."""
        itemsize = ITEMSIZE[ref.dtype]
        nbytes = ref.storage_nbytes or ref.reach * itemsize
        start = ref.byte_offset - ref.storage_offset
        key = self._keys.get((start, nbytes))
        dtype = self.storages[key].dtype if key is not None else ref.dtype if ref.dtype in STORAGE_OF else "uint8"
        offset = ref.storage_offset // itemsize
        more = () if metadata is None else (metadata,)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        args = (StorageRef(dtype, nbytes, start), offset, ref.shape, ref.stride, requires_grad, hooks)
        if dtype == ref.dtype:
            return _REBUILD, (*args, *more)
        return _REBUILD_WITH_DTYPE, (*args, Global(f"torch.{ref.dtype}"), *more)

    def save_call(self, obj: Call) -> None:
        """Write an object that was not made: what is called, its arguments, and what its result is given."""
        refuse_errors(obj.function)
        is_listed = type(obj.function) is Global and obj.function.users is None
        if obj.how in ("subclass", "wrapper"):
            raise kind_error(f"{obj}, a tensor of a class of its own")
        if obj.how == "tensor":
            self._save_rebuilt(obj)
        elif obj.how == "member":
            self.save_reduced(obj, "builtins.getattr", (obj.function, *obj.args))
        elif is_listed and obj.name == ARRAY:
            self.save_reduced(obj, f"{MULTIARRAY}._reconstruct", (Global(ARRAY), (0,), b"b"))
        elif is_listed and obj.name == BUFFER:
            self.save_reduced(obj, f"{MULTIARRAY.replace('multiarray', 'numeric')}._frombuffer", obj.args)
        elif is_listed and obj.name == DTYPE:  # a copy: what follows may set its byte order
            self.save_reduced(obj, DTYPE, (obj.args[0], False, True))
        else:
            self.save(obj.function)
            self.save(obj.args)
            self.write(pickle.NEWOBJ if obj.how == "new" else pickle.REDUCE)
            self.memoize(obj)
        if vars(obj):
            self.save(vars(obj))
            self.write(pickle.BUILD)
        for kind, values in obj.steps:
            self._save_step(kind, values)

    def _save_step(self, kind: Step, values: list[Any]) -> None:
        """Write what the result of a call is given."""
        if kind == "state":
            self.save(values[0])
            self.write(pickle.BUILD)
            return
        self.write(pickle.MARK)
        for value in values:
            self.save(value)
        self.write({"items": pickle.APPENDS, "pairs": pickle.SETITEMS, "members": pickle.ADDITEMS}[kind])

    def _save_rebuilt(self, obj: Call) -> None:
        """Write a tensor that is no view of one storage, by the function with which torch rebuilds it."""
        hooks: OrderedDict[Any, Any] = OrderedDict()
        if obj.name == CHANGED:
            ref, kinds = obj.args
            self.save_reduced(obj, *self._rebuilding(ref, ref.requires_grad, dict.fromkeys(kinds, True)))
        elif obj.name == PARAMETER:
            self.save_reduced(obj, _REBUILD_PARAMETER, (*obj.args, hooks))
        elif obj.name == SPARSE:
            layout, *parts = obj.args
            self.save_reduced(obj, SPARSE, (layout, tuple(parts)))
        elif obj.name == QUANTIZED:
            storage, offset, size, stride, grad, *params = obj.args
            self.save_reduced(obj, QUANTIZED, (storage, offset, size, stride, tuple(params), grad, hooks))
        else:
            self.save_reduced(obj, obj.name, obj.args)

    dispatch = {  # noqa: RUF012  as in the class that it is of
        **_PythonsPickler.dispatch,
        Global: save_global_name,
        Size: save_size,
        TensorRef: save_tensor,
        Call: save_call,
    }


def pickled_tree(tree: Any) -> tuple[bytes, dict[str, StorageRef]]:
    """The pickle of a tree, and the storage of each key in it.

    Raises :class:`UnsafePickleError` or :class:`UnsupportedError` for what is refused or cannot be written.
    """
    stream = io.BytesIO()
    pickler = TreePickler(stream)
    try:
        pickler.dump(tree)
    except RecursionError:
        problem = "this file holds objects that are nested too deeply to be written"
        raise UnsupportedError(problem, remedy="save it in another form") from None
    return stream.getvalue(), pickler.storages

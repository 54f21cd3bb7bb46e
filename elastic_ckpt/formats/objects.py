"""Makes the objects that a file holds, for whoever resumes: what the job that saved it had, and torch.load returns.

Here, and only here, code runs that a file asks for: classes and functions that the user allowed or trusts. Others are a
closed list, with arguments that are checked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import ElasticCkptError, Remedy, UnsafePickleError, UnsupportedError, refuse_used_up
from elastic_ckpt.formats.numpy_objects import make_numpy, set_array_state, set_dtype_state
from elastic_ckpt.formats.packed_states import refuse_packed
from elastic_ckpt.formats.pickled import PickledFile, open_whole, unreadable
from elastic_ckpt.formats.rebuilt_tensors import REBUILT, make_wrapper
from elastic_ckpt.formats.torch_archive.calls import Call, Global, Size, refuse_errors, unsafe_error
from elastic_ckpt.formats.torch_archive.charges import MADE_NBYTES, PAIR_NBYTES
from elastic_ckpt.formats.torch_archive.globals import ARRAY, BUFFER, DTYPE, NAMESPACE, PLAIN_CLASSES, is_attribute
from elastic_ckpt.formats.torch_archive.tensors import NESTED, QUANTIZED, SPARSE, StorageRef, TensorRef
from elastic_ckpt.formats.torch_archive.tree import replace_leaves

if TYPE_CHECKING:
    import torch

#: Why an entry is not made; that a file is damaged is no reason to go on without one.
_NOT_MADE = (UnsafePickleError, UnsupportedError)
#: torch counts no further.
_MOST_ELEMENTS = 1 << 62
#: Of which objects are made that take more than their parts.
_LARGE = frozenset({TensorRef, StorageRef, Call})
#: Attributes, and elements of tensors that are not dense, for each byte of the file: many objects can be given the same
#: ones.
_MOST_GIVEN = 1
#: Those in addition.
_MOST_MORE_GIVEN = 1 << 16


def materialise(file: PickledFile, node: Any) -> Any:
    """The tree below ``node`` as the job that saved it had it; for what lies outside the model, not for weights.

    Tensors of one storage share memory. Objects of DeepSpeed and Megatron become real ones if their classes are
    imported already; else stand-ins remain. What is made is charged to the file's memory, whether it is kept or not:
    :meth:`.MemoryBudget.given_back` is for what is not. torch is imported only for what is torch's. What is not made
    is an :class:`UnsafePickleError` or :class:`UnsupportedError`, a file that has shrunk a :class:`DamagedError`.
    """
    maker = _Maker(file)
    used = file.memory.used
    try:
        with maker.errors_of(node), file.kept_open():  # keys may be unhashable, or take too long
            return replace_leaves(node, maker.made, maker.give, file.charge)
    except ElasticCkptError:
        file.memory.used = used  # nothing that was made is kept
        raise


def read_objects(path: str) -> Any:
    """What ``torch.load`` returns of a file, made by this package's reader alone; tensors are on the CPU.

    For loaders that would unpickle the file themselves. Raises what :func:`open_pickled` and :func:`materialise` do.
    """
    file = open_whole(path)
    made = materialise(file, file.tree)
    if isinstance(made, Mapping):
        module = made.get("module")
        refuse_packed(path, module if isinstance(module, Mapping) else made)
    return made


def materialise_entries(
    file: PickledFile, entries: Mapping[Any, Any], may_skip: Callable[[Any], bool]
) -> tuple[dict[Any, Any], dict[Any, ElasticCkptError]]:
    """:func:`materialise` of a dictionary, without entries that are not made, whose errors are returned by their keys.

    An entry that may not be left out raises its error, which names it.
    """
    try:
        return materialise(file, dict(entries)), {}
    except _NOT_MADE:
        file.budget.refuse_if_used_up()
        errors: dict[Any, ElasticCkptError] = {}
    for key, value in entries.items():
        try:
            with file.memory.given_back():
                materialise(file, {key: value})
        except _NOT_MADE as error:
            file.budget.refuse_if_used_up()  # which is not of this entry
            name = repr(key)[:100] if isinstance(key, (str, int)) else f"of a {type(key).__name__}"
            remedy = (*error.remedies, Remedy("continues without it", config={"on_unreadable_entry": "skip"}))
            details = {**error.details, "file": file.path, "remedy": remedy}
            errors[key] = type(error)(f"the entry {name} of the client state: {error.problem}", **details)
            if not may_skip(key):
                raise errors[key] from error
    return materialise(file, {key: value for key, value in entries.items() if key not in errors}), errors


class _Maker:
    """Makes the objects of one tree: tensors of one storage share it."""

    def __init__(self, file: PickledFile) -> None:
        self._file = file
        self._memory = file.memory
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._typed: dict[StorageRef, torch.TypedStorage] = {}
        self._left = _MOST_GIVEN * file.nbytes + _MOST_MORE_GIVEN

    @contextmanager
    def errors_of(self, leaf: Any) -> Iterator[None]:
        """Raises what the body raises, as constructors can raise anything, as an error that names what is not made."""
        try:
            yield
        except ElasticCkptError:
            raise
        except Exception as error:
            refuse_used_up(error, self._file.path)
            while isinstance(leaf, Call):  # its result was called
                leaf = leaf.function
            name = leaf if isinstance(leaf, Global) else type(leaf).__name__
            problem = "an object of this file cannot be rebuilt"
            remedy = "save it in another form"
            found = f"{name}: {type(error).__name__}: {error}"[:300]
            raise UnsupportedError(problem, self._file.path, found=found, remedy=remedy) from error

    def made(self, leaf: Any) -> Any:
        """What a leaf stands for."""
        if type(leaf) in _LARGE:
            self._memory.charge(MADE_NBYTES)
        with self.errors_of(leaf):
            if type(leaf) is TensorRef:
                return self._tensor(leaf)
            if type(leaf) is StorageRef:
                return self._typed_storage(leaf)
            if type(leaf) is Size:
                import torch  # noqa: PLC0415  whoever resumes has it; who only looks need not

                return torch.Size(leaf)
            if type(leaf) is Call and leaf.name in (SPARSE, QUANTIZED, NESTED):  # who looks at each element
                self._charge(None, sum(part.numel() for part in leaf.args if hasattr(part, "is_leaf")))
            return _named(leaf) if type(leaf) is Global else _called(leaf) if type(leaf) is Call else leaf

    def give(self, call: Call, made: Any, attributes: dict[str, Any], steps: list[tuple[str, list[Any]]]) -> None:
        """Give an object its attributes, states and items, as :mod:`pickle` does."""
        with self.errors_of(call):
            if attributes:
                self._charge(attributes)
                vars(made).update(attributes)
            if call.name == ARRAY and not steps:
                raise ValueError("an array without data")
            for kind, values in steps:
                if kind == "state":
                    self._charge(values[0])
                    _set_state(call, made, values[0])
                elif kind == "pairs":
                    for key, value in zip(values[::2], values[1::2], strict=True):
                        made[key] = value
                elif kind == "items" and hasattr(made, "extend"):
                    made.extend(values)
                else:
                    for value in values:
                        (made.append if kind == "items" else made.add)(value)

    def _charge(self, state: Any, elements: int = 0) -> None:
        parts = (*state, state) if isinstance(state, tuple) else (state,)
        count = elements + sum(len(each) for each in parts if isinstance(each, (dict, tuple)))
        self._file.budget.charge_objects(count)  # of all that are made of this file
        copied = sum(len(each) for each in parts if isinstance(each, (bytes, bytearray)))
        self._memory.charge(PAIR_NBYTES * count + copied)
        self._left -= count
        if self._left < 0:
            raise ValueError("objects that are given the same many attributes or elements again and again")

    def _storage(self, start: int, nbytes: int) -> torch.UntypedStorage:
        import torch  # noqa: PLC0415

        if not nbytes:
            return torch.UntypedStorage(0)
        if start not in self._storages:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self._file.read_into(start, memoryview(buffer.numpy()))  # type: ignore[arg-type]
            self._storages[start] = buffer.untyped_storage()
        if self._storages[start].nbytes() != nbytes:
            raise unreadable(self._file.path, f"a storage of {nbytes} bytes, and of others, at byte {start}")
        return self._storages[start]

    def _typed_storage(self, ref: StorageRef) -> torch.TypedStorage:
        """A storage of its own, which torch.load makes a typed one of, too."""
        import torch  # noqa: PLC0415

        if ref not in self._typed:
            storage = self._storage(ref.byte_offset, ref.nbytes)
            dtype = getattr(torch, ref.dtype)
            self._typed[ref] = torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        return self._typed[ref]

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


def _set_attributes(tensor: torch.Tensor, attributes: Mapping[Any, Any]) -> None:
    for key in attributes:
        if type(key) is not str or key.startswith("__") or hasattr(type(tensor), key):
            raise unsafe_error(f"an attribute of a tensor named {key}")
    vars(tensor).update(attributes)


def _named(leaf: Global) -> Any:
    """The class or dtype that a name is of."""
    refuse_errors(leaf)
    if leaf.users is not None:
        return leaf.users
    found = _imported(leaf.name)
    if isinstance(found, type) or (leaf.name.startswith("torch.") and found is not None and not callable(found)):
        return found
    problem = "this file holds the name of a class or function that is not there"
    raise UnsupportedError(problem, found=leaf.name[:300], remedy="import its module before loading")


def _imported(path: str) -> Any:
    """What a qualified name stands for; only torch and modules of Python's are imported at a file's wish."""
    module, _, name = path.rpartition(".")
    if module == "torch" or path in PLAIN_CLASSES:
        importlib.import_module(module)
    return getattr(sys.modules.get(module), name, None)


def _called(call: Call) -> Any:
    """The result of a call whose arguments are real; a call still, where its class is not imported."""
    function = call.function
    args = call.args
    if not isinstance(function, Global):
        return function(*args)
    refuse_errors(function)
    if call.how == "tensor":
        return REBUILT[function.name](*args)
    if function.users is None and function.name in (ARRAY, BUFFER, DTYPE):
        return make_numpy(function.name, args)
    cls = _imported(function.name) if function.users is None else function.users
    if function.users is None and not isinstance(cls, type):
        return call
    return _INSTANCES[call.how](cls, *args)


#: How an object of a class is made, by :attr:`Call.how`. A member is looked up by its name: ``getattr`` gives methods.
_INSTANCES: dict[str, Callable[..., Any]] = {
    "call": lambda cls, *args: cls(*args),
    "new": lambda cls, *args: cls.__new__(cls, *args),
    "member": lambda cls, name: cls[name],
    "subclass": lambda cls, tensor: tensor.as_subclass(cls),
    "wrapper": make_wrapper,
}


def _set_state(call: Call, made: Any, state: Any) -> None:
    import torch  # noqa: PLC0415

    own = getattr(made, "__setstate__", None)
    is_array = not call.is_users and call.name != NAMESPACE  # or a dtype, whose states were checked
    if isinstance(made, torch.Tensor) and type(made).__setstate__ is torch.Tensor.__setstate__:
        _set_attributes(made, state[0] if isinstance(state, tuple) else state or {})
    elif type(made) is np.ndarray:
        set_array_state(made, state)
    elif isinstance(made, np.dtype) and call.is_users:
        set_dtype_state(made, state)
    elif own is not None and (call.is_users or is_array):
        own(state)
    else:
        slots = None
        if isinstance(state, tuple) and len(state) == 2:
            state, slots = state
        may_have = _is_plain_name if call.is_users else is_attribute
        if not all(map(may_have, state or {})):  # it may have got keys since it was read
            raise unsafe_error(f"an attribute of {call} that is no plain one")
        if state:
            vars(made).update(state)
        for key, value in (slots or {}).items():
            if not isinstance(getattr(type(made), key, None), MemberDescriptorType):
                raise unsafe_error(f"an attribute of {call} that is none of its slots")
            setattr(made, key, value)


def _is_plain_name(key: Any) -> bool:
    """Whether an object of a user's class may get an attribute: Python gives the others a meaning."""
    return type(key) is str and not (key.startswith("__") and key.endswith("__"))

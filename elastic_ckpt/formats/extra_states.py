"""What modules keep beside parameters and buffers (``get_extra_state``), in the files of a checkpoint.

ZeRO-3 saves the values of each rank, lower stages those of rank 0 alone, and pipelines those of each layer. They are
compared where a file is read, and made only for a load that gives them to a module.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from elastic_ckpt.core.extra_states import SavedExtraState, is_extra_state
from elastic_ckpt.errors import ElasticCkptError, without_frames
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.own_entries import checked_tree, module_entries
from elastic_ckpt.formats.packed_states import refuse_packed
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.calls import Call
from elastic_ckpt.formats.torch_archive.tensors import StorageRef, TensorRef
from elastic_ckpt.formats.values import read_bytes

_DIGEST_NBYTES = 16
#: The digest of a module that kept nothing.
NONE = b""


class ExtraStateCopy(NamedTuple):
    """One rank's value: its FQN, where it is, and which rank of the save that was."""

    name: str
    path: str
    entry: str
    digest: bytes
    dp_rank: int | None  # ``None``: one file for all data-parallel ranks
    tp_rank: int


def extra_states_in(file: PickledFile) -> dict[str, Any]:
    """By name, the entries of a model-states file, or of a pipeline layer's or expert's, as the tree has them."""
    tree = checked_tree(file)
    if "module" in tree:
        entries = module_entries(tree["module"], file.path)
    else:
        entries = {str(name): each for name, each in tree.items()}
    return {name: value for name, value in entries.items() if is_extra_state(name)}


def digests(file: PickledFile, extra_states: Mapping[str, Any]) -> dict[str, bytes]:
    """What tells values from others, by name; :data:`NONE` for none."""
    if not extra_states:
        return {}
    with file.kept_open():
        return {name: NONE if value is None else _digest_of(file, value) for name, value in extra_states.items()}


def _digest_of(file: PickledFile, value: Any) -> bytes:
    """A digest of a value and of the bytes of its tensors; of one too deep for that, a digest of the file's own."""
    try:
        return _Digests(file).of(value)
    except RecursionError:
        return hashlib.blake2b(file.path.encode(), digest_size=_DIGEST_NBYTES).digest()


class _Digests:
    """Digests of the parts of a tree; those that are shared are looked at once."""

    def __init__(self, file: PickledFile) -> None:
        self._file = file
        self._known: dict[int, bytes] = {}

    def of(self, node: Any) -> bytes:
        """The digest of what is at and below a node, which the tree keeps."""
        if id(node) not in self._known:
            found = hashlib.blake2b(type(node).__name__.encode(), digest_size=_DIGEST_NBYTES)
            for part in self._parts_of(node):
                found.update(len(part).to_bytes(8, "little") + part)
            self._known[id(node)] = found.digest()
        return self._known[id(node)]

    def _parts_of(self, node: Any) -> Iterator[bytes]:
        if isinstance(node, TensorRef):
            yield repr((node.dtype, node.shape, node.is_parameter, node.requires_grad)).encode()
            yield hashlib.blake2b(read_bytes(self._file, [node])[0]).digest()
            yield self.of(node.attributes)
        elif isinstance(node, StorageRef):
            elements = bytearray(node.nbytes)
            self._file.read_into(node.byte_offset, memoryview(elements))
            yield node.dtype.encode()
            yield hashlib.blake2b(elements).digest()
        elif isinstance(node, Call):
            yield self.of(node.function) if isinstance(node.function, Call) else node.name.encode()
            yield node.how.encode()
            yield from map(self.of, node.args)
            for kind, values in node.steps:
                yield kind.encode()
                yield from map(self.of, values)
            yield self.of(vars(node))
        elif isinstance(node, Mapping):
            yield from sorted(self.of(key) + self.of(value) for key, value in node.items())
            yield self.of(getattr(node, "__dict__", None))
        elif isinstance(node, argparse.Namespace):
            yield self.of(vars(node))
        elif isinstance(node, (set, frozenset)):
            yield from sorted(map(self.of, node))
        elif isinstance(node, (list, tuple)):
            yield from map(self.of, node)
        else:
            yield bytes(node) if isinstance(node, (bytes, bytearray)) else repr(node).encode()


class _File(Protocol):
    """What was read of a file that has some."""

    @property
    def path(self) -> str: ...

    @property
    def extra_states(self) -> Mapping[str, bytes]: ...


def copies_in(
    file: _File, dp_rank: int | None, tp_rank: int, names: Mapping[str, str] | None = None
) -> list[ExtraStateCopy]:
    """All that are in a file of one rank; ``names``: the entry of each FQN, where these differ."""
    entries = names if names is not None else {name: name for name in file.extra_states}
    return [
        ExtraStateCopy(name, file.path, entry, file.extra_states[entry], dp_rank, tp_rank)
        for name, entry in entries.items()
    ]


def settle(
    copies: Iterable[ExtraStateCopy], own_dp_rank: int | None, own_tp_rank: int | None
) -> dict[str, SavedExtraState]:
    """The value of each name for one live rank, which has these ranks of the save, or ``None``: the save had others.

    Where another rank than its own saved another value, the first is taken, and the file of the other is noted.
    """
    of_name: dict[str, list[ExtraStateCopy]] = {}
    for copy in copies:
        is_mine = own_dp_rank is None or copy.dp_rank in (None, own_dp_rank)
        if is_mine and own_tp_rank in (None, copy.tp_rank):
            of_name.setdefault(copy.name, []).append(copy)
    found: dict[str, SavedExtraState] = {}
    for name, (first, *others) in of_name.items():
        other = next((each.path for each in others if each.digest != first.digest), None)
        found[name] = SavedExtraState(first.path, first.entry, first.digest, other)
    return found


def made_extra_states(file: PickledFile, trust_pickle: bool = False) -> dict[str, Any]:
    """Each value in a file by its name there, or the error that says why it is not made.

    Unless the file is trusted, those with bytes are not, which a module may unpickle.
    """
    made: dict[str, Any] = {}
    with file.kept_open():
        for entry, value in extra_states_in(file).items():
            if value is None:
                continue
            try:
                one = {entry: materialise(file, value)}
                if not trust_pickle:
                    refuse_packed(file.path, one)
                made |= one
            except ElasticCkptError as error:
                if error.parameter:
                    made[entry] = without_frames(error)
                    continue
                problem = f"the extra state of a module (get_extra_state): {error.problem}"
                details = {**error.details, "file": file.path, "parameter": entry}
                made[entry] = type(error)(problem, **details)
    return made

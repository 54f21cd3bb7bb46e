"""Reads the object tree of a ``torch.save`` file, zip archive or legacy, and none of its tensors' bytes."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NoReturn

from isal import isal_zlib

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import ElasticCkptError, UnknownLayoutError
from elastic_ckpt.formats.torch_archive.calls import Global
from elastic_ckpt.formats.torch_archive.charges import MemoryBudget, left_behind, limit_error, limit_unless_trusted
from elastic_ckpt.formats.torch_archive.directory import ArchiveError, Directory, Layout, Layouts
from elastic_ckpt.formats.torch_archive.globals import find_global, find_trusted
from elastic_ckpt.formats.torch_archive.tensors import StorageRef, storage_id
from elastic_ckpt.formats.torch_archive.tree import check_tree, own_entries
from elastic_ckpt.formats.torch_archive.unpickler import Unpickler
from elastic_ckpt.storage import open_stream, size_of

#: Largest pickle.
_MOST_PICKLE_NBYTES = 1 << 30
#: Largest one that may be more than an eighth of its file: those of DeepSpeed have some hundred bytes a tensor.
_MOST_SMALL_PICKLE_NBYTES = 1 << 26
#: ``torch.serialization.MAGIC_NUMBER`` as its own pickle, which a legacy archive begins with.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_VERSION = 1001
#: First part of a legacy archive that is read, four times as much each time that its pickles are longer; part of a
#: record that is read at once to compare its checksum.
_FIRST_NBYTES = _PIECE_NBYTES = 1 << 20
#: Turns the bytes of a pickle at an offset into an object, the offset behind it, and the bytes of memory that the
#: object takes, which the budget of its file allows.
Unpickle = Callable[[bytes, int, Callable[[Any], Any], MemoryBudget], tuple[Any, int, int]]


@dataclass(frozen=True)
class Trees:
    """Trees of zip archives that were read, to be shared by others with the same pickle and places of storages."""

    layouts: Layouts = field(default_factory=dict)
    #: By the digest of a pickle: the key and size of each storage that it names. By it and their offsets: the tree.
    storages: dict[bytes, list[tuple[str, int]]] = field(default_factory=dict)
    trees: dict[tuple[bytes, tuple[int, ...]], Any] = field(default_factory=dict)
    #: By the digest and a layout that alone gives these offsets: the tree, and the records.
    whole: dict[tuple[bytes, Layout], tuple[Any, Records]] = field(default_factory=dict)
    #: By the digest: the bytes of memory that the tree takes.
    object_nbytes: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ArchiveTree:
    """A file's object tree, with each tensor replaced by a :class:`TensorRef`."""

    path: str
    nbytes: int
    tree: Any
    root: str | None = None  # the name it was saved under, without its suffix; None or "archive": not recorded
    records: Records = field(default_factory=Records)  # of its tensors, if it has checksums
    surplus_nbytes: int = 0  # which no record needs
    object_nbytes: int = 0  # of memory that the tree takes, at most

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a :class:`~elastic_ckpt.core.metadata.SourceFile`."""
        return {"path": self.path, "nbytes": self.nbytes, "records": self.records}

    def section(self, *keys: str) -> Any:
        """The entry at a path of dictionary keys; a :class:`DamagedError` if there is none."""
        node = self.tree
        for depth, key in enumerate(keys):
            if not isinstance(node, Mapping) or key not in node:
                problem = "this file lacks an entry that DeepSpeed always writes"
                entry = " / ".join(keys[: depth + 1])
                found = sorted(map(str, node))[:12] if isinstance(node, Mapping) else type(node).__name__
                remedy = "the file is not of this checkpoint, or of a DeepSpeed version that is not supported"
                raise UnknownLayoutError(problem, self.path, entry, found, remedy=remedy)
            node = node[key]
        return node

    def changed_record(self) -> int | None:
        """Byte offset of a tensor's record that does not have its checksum, if there is one; reads the whole file."""
        with open_stream(self.path) as stream:
            for offset, nbytes, crc32 in self.records:
                stream.seek(offset)
                found = 0
                for first in range(0, nbytes, _PIECE_NBYTES):
                    found = isal_zlib.crc32(stream.read(min(nbytes - first, _PIECE_NBYTES)), found)
                if found != crc32:
                    return offset
        return None


def read_archive_tree(
    stream: BinaryIO,
    path: str,
    trust_pickle: bool,
    known: Trees | None = None,
    *,
    by_piece: bool = True,
    memory: MemoryBudget | None = None,
) -> ArchiveTree:
    """Read an open file; ``by_piece``: refuse tensors and nestings that cannot be read piece by piece.

    ``memory``: that of a file of which this is one of several archives, which is charged what their trees take.

    With ``trust_pickle`` its pickles may run code. Otherwise a zip archive shares the tree of one in ``known``, if
    there is such a one, and else is added to them. Raises :class:`ArchiveError` (damaged, or no ``torch.save`` file),
    :class:`pickle.UnpicklingError` (no ``torch.save`` wrote this pickle; noise can raise others as well), and
    :class:`UnsafePickleError` or :class:`UnsupportedError` for what is refused.
    """
    unpickle = _unpickle_trusting if trust_pickle else _unpickle
    memory = memory or MemoryBudget(size_of(stream))
    if not _is_legacy(stream):
        return _read_zip(stream, path, unpickle, Trees() if known is None or trust_pickle else known, by_piece, memory)
    tree, object_nbytes = _read_legacy(stream, unpickle, memory)
    memory.used += object_nbytes
    if by_piece:
        check_tree(own_entries(tree))
    return ArchiveTree(path, size_of(stream), tree, object_nbytes=object_nbytes)


def _is_legacy(stream: BinaryIO) -> bool:
    """Whether an open file begins like a legacy archive; leaves it at its start."""
    begin = stream.read(len(_LEGACY_MAGIC))
    stream.seek(0)
    return begin == _LEGACY_MAGIC


def _read_zip(
    stream: BinaryIO, path: str, unpickle: Unpickle, known: Trees, by_piece: bool, memory: MemoryBudget
) -> ArchiveTree:
    directory = Directory(stream, known.layouts)
    order = directory.read_record("byteorder", 16) if directory.find("byteorder") else b"little"
    if order != b"little":
        raise ArchiveError(f"tensors in byte order {order!r}, where little-endian ones can be read")
    storages: list[tuple[str, int]] = []
    records: list[tuple[int, int, int]] = []

    def offset_of(key: str, nbytes: int) -> int:
        record = directory.find(f"data/{key}")
        if record is None or record.nbytes < nbytes:
            size = "no record" if record is None else f"a record of {record.nbytes} bytes"
            raise ArchiveError(f"{size} for storage {key}, whose tensors are {nbytes} bytes")
        offset = directory.offset(record) if nbytes else 0
        records.append((offset, record.nbytes, record.crc32))
        return offset

    def load(persistent_id: Any) -> StorageRef:
        dtype, key, nbytes, _view = storage_id(persistent_id)
        storages.append((key, nbytes))
        return StorageRef(dtype, nbytes, offset_of(key, nbytes))

    most_nbytes = most_pickle_nbytes(directory.nbytes, unpickle is _unpickle_trusting)
    record = directory.find("data.pkl")
    if record is not None and record.nbytes > most_nbytes:
        expected = f"a pickle of at most {most_nbytes} bytes, in a file of {directory.nbytes}"
        is_lifted = record.nbytes <= most_pickle_nbytes(directory.nbytes, trust_pickle=True)
        raise (limit_unless_trusted if is_lifted else limit_error)(expected, f"{record.nbytes} bytes")
    data = directory.read_record("data.pkl", most_nbytes)
    digest = hashlib.blake2b(data).digest()
    key = digest, directory.layout
    if key in known.whole:
        tree, kept = known.whole[key]
    else:
        offsets = tuple(offset_of(*storage) for storage in known.storages.get(digest, ()))
        if (digest, offsets) not in known.trees:
            records.clear()
            tree, _, known.object_nbytes[digest] = unpickle(data, 0, load, memory)
            memory.used += known.object_nbytes[digest]
            if by_piece:
                check_tree(own_entries(tree))
            offsets = tuple(offset for offset, _, _ in records)
            known.storages[digest] = storages
            known.trees[digest, offsets] = tree
        tree = known.trees[digest, offsets]
        kept = Records.of(records)
        if not directory.has_read_headers:
            known.whole[key] = tree, kept
    more = directory.surplus_nbytes, known.object_nbytes[digest]
    return ArchiveTree(path, directory.nbytes, tree, directory.root, kept, *more)


def most_pickle_nbytes(file_nbytes: int, trust_pickle: bool) -> int:
    """The largest pickle that is read of a file."""
    share = _MOST_PICKLE_NBYTES if trust_pickle else file_nbytes // 8
    return min(max(share, _MOST_SMALL_PICKLE_NBYTES), _MOST_PICKLE_NBYTES)


def unpickled(data: bytes, file_nbytes: int, trust_pickle: bool) -> Any:
    """The tree of a pickle that has no storages; errors as of :func:`read_archive_tree`."""

    def refuse(_persistent_id: Any) -> NoReturn:
        raise ArchiveError("its pickle refers to a torch storage, which it does not have")

    tree = (_unpickle_trusting if trust_pickle else _unpickle)(data, 0, refuse, MemoryBudget(file_nbytes))[0]
    check_tree(tree)
    return tree


def _unpickle(
    data: bytes,
    at: int,
    load: Callable[[Any], Any],
    memory: MemoryBudget,
    *,
    find: Callable[[str, str], Global] = find_global,
    keeps: tuple[type[ElasticCkptError], ...] = (ElasticCkptError,),
    is_trusted: bool = False,
) -> tuple[Any, int, int]:
    held = memory.used
    machine = Unpickler(data, find, load, at, memory.file_nbytes, keeps, is_trusted, held_nbytes=held)
    return machine.run(), machine.at, left_behind(machine.memory, len(data) - at) - held


_unpickle_trusting = partial(_unpickle, find=find_trusted, is_trusted=True)


def _read_legacy(stream: BinaryIO, unpickle: Unpickle, memory: MemoryBudget) -> tuple[Any, int]:
    """The tree of a legacy archive: pickles of magic number, version, system, object and keys, then the storages.

    And the bytes of memory that it takes.
    """
    nbytes = size_of(stream)
    take = _FIRST_NBYTES
    most = most_pickle_nbytes(nbytes, unpickle is _unpickle_trusting)
    while True:
        stream.seek(0)
        head = stream.read(take)
        try:
            return _legacy_tree(head, nbytes, stream, unpickle, memory)
        except (EOFError, IndexError, struct.error, pickle.UnpicklingError):
            if len(head) == nbytes:
                raise
            if take >= most:
                is_lifted = nbytes <= most_pickle_nbytes(nbytes, trust_pickle=True)
                error = limit_unless_trusted if is_lifted else limit_error
                raise error(f"pickles of at most {most} bytes, in a file of {nbytes}", "more") from None
        take = min(4 * take, most)


def _legacy_tree(
    head: bytes, nbytes: int, stream: BinaryIO, unpickle: Unpickle, memory: MemoryBudget
) -> tuple[Any, int]:
    storages: dict[str, tuple[str, int]] = {}
    offsets: dict[str, int] = {}

    def load(persistent_id: Any) -> StorageRef:
        dtype, key, size, view = storage_id(persistent_id)
        if view is not None:
            raise pickle.UnpicklingError("a view of a storage, as torch wrote them before 0.4")
        if storages.setdefault(key, (dtype, size)) != (dtype, size):
            raise pickle.UnpicklingError(f"storage {key} has {size} bytes of {dtype}, and others")
        return StorageRef(dtype, size, offsets.get(key, 0))

    version, at, _ = _unpickle(head, len(_LEGACY_MAGIC), load, memory)
    system, begin, _ = _unpickle(head, at, load, memory)
    if type(version) is not int or version != _LEGACY_VERSION:
        raise ArchiveError("a legacy archive of another version")
    if type(system) is not dict or system.get("little_endian") is not True:
        raise ArchiveError("a legacy archive that is not little-endian")
    _, at, _ = unpickle(head, begin, load, memory)
    keys, at, _ = _unpickle(head, at, load, memory)
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        raise ArchiveError("a legacy archive that lists other storages than its tensors need")
    for key in keys:  # each: number of elements, then the data
        dtype, size = storages[key]
        stream.seek(at)
        raw = stream.read(8)
        if (
            len(raw) < 8
            or int.from_bytes(raw, "little") * ITEMSIZE[dtype.removeprefix("q")] != size
            or at + 8 + size > nbytes
        ):
            raise ArchiveError(f"{nbytes} bytes, but the {size} bytes of storage {key} are not at byte {at}")
        offsets[key] = at + 8
        at += 8 + size
    tree, _, object_nbytes = unpickle(head, begin, load, memory)
    return tree, object_nbytes


def screen(stream: BinaryIO) -> None:
    """Raise unless this package can make every object of an open file: for loaders that get what it makes.

    Errors are those of :func:`read_archive_tree`, also for names that a pickle drops again.
    """
    unpickle = partial(_unpickle, find=_find_listed, keeps=())
    memory = MemoryBudget(size_of(stream))
    if _is_legacy(stream):
        _read_legacy(stream, unpickle, memory)
    else:
        _read_zip(stream, "", unpickle, Trees(), by_piece=False, memory=memory)


def _find_listed(module: str, name: str) -> Global:
    entry = find_global(module, name)
    if entry.error is not None:
        raise entry.error
    return entry

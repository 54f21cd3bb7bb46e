"""The metadata of a ``torch.save`` file, without its tensor data.

DeepSpeed's ``fast`` checkpoint writer (``FastFileWriter``) writes whole blocks from the start of a file, which it does
not truncate, and appends the rest (``_unaligned_drain``): the end of the new archive follows that of the old one, or of
the one that another rank writes under the same name. Whoever trusts the archive's directory, as ``torch.load`` does,
reads old bytes.
"""

from __future__ import annotations

import gc
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar

from isal import isal_zlib

from elastic_ckpt.errors import ANOTHER_TAG, DamagedError, ElasticCkptError, Remedy, refuse_used_up
from elastic_ckpt.formats.naming import DCP_METADATA
from elastic_ckpt.formats.torch_archive.archive import ArchiveTree, Trees, read_archive_tree
from elastic_ckpt.formats.torch_archive.charges import MemoryBudget
from elastic_ckpt.formats.torch_archive.directory import ArchiveError, Listing
from elastic_ckpt.formats.torch_archive.tree import refusals
from elastic_ckpt.formats.work_budget import WorkBudget
from elastic_ckpt.storage import open_stream

T = TypeVar("T")
P = ParamSpec("P")
#: Small reads take whole blocks from the file: many tensors may share one, or lie side by side.
_BLOCK_NBYTES = io.DEFAULT_BUFFER_SIZE
#: Blocks that are kept.
_MOST_BLOCKS = 64


@dataclass(frozen=True)
class PickledFile(ArchiveTree):
    """A file's object tree, and the door to its small tensors, which is open once for many of them."""

    #: Those of a file of which this is one of several archives.
    shared_reads: SmallReads | None = field(default=None, compare=False, repr=False)

    @cached_property
    def _reads(self) -> SmallReads:
        return self.shared_reads or SmallReads(self.path, self.nbytes, self.object_nbytes)

    @property
    def budget(self) -> WorkBudget:
        """What all work on this file is charged to."""
        return self._reads.budget

    @property
    def memory(self) -> MemoryBudget:
        """What the tree, and all that is made of it, may take together: many objects may share one long list."""
        return self._reads.memory

    def charge(self, count: int, nbytes: int) -> None:
        """Objects that a walk meets, and bytes that it makes of them."""
        self.budget.charge_objects(count)
        self.memory.charge(nbytes)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Opens the file at most once for all small reads of the body; may be nested. Of one thread at a time."""
        with self._reads.kept_open():
            yield

    def read_into(self, byte_offset: int, view: memoryview) -> None:
        """Read bytes; :class:`DamagedError` if the file has shrunk, or a whole record is not as it was saved."""
        if not view.nbytes:
            return
        self._reads.read_into(byte_offset, view)
        records = self.records
        number = self.records.index(byte_offset)
        if number is None or (records.offsets[number], records.nbytes[number]) != (byte_offset, view.nbytes):
            return
        if isal_zlib.crc32(view) != records.crc32s[number]:
            raise unreadable(self.path, f"Bad CRC-32 of the {view.nbytes} bytes of a tensor at byte {byte_offset}")


class SmallReads:
    """Reads a file in small pieces, charged to its budget, and keeps the blocks that were read last.

    ``memory`` is that of the file's objects, which take ``object_nbytes`` before anything is made of them.
    """

    def __init__(self, path: str, file_nbytes: int, object_nbytes: int = 0) -> None:
        self.budget = WorkBudget(path, file_nbytes)
        self.memory = MemoryBudget(file_nbytes, object_nbytes)
        self._path = path
        self._users = 0
        self._stream: BinaryIO | None = None
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()  # by their offsets

    @contextmanager
    def kept_open(self) -> Iterator[SmallReads]:
        """See :meth:`PickledFile.kept_open`."""
        self._users += 1
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users and self._stream is not None:
                self._stream.close()
                self._stream = None
                self._blocks.clear()

    def read_into(self, byte_offset: int, view: memoryview) -> None:
        """Read bytes; :class:`DamagedError` if the file has shrunk."""
        with self.kept_open():
            if view.nbytes >= _BLOCK_NBYTES:
                count = self._fill(byte_offset, view)
            else:  # of one block, or of two
                start = byte_offset // _BLOCK_NBYTES * _BLOCK_NBYTES
                raw = self._block(start)[byte_offset - start :][: view.nbytes]
                view[: len(raw)] = raw
                count = len(raw)
                if count < view.nbytes:
                    raw = self._block(start + _BLOCK_NBYTES)[: view.nbytes - count]
                    view[count : count + len(raw)] = raw
                    count += len(raw)
        if count != view.nbytes:
            raise unreadable(self._path, f"end of file inside the tensor at byte {byte_offset}")

    def _block(self, start: int) -> memoryview:
        """A block; shorter at the end of the file."""
        block = self._blocks.pop(start, None)
        if block is None:
            block = memoryview(bytearray(_BLOCK_NBYTES))
            block = block[: self._fill(start, block)]
        self._blocks[start] = block
        if len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return block

    def _fill(self, byte_offset: int, view: memoryview) -> int:
        self.budget.charge_nbytes(view.nbytes)
        if self._stream is None:
            self.budget.charge_open()
            self._stream = open_stream(self._path)
        self._stream.seek(byte_offset)
        return int(self._stream.readinto(view))  # type: ignore[attr-defined]


def opened_once(index: Callable[Concatenate[PickledFile, P], T]) -> Callable[Concatenate[PickledFile, P], T]:
    """A function of a file that opens it at most once, however many small tensors of it are read."""

    @wraps(index)
    def indexed(file: PickledFile, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with file.kept_open():
            return index(file, *args, **kwargs)

    return indexed


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable cyclic garbage collection, which takes half the time of making many small objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def refuse_unmade(file: PickledFile) -> None:
    """Raise :class:`UnsafePickleError` or :class:`UnsupportedError` for an object of a file that is not made."""
    for error in refusals(file.tree):
        raise type(error)(error.problem, **{**error.details, "file": file.path})


@collector_off()
def open_pickled(path: str, trust_pickle: bool = False, known: Trees | None = None) -> PickledFile:
    """Read the metadata of one file: a zip archive or a legacy one of ``torch.save``.

    With ``trust_pickle`` the file may run code; only at the user's explicit wish. Trees in ``known`` are not read again
    but shared, and those that are read are added. Raises :class:`DamagedError` for a file that is missing, truncated or
    shorter than its tensors claim, :class:`UnsafePickleError` for a class or function that is not on the list of safe
    globals, :class:`UnsupportedError` for a tensor or object that cannot be read piece by piece.
    """
    with named_errors(path), open_stream(path) as stream:
        return of_archive(read_archive_tree(stream, path, trust_pickle, known))


@collector_off()
def open_whole(path: str) -> PickledFile:
    """:func:`open_pickled` for who makes all objects of a file, those that cannot be read piece by piece included."""
    with named_errors(path), open_stream(path) as stream:
        return of_archive(read_archive_tree(stream, path, trust_pickle=False, by_piece=False))


def of_archive(tree: ArchiveTree, shared_reads: SmallReads | None = None) -> PickledFile:
    """What was read of an archive, with a budget: its own, or that of the file of which it is a part."""
    return PickledFile(**vars(tree), shared_reads=shared_reads)


@contextmanager
def named_errors(path: str, expected: str | None = None) -> Iterator[None]:
    """Raises whatever the body raises as an error that names the file, of which this is ``expected``."""
    try:
        yield
    except ElasticCkptError as error:
        raise type(error)(error.problem, **{**error.details, "file": path}) from error
    except ArchiveError as error:
        raise unreadable(path, str(error), expected) from error
    except Exception as error:  # noise in a pickle can raise anything at all
        refuse_used_up(error, path)
        found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
        raise unreadable(path, found, expected) from error


def unreadable(path: str, found: str, expected: str | None = None) -> DamagedError:
    """A file that is not complete, or not what its name says."""
    written = "a pickle that torch.distributed.checkpoint wrote" if os.path.basename(path) == DCP_METADATA else expected
    problem = "a file of the checkpoint is truncated or unreadable"
    remedy = Remedy("copy the file again from its original"), ANOTHER_TAG
    return DamagedError(problem, path, written or "a complete torch.save archive", found, remedy=remedy)


def open_file(path: str, trust_pickle: bool, known: Trees | None = None) -> PickledFile:
    """:func:`open_pickled`, with an error that says so if DeepSpeed's ``fast`` writer appended to the file.

    Where such a file can be read, it is refused only if not all of its records have their checksums.
    """
    try:
        file = open_pickled(path, trust_pickle, known)
    except DamagedError:
        nbytes = 0
        with suppress(ArchiveError, DamagedError), open_stream(path) as stream:
            nbytes = Listing(stream).surplus_nbytes
        if nbytes <= 0:
            raise
    else:
        nbytes = file.surplus_nbytes
        if nbytes <= 0 or file.changed_record() is None:
            return file
    problem = "this file may have been written over an older one: it has bytes that no record of its archive has"
    remedy = "use another tag; if DeepSpeed's fast checkpoint writer wrote it, which appends the last bytes of a new "
    remedy += "file to an old one: remove the folder of a tag before it is saved again, and let each rank write under "
    remedy += 'a name of its own ("data_parallel": "replica")'
    expected = "a file that was written once, by one rank"
    found = f"{nbytes} bytes beside its records"
    raise DamagedError(problem, path, expected, found, remedy=remedy)

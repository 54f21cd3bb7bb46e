"""The metadata of a ``torch.save`` file, without its tensor data.

DeepSpeed's ``fast`` checkpoint writer (``FastFileWriter``) writes whole blocks from the start of a file, which it does
not truncate, and appends the rest (``_unaligned_drain``): the end of the new archive follows that of the old one, or of
the one that another rank writes under the same name. Whoever trusts the archive's directory, as ``torch.load`` does,
reads old bytes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from isal import isal_zlib

from elastic_ckpt.errors import DamagedError, ElasticCkptError, refuse_used_up
from elastic_ckpt.formats.naming import DCP_METADATA
from elastic_ckpt.formats.torch_archive.archive import PickledFile as PickledFile  # noqa: PLC0414  its home
from elastic_ckpt.formats.torch_archive.archive import Trees, read_archive_tree
from elastic_ckpt.formats.torch_archive.directory import ArchiveError, Listing
from elastic_ckpt.formats.torch_archive.tree import refusals
from elastic_ckpt.storage import open_stream


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
        return read_archive_tree(stream, path, trust_pickle, known)


@collector_off()
def open_whole(path: str) -> PickledFile:
    """:func:`open_pickled` for who makes all objects of a file, those that cannot be read piece by piece included."""
    with named_errors(path), open_stream(path) as stream:
        return read_archive_tree(stream, path, trust_pickle=False, by_piece=False)


def read_into(file: PickledFile, stream: BinaryIO, byte_offset: int, view: memoryview) -> None:
    """Read bytes of an open file; :class:`DamagedError` if it has shrunk, or a whole record is not as it was saved."""
    stream.seek(byte_offset)
    if stream.readinto(view) != view.nbytes:  # type: ignore[attr-defined]
        raise unreadable(file.path, f"end of file inside the tensor at byte {byte_offset}")
    records, number = file.records, file.records.index(byte_offset)
    if number is None or (records.offsets[number], records.nbytes[number]) != (byte_offset, view.nbytes):
        return
    if isal_zlib.crc32(view) != records.crc32s[number]:
        raise unreadable(file.path, f"Bad CRC-32 of the {view.nbytes} bytes of a tensor at byte {byte_offset}")


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
    remedy = "copy the file again from its original, or take another tag"
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
    problem = "this file was written over an older one: DeepSpeed's fast checkpoint writer appends the last bytes of "
    problem += "the new file to the old one, and torch.load then reads old values"
    remedy = "take another tag; with this writer, remove the folder of a tag before it is saved again, and let each "
    remedy += 'rank write under a name of its own ("data_parallel": "replica")'
    expected, found = "a file that was written once, by one rank", f"{nbytes} bytes of another archive inside it"
    raise DamagedError(problem, path, expected, found, remedy=remedy)

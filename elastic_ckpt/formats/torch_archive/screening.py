"""Looks for code in a file that another loader is about to read, which runs what pickles name.

That loader is torch's, without ``weights_only``. It makes objects that cannot be read piece by piece (sparse tensors,
entangled containers), so nothing is kept of them here; but each opcode is interpreted, and each name must be on the
closed list. The archive's own checks (:mod:`.directory`) see to it that torch reads the same bytes.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, NoReturn

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.archive import is_legacy, most_pickle_nbytes, read_legacy
from elastic_ckpt.formats.torch_archive.calls import Global, unsafe_error
from elastic_ckpt.formats.torch_archive.directory import ArchiveError, Directory
from elastic_ckpt.formats.torch_archive.globals import find_global
from elastic_ckpt.formats.torch_archive.tensors import UNREADABLE, StorageRef, kind_error, storage_id
from elastic_ckpt.formats.torch_archive.unpickler import Machine

#: Records that ``torch.save`` writes, below the archive's root. ``constants.pkl`` would make it TorchScript.
_RECORD = re.compile(
    r"data\.pkl|byteorder|version|data/\w+|\.format_version|\.storage_alignment|\.data/serialization_id"
)
#: Names that are not called: of torchao's optimizer states, which are tensors with attributes.
_NAMES = re.compile(r"torchao\.(?:prototype\.low_bit_optim|optim)\.subclass_\w+\.OptimState\w+")


def screen(stream: BinaryIO) -> None:
    """Raise unless what torch's loader would unpickle of an open file names nothing but what is safe.

    Raises:
        ArchiveError: damaged, or torch might read other bytes than these.
        pickle.UnpicklingError: a pickle that no ``torch.save`` wrote. Noise can raise other exceptions as well.
        UnsafePickleError, UnsupportedError: a name, or a use of one, that is not known to be safe.
    """
    if is_legacy(stream):
        _refuse_tar(stream)
        read_legacy(stream, _run)
        return
    directory = Directory(stream, {})
    odd = [name for name in directory.layout.records if not _RECORD.fullmatch(name)]
    if odd:
        raise ArchiveError(f"record {odd[0][:100]}, which torch.save does not write")
    data = directory.read_record("data.pkl", most_pickle_nbytes(directory.nbytes, trust_pickle=False))
    _run(data, 0, _storage, directory.nbytes)


def _refuse_tar(stream: BinaryIO) -> None:
    """torch's loader looks first whether a file is the tar archive that its very first versions wrote."""
    head = stream.read(tarfile.BLOCKSIZE)
    stream.seek(0)
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        raise ArchiveError("a legacy archive that is a tar archive, too")


def _storage(persistent_id: Any) -> StorageRef:
    dtype, _key, nbytes, _view = storage_id(persistent_id)
    return StorageRef(dtype, nbytes, 0)


def _run(data: bytes, at: int, load: Callable[[Any], Any], file_nbytes: int) -> tuple[Any, int]:
    machine = Machine(data, _find, load, at, file_nbytes, keeps=(UnsupportedError,))
    return machine.run(), machine.at


def _find(module: str, name: str) -> Global:
    path = f"{module}.{name}"
    if path in UNREADABLE:
        return Global(path, partial(_refuse_functions, path))
    entry = Global(path) if _NAMES.fullmatch(path) else find_global(module, name)
    if entry.error is not None:
        raise entry.error
    return entry


def _refuse_functions(name: str, *arguments: Any) -> NoReturn:
    """Raise :class:`UnsafePickleError` if a part of a tensor is a function; else what no reader here makes of parts."""
    met: set[int] = set()
    parts: list[Any] = [*arguments]
    while parts:
        part = parts.pop()
        if type(part) is Global and part.call is not None:
            raise unsafe_error(f"{part.name} as a part of a tensor")
        if type(part) in (tuple, list) and id(part) not in met:
            met.add(id(part))
            parts += part
    raise kind_error(name)

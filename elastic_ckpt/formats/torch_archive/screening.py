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
from typing import Any, BinaryIO

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.archive import is_legacy, most_pickle_nbytes, read_legacy
from elastic_ckpt.formats.torch_archive.calls import Global, described, unsafe_error
from elastic_ckpt.formats.torch_archive.directory import ArchiveError, Directory
from elastic_ckpt.formats.torch_archive.globals import find_global, set_state
from elastic_ckpt.formats.torch_archive.tensors import REBUILD, StorageRef, storage_id
from elastic_ckpt.formats.torch_archive.unpickler import Machine

#: Records that ``torch.save`` writes, below the archive's root. ``constants.pkl`` would make it TorchScript.
_RECORD = re.compile(
    r"data\.pkl|byteorder|version|data/\w+|\.format_version|\.storage_alignment|\.data/serialization_id"
)
#: Functions of torch that rebuild what is no dense tensor, from parts that they check.
_REBUILD_MORE = frozenset(
    f"torch._utils._rebuild_{kind}"
    for kind in ("sparse_tensor", "sparse_csr_tensor", "qtensor", "meta_tensor_no_storage", "wrapper_subclass")
)
#: Names that are not called: of torchao's optimizer states, which are tensors with attributes, and of quantizers.
_NAMES = re.compile(
    r"torchao\.(?:prototype\.low_bit_optim|optim)\.subclass_\w+\.OptimState\w+|torch\.per_(?:tensor|channel)_\w+"
)

_KNOWN = _REBUILD_MORE | REBUILD.keys()


class Opaque:
    """An object that the other loader makes."""


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


def _storage(persistent_id: Any) -> Any:
    try:
        dtype, _key, nbytes, _view = storage_id(persistent_id)
    except UnsupportedError:  # of a dtype that is not read
        return Opaque()
    return StorageRef(dtype, nbytes, 0)


def _run(data: bytes, at: int, load: Callable[[Any], Any], file_nbytes: int) -> tuple[Any, int]:
    machine = Machine(data, _find, load, set_state, at, file_nbytes)
    return machine.run(), machine.at


def _find(module: str, name: str) -> Global:
    path = f"{module}.{name}"
    if _NAMES.fullmatch(path):
        return Global(path)
    entry = find_global(module, name)
    if entry.error is not None:
        raise entry.error
    if path in REBUILD and "_rebuild_from_type" in path:
        return Global(path, _rebuilt_from_type)
    if path in _REBUILD_MORE:
        return Global(path, _rebuilt)
    return Global(path, partial(_rebuilt_if_known, REBUILD[path])) if path in REBUILD else entry


def _rebuilt_if_known(rebuild: Callable[..., Any], *arguments: Any) -> Any:
    """A dense tensor, or what torch would make of it, which the reader of tensors may not support."""
    if any(type(each) is Opaque for each in arguments):
        return _rebuilt(*arguments)
    try:
        return rebuild(*arguments)
    except UnsupportedError:
        return _rebuilt(*arguments)


def _rebuilt_from_type(function: Any, *arguments: Any) -> Opaque:
    """What torch makes with another function, which is called with arguments of the file's."""
    if type(function) is not Global or function.name not in _KNOWN:
        raise unsafe_error(f"{described(function)} as what makes a tensor")
    return _rebuilt(*arguments)


def _rebuilt(*arguments: Any) -> Opaque:
    """What torch makes of parts, none of which may be a function other than those that rebuild tensors."""
    met: set[int] = set()
    parts: list[Any] = [*arguments]
    while parts:
        part = parts.pop()
        if type(part) is Global and part.call is not None and part.name not in _KNOWN:
            raise unsafe_error(f"{part.name} as a part of a tensor")
        if type(part) in (tuple, list) and id(part) not in met:
            met.add(id(part))
            parts += part
    return Opaque()

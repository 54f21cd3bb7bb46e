"""Writes files of ``torch.save`` for other loaders: anew, from what was read of them, and never byte by byte.

Another loader runs whatever a pickle names. What is written names what this package understood, and nothing else.
"""

from __future__ import annotations

import copy
import errno
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.errors import ElasticCkptError, Remedy
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.torch_archive.tree import refusals
from elastic_ckpt.formats.torch_archive.writer import TreePickler, pickled_tree

#: Of a record's header without name and extra field.
_HEADER_NBYTES = 30
#: Of a block of 64-bit sizes.
_WIDE_NBYTES = 20
#: To which torch aligns records.
_ALIGNMENT = 64
#: A block of the extra field, with torch's own mark of padding: the mark and its size.
_PADDING = struct.Struct("<2sH")
#: Of torch's archives (``kProducedFileFormatVersion``).
_VERSION = b"3\n"
_PICKLE: Any = ModuleType(__name__)
_PICKLE.Pickler = TreePickler


def save(tree: Any, path: Path) -> None:
    """:func:`torch.save` for a tree of real tensors, and of stand-ins where DeepSpeed is not imported.

    Raises :class:`OSError` if the file cannot be written, of which torch's own writer tells no more than a position.
    """
    try:
        torch.save(tree, path, pickle_module=_PICKLE, pickle_protocol=2)
    except RuntimeError as error:
        text = f"{str(error).partition(chr(10))[0]} (is the disk full?)"
        raise OSError(errno.EIO, text, str(path)) from error


def rewrite(source: str, target: Path, *, trust_pickle: bool, skip_unreadable: bool) -> list[str]:
    """Write a model-states file anew; returns what is left out of it, with ``skip_unreadable``.

    Memory: one storage. Raises what :func:`open_pickled` does, :class:`UnsafePickleError` or :class:`UnsupportedError`
    for what cannot be written, and :class:`OSError` if the target cannot be.
    """
    file = open_pickled(source, trust_pickle)
    tree, unread = _without_unreadable(file.tree) if skip_unreadable else (file.tree, [])
    try:
        pickled, storages = pickled_tree(tree)
    except ElasticCkptError as error:
        remedy = (*error.remedies, Remedy("leaves it out", config={"on_unreadable_entry": "skip"}))
        raise type(error)(error.problem, **{**error.details, "file": source, "remedy": remedy}) from error
    with file.kept_open(), zipfile.ZipFile(target, "w") as archive:
        _add(archive, "data.pkl", pickled)
        _add(archive, "byteorder", b"little")
        for key, ref in storages.items():
            raw = bytearray(ref.nbytes)
            file.read_into(ref.byte_offset, memoryview(raw))
            _add(archive, f"data/{key}", raw)
        _add(archive, "version", _VERSION)
    return unread


def _without_unreadable(tree: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """A tree without entries of its client state, and extra states of modules, that are not made; and their names."""
    kept = dict(tree)
    unread = list[str]()
    places: list[tuple[dict[Any, Any], Mapping[Any, Any]]] = [
        (kept, {key: value for key, value in tree.items() if key != "module"})
    ]
    if isinstance(tree.get("module"), dict):
        kept["module"] = copy.copy(tree["module"])
        extra = {key: value for key, value in tree["module"].items() if is_extra_state(str(key))}
        places.append((kept["module"], extra))
    for owner, entries in places:
        for key, value in entries.items():
            if next(refusals(value), None) is not None:
                unread.append(str(key))
                del owner[key]
    return kept, unread


def _add(archive: zipfile.ZipFile, name: str, raw: bytes | bytearray) -> None:
    """Add a record as torch writes it: uncompressed, in a folder named after the file, at a multiple of 64 bytes."""
    info = zipfile.ZipInfo(f"{Path(str(archive.filename)).stem}/{name}")
    header_nbytes = _HEADER_NBYTES + len(info.filename.encode()) + len(_PADDING.pack(b"FB", 0))
    if len(raw) * 1.05 > zipfile.ZIP64_LIMIT:  # as zipfile decides
        header_nbytes += _WIDE_NBYTES
    padding_nbytes = -(archive.start_dir + header_nbytes) % _ALIGNMENT
    info.extra = _PADDING.pack(b"FB", padding_nbytes) + bytes(padding_nbytes)
    archive.writestr(info, raw)

"""Writes files of ``torch.save`` for other loaders: anew, from what was read of them, and never byte by byte.

Another loader runs whatever a pickle names. What is written names what this package understood, and nothing else.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.pickled import open_pickled, read_into
from elastic_ckpt.formats.torch_archive.tree import refusals
from elastic_ckpt.formats.torch_archive.writer import TreePickler, pickled_tree
from elastic_ckpt.storage import open_stream

_PICKLE: Any = ModuleType(__name__)
_PICKLE.Pickler = TreePickler


def save(tree: Any, path: Path) -> None:
    """:func:`torch.save` for a tree of real tensors, and of stand-ins where DeepSpeed is not imported.

    Raises :class:`OSError` if the file cannot be written.
    """
    with writing(path):
        torch.save(tree, path, pickle_module=_PICKLE, pickle_protocol=2)


def rewrite(source: str, target: Path, *, trust_pickle: bool, skip_unreadable: bool) -> list[str]:
    """Write a model-states file anew; returns entries of its client state that are left out, with ``skip_unreadable``.

    Memory: one storage. Raises what :func:`open_pickled` does, :class:`UnsafePickleError` or :class:`UnsupportedError`
    for what cannot be written, and :class:`OSError` if the target cannot be.
    """
    file = open_pickled(source, trust_pickle)
    unread = [key for key, value in file.tree.items() if skip_unreadable and next(refusals(value), None) is not None]
    tree = {key: value for key, value in file.tree.items() if key not in unread}
    try:
        data, storages = pickled_tree(tree)
    except ElasticCkptError as error:
        remedy = f'{error.remedy}; or leave it out: "elastic_checkpoint": {{"on_unreadable_entry": "skip"}}'
        raise type(error)(error.problem, **{**error.details, "file": source, "remedy": remedy}) from error
    with (
        open_stream(source) as stream,
        writing(target),
        torch.serialization._open_zipfile_writer(str(target)) as archive,
    ):
        archive.write_record("data.pkl", data, len(data))
        archive.write_record("byteorder", b"little", len(b"little"))
        for key, ref in storages.items():
            buffer = torch.empty(ref.nbytes, dtype=torch.uint8)
            if ref.nbytes:
                read_into(file, stream, ref.byte_offset, memoryview(buffer.numpy()))  # type: ignore[arg-type]
            archive.write_record(f"data/{key}", buffer.untyped_storage(), ref.nbytes)
    return [str(key) for key in unread]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises :class:`OSError` for a file that torch's writer could not write; it tells no more than a position."""
    try:
        yield
    except RuntimeError as error:
        text = f"{str(error).partition(chr(10))[0]} (is the disk full?)"
        raise OSError(errno.EIO, text, str(path)) from error

"""The items of a ``torch.distributed.checkpoint`` file: ``torch.save`` archives, one after another.

Of a tensor's archive, the directory and the pickle are read, not the data: what is needed is where that begins.
"""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import DamagedError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.dcp_metadata import DcpContents, Shape, StoredItem
from elastic_ckpt.formats.metadata_builder import refuse_view
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import PickledFile, named_errors, unreadable
from elastic_ckpt.formats.torch_archive.archive import Trees, read_archive_tree
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.torch_archive.tree import replace_leaves
from elastic_ckpt.formats.values import hyperparameters, read_numbers
from elastic_ckpt.storage.local import open_stream


@dataclass(frozen=True)
class DcpFile(SourceFile):
    """One ``.distcp`` file: byte offset of each item's data (-1: an object), and values of entries by name.

    A value that cannot be read is the error; ``written_at`` is in seconds since 1970.
    """

    byte_offsets: array[int]
    values: Mapping[str, Any]
    written_at: float


class _Slice(io.RawIOBase):
    """An archive within an open file, as a file of its own."""

    def __init__(self, descriptor: int, item: StoredItem) -> None:
        self._descriptor, self._item, self._at = descriptor, item, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (self._item.nbytes if whence == os.SEEK_END else 0)
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        left = max(self._item.nbytes - self._at, 0)
        raw = os.pread(self._descriptor, left if nbytes < 0 else min(nbytes, left), self._item.start + self._at)
        self._at += len(raw)
        return raw


def read_dcp_file(
    path: str,
    items: Sequence[StoredItem],
    contents: DcpContents,
    wanted: Collection[str],
    groups: Collection[str] = (),
    trust_pickle: bool = False,
) -> DcpFile:
    """Locate the data of each item, and read the values of the entries in ``wanted``, which are small. Local.

    The value of an entry in ``groups``, a hyperparameter, is what :func:`.hyperparameters` makes of it:
    ``{"": value}``, or nothing.

    Raises:
        DamagedError: the file is missing or too short, or an item is not what ``.metadata`` says.
    """
    offsets, values, trees = array("q"), dict[str, Any](), Trees()
    records: list[tuple[int, int, int]] = []
    with named_errors(path), open_stream(path) as stream:
        status = os.fstat(stream.fileno())
        size = status.st_size
        for item in items:
            if item.start + item.nbytes > size:
                raise unreadable(path, f"{size} bytes, but {item.name} ends at byte {item.start + item.nbytes}")
            if item.sizes is None and item.name not in wanted:
                offsets.append(-1)
                continue
            try:
                file = _read_item(path, stream.fileno(), item, trees, trust_pickle)
                if item.name in wanted:
                    values[item.name] = _value_of(file, item.name in groups)
            except (UnsafePickleError, UnsupportedError) as error:
                if item.sizes is not None:
                    raise
                values[item.name] = error
                offsets.append(-1)
                continue
            offsets.append(-1 if item.sizes is None else _data_of(item, file.tree, contents, path))
            records += file.records
    return DcpFile(path, size, offsets, values, status.st_mtime, records=Records.of(records))


def _value_of(file: PickledFile, in_group: bool) -> Any:
    if in_group:
        return hyperparameters(file, {"": file.tree})
    is_number = isinstance(file.tree, TensorRef) and not file.tree.shape
    return read_numbers(file, [file.tree])[0].item() if is_number else materialise(file, file.tree)


def _read_item(path: str, descriptor: int, item: StoredItem, trees: Trees, trust_pickle: bool) -> PickledFile:
    """One item, with its tensors' places in the whole file."""

    def moved(leaf: Any) -> Any:
        return replace(leaf, byte_offset=leaf.byte_offset + item.start) if isinstance(leaf, TensorRef) else leaf

    archive = read_archive_tree(_Slice(descriptor, item), trust_pickle, trees)  # type: ignore[arg-type]
    records = Records.of((offset + item.start, nbytes, crc32) for offset, nbytes, crc32 in archive.records)
    return PickledFile(path, os.fstat(descriptor).st_size, replace_leaves(archive.tree, moved), records=records)


def _data_of(item: StoredItem, tree: Any, contents: DcpContents, path: str) -> int:
    """Where a tensor's data begins; :class:`DamagedError` if it is another tensor than ``.metadata`` lists."""
    dtype, _ = contents.tensors[item.name]
    if not isinstance(tree, TensorRef) or tree.dtype != dtype or _without_ones(tree.shape) != _without_ones(item.sizes):
        raise DamagedError(
            "this file holds another tensor than .metadata lists",
            parameter=item.name,
            file=path,
            expected=f"{dtype} of shape {item.sizes} at byte {item.start}",
            found=f"{tree.dtype} of shape {tree.shape}" if isinstance(tree, TensorRef) else type(tree).__name__,
            remedy="files of two saves are mixed: restore the folder from its original, or take another one",
        )
    refuse_view(item.name, "this tensor", tree, path)
    return tree.byte_offset


def _without_ones(shape: Shape | None) -> list[int]:
    """A shape, but for dimensions of one layer."""
    return [size for size in shape or () if size != 1]

"""``.metadata`` of a ``torch.distributed.checkpoint`` folder: which entries there are, and where their bytes are.

It is a pickle, which torch itself loads unrestricted. Here it is read like the pickles of other checkpoints
(:mod:`.torch_archive`): its classes are a closed list, and nothing in it runs. Source: ``metadata.py`` and
``filesystem.py`` of ``torch/distributed/checkpoint``, torch 2.0 to 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.shapes import checked_shape
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.naming import DCP_METADATA
from elastic_ckpt.formats.pickled import named_errors, unreadable
from elastic_ckpt.formats.torch_archive.archive import most_pickle_nbytes, unpickled
from elastic_ckpt.formats.torch_archive.calls import described
from elastic_ckpt.formats.torch_archive.tree import check_tree
from elastic_ckpt.storage.local import open_stream

#: Bytes of ``.metadata`` for one container in it, of which a chunk has a dozen, times those of other pickles.
_MORE_CONTAINERS = 8
Shape = tuple[int, ...]
#: The keys that lead to an entry in the nested state dict.
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A ``torch.save`` archive within a file: a chunk of a tensor, or an object where ``sizes`` is ``None``.

    ``name`` is the entry's; ``start`` and ``nbytes`` locate the archive, ``offsets`` the chunk in the tensor.
    """

    name: str
    start: int
    nbytes: int
    offsets: Shape = ()
    sizes: Shape | None = None


@dataclass(frozen=True)
class DcpContents:
    """What ``.metadata`` lists.

    Attributes:
        tensors: tensor entry -> dtype and shape.
        paths: entry -> its path in the state dict; the flat name alone if that was not recorded.
        files: file name -> its items, by their places.
        written_at: when ``.metadata`` was written, which every save does last; seconds since 1970.
    """

    tensors: Mapping[str, tuple[str, Shape]]
    paths: Mapping[str, Path]
    files: Mapping[str, tuple[StoredItem, ...]]
    written_at: float = 0.0


def read_dcp_metadata(folder: str) -> DcpContents:
    """Read ``.metadata``; :class:`ElasticCkptError` if it is damaged, unsafe, or of a writer that is not supported."""
    path = os.path.join(folder, DCP_METADATA)
    with named_errors(path):
        with open_stream(path) as stream:
            status, most = os.fstat(stream.fileno()), most_pickle_nbytes(0, trust_pickle=True)
            size = status.st_size
            if size > most:
                raise UnsupportedError("this .metadata is larger than any that is read", found=f"{size} bytes")
            raw = stream.read(size)
        tree = unpickled(raw, _no_storage, _MORE_CONTAINERS * len(raw), trust_pickle=False)
        check_tree(tree)
        return replace(_contents(tree, path), written_at=status.st_mtime)


def _no_storage(_persistent_id: Any) -> Any:
    raise ValueError("a tensor")


def _contents(tree: Any, path: str) -> DcpContents:
    tensors: dict[str, tuple[str, Shape]] = {}
    missing: dict[tuple[str, Shape | None], Shape | None] = {}
    for name, entry in tree.state_dict_metadata.items():
        if entry.name.endswith(".BytesStorageMetadata"):
            missing[name, None] = None
            continue
        shape = checked_shape(entry.size, name)
        tensors[name] = _dtype(name, entry.properties.dtype), shape
        for chunk in entry.chunks:
            offsets, sizes = checked_shape(chunk.offsets), checked_shape(chunk.sizes)
            if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
                raise unreadable(path, f"a chunk of {sizes} at {offsets} of {name}, of shape {shape}")
            missing[name, offsets] = sizes
    files: dict[str, list[StoredItem]] = {}
    for index, info in tree.storage_data.items():
        offset = getattr(index, "offset", None)
        key = index.fqn, None if offset is None else checked_shape(offset)
        if key not in missing:
            continue  # as after a save that was cut short and repeated
        start, nbytes = checked_shape((info.offset, info.length))
        item = StoredItem(index.fqn, start, nbytes, key[1] or (), missing.pop(key))
        _refuse_transformed(item, info, path)
        files.setdefault(_file_name(info.relative_path, path), []).append(item)
    if missing:
        raise DamagedError(
            "this .metadata does not tell in which file an entry is",
            parameter=next(iter(missing))[0],
            file=path,
            expected="a file, an offset and a length for each entry",
            found=f"none for {len(missing)}",
            remedy="the save is incomplete: take another one",
        )
    paths = {name: tuple(keys) for name, keys in (getattr(tree, "planner_data", None) or {}).items()}
    if not all(type(key) in (str, int) for keys in paths.values() for key in keys):
        raise unreadable(path, "paths of entries that are not made of names and numbers")
    return DcpContents(
        tensors,
        {name: paths.get(name, (name,)) for name in tree.state_dict_metadata},
        {name: tuple(sorted(items, key=lambda item: item.start)) for name, items in sorted(files.items())},
    )


def _dtype(name: str, dtype: Any) -> str:
    found = dtype.name.removeprefix("torch.")
    if found not in ITEMSIZE:
        raise UnsupportedError(
            "a tensor has a dtype that is not supported",
            parameter=name,
            expected=", ".join(ITEMSIZE),
            found=found,
            remedy="save it in one of these dtypes",
        )
    return found


def _file_name(name: Any, path: str) -> str:
    """A file's name, if it is one in the folder."""
    if type(name) is not str or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise unreadable(path, f"a file that is not in this folder: {described(name)}")
    return name


def _refuse_transformed(item: StoredItem, info: Any, path: str) -> None:
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        raise UnsupportedError(
            "this torch.distributed.checkpoint folder was written through extensions, which are not supported",
            parameter=item.name,
            file=path,
            expected="bytes as they are",
            found=f"transformed by {', '.join(map(described, transforms))}",
            remedy="save it without extensions",
        )

"""The files of a ``torch.distributed.checkpoint`` folder: ``.metadata``, and ``torch.save`` archives one after another.

``.metadata`` says which entries there are, and where their bytes are. It is a pickle, which torch itself loads
unrestricted; here it is read like those of other checkpoints (:mod:`.torch_archive`). Of a tensor's archive, directory
and pickle are read: what is needed is where its data begins. Source: ``metadata.py`` and ``filesystem.py`` of
``torch/distributed/checkpoint``, torch 2.0 to 2.13.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, BinaryIO, cast

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.flat_ranges import checked_shape, checked_tensor_shape
from elastic_ckpt.core.metadata import ITEMSIZE, SourceFile
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import is_number
from elastic_ckpt.errors import DamagedError, UnsafePickleError, UnsupportedError, without_frames
from elastic_ckpt.formats.metadata_builder import refuse_view
from elastic_ckpt.formats.naming import DCP_METADATA
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import PickledFile, SmallReads, named_errors, of_archive, unreadable
from elastic_ckpt.formats.torch_archive.archive import Trees, most_pickle_nbytes, read_archive_tree, unpickled
from elastic_ckpt.formats.torch_archive.calls import described
from elastic_ckpt.formats.torch_archive.tensors import StorageRef, TensorRef
from elastic_ckpt.formats.torch_archive.tree import replace_leaves
from elastic_ckpt.formats.values import hyperparameters, read_numbers
from elastic_ckpt.formats.work_budget import WorkBudget
from elastic_ckpt.storage import PartStream, modified, open_stream, size_of

#: Memory of the objects of a ``.metadata``, which is all pickle, a dozen of them for each chunk: times that of others.
_MORE_MEMORY = 8
#: Of a path from the top of a state dict to an entry.
_MOST_KEYS = 64
#: Most chunks of a tensor whose offsets have one hash: numbers can be chosen so that each is compared with all others.
_MOST_OF_ONE_HASH = 128
#: In characters: a key is a name, an FQN, or an FQN and the key of a state.
_LONGEST_KEY = 2048
Shape = tuple[int, ...]
#: The keys that lead to an entry in the nested state dict.
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A ``torch.save`` archive within a file: a chunk of a tensor, or an object."""

    name: str  # of the entry
    start: int  # of the archive in the file
    nbytes: int
    offsets: Shape = ()  # of the chunk in the tensor
    sizes: Shape | None = None  # ``None``: an object


@dataclass(frozen=True)
class DcpContents:
    """What ``.metadata`` lists."""

    tensors: Mapping[str, tuple[str, Shape]]  # entry -> dtype and shape
    paths: Mapping[str, Path]  # entry -> its path in the state dict; the flat name alone if that was not recorded
    files: Mapping[str, tuple[StoredItem, ...]]  # file name -> its items, by their places
    written_at: float  # when ``.metadata`` was written, which every save does last; seconds since 1970
    budget: WorkBudget = field(compare=False)  # of ``.metadata``, which sorting the entries is charged to


@dataclass(frozen=True)
class DcpFile(SourceFile):
    """One ``.distcp`` file: byte offset of each item's data (-1: an object), and values of entries by name.

    A value that cannot be read is the error; ``written_at`` is in seconds since 1970.
    """

    byte_offsets: array[int]
    values: Mapping[str, Any]
    written_at: float


def read_dcp_metadata(folder: str) -> DcpContents:
    """Read ``.metadata``; :class:`ElasticCkptError` if it is damaged, unsafe, or of a writer that is not supported."""
    path = os.path.join(folder, DCP_METADATA)
    with named_errors(path):
        with open_stream(path) as stream:
            nbytes = size_of(stream)
            if nbytes > most_pickle_nbytes(0, trust_pickle=True):
                problem = "this .metadata is too large to be read"
                raise UnsupportedError(problem, found=f"{nbytes} bytes")
            raw = stream.read(nbytes)
        tree = unpickled(raw, _MORE_MEMORY * len(raw), trust_pickle=False)
        budget = WorkBudget(path, len(raw))
        tensors, missing = _entries(tree, path, budget)
        files: dict[str, list[StoredItem]] = {}
        for index, info in tree.storage_data.items():
            offset = getattr(index, "offset", None)
            key = index.fqn, None if offset is None else checked_shape(offset)
            if key not in missing:
                continue  # as after a save that was cut short and repeated
            if transforms := getattr(info, "transform_descriptors", None):
                what = "a torch.distributed.checkpoint folder that was written through extensions is not supported"
                found = f"transformed by {', '.join(map(described, transforms))}"
                raise UnsupportedError(what, path, "bytes as they are", found, remedy="save it without extensions")
            start, nbytes = checked_shape((info.offset, info.length))
            item = StoredItem(index.fqn, start, nbytes, key[1] or (), missing.pop(key))
            file = info.relative_path
            if type(file) is not str or os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
                raise unreadable(path, f"a file that is not in this folder: {described(file)}")
            files.setdefault(file, []).append(item)
        if missing:
            problem = "this .metadata does not say in which file an entry is: the save is incomplete"
            both = "a file, an offset and a length for each entry", f"none for {len(missing)}"
            raise DamagedError(problem, path, *both, parameter=next(iter(missing))[0])
        paths = _paths(getattr(tree, "planner_data", None), path)
        placed = {name: tuple(sorted(items, key=lambda item: item.start)) for name, items in sorted(files.items())}
        for name, items in placed.items():
            _refuse_overlaps(name, items, path)
        places = {name: paths.get(name, (name,)) for name in tree.state_dict_metadata}
        for keys in places.values():
            _refuse_long_path(keys, path)
        _refuse_one_place(places, path)
        return DcpContents(tensors, places, placed, modified(path), budget)


def _paths(planner_data: Any, path: str) -> dict[str, Path]:
    """The path of each entry in the state dict, as the planner of ``dcp.save`` notes them."""
    planned = {} if planner_data is None else planner_data
    if not isinstance(planned, Mapping) or not all(type(name) is str for name in planned):
        raise unreadable(path, "paths of entries that are not listed by name")
    for keys in planned.values():
        is_path = isinstance(keys, (tuple, list)) and all(map(_is_key, keys))
        if not is_path or not keys:
            raise unreadable(path, "paths of entries that are not made of names and numbers")
    return {name: tuple(keys) for name, keys in planned.items()}


def _is_key(key: Any) -> bool:
    """Whether something is a key of a path: a number of thousands of digits would be written out for each entry."""
    return type(key) is str or (type(key) is int and is_number(key))


def _refuse_one_place(paths: Mapping[str, Path], path: str) -> None:
    """Raise :class:`DamagedError` for two entries at one path, or one in the place of a collection with another.

    Keys count by their text, since names of parameters are text: of two at one place, one alone would be read.
    """
    owners: dict[tuple[str, ...], str] = {}
    for name, keys in paths.items():
        other = owners.setdefault(tuple(map(str, keys)), name)
        if other != name:
            raise _one_place(name, other, path)
    for keys, name in owners.items():
        above = (keys[:stop] for stop in range(1, len(keys)))
        outer = next((owners[each] for each in above if each in owners), None)
        if outer is not None:
            raise _one_place(name, outer, path)


def _one_place(name: str, other: str, path: str) -> DamagedError:
    problem = "two entries of this .metadata are at one place of the state dict"
    return DamagedError(problem, path, "a path of its own for each entry", f"that of {other}", parameter=name)


def _refuse_long_path(keys: Sequence[str | int], path: str) -> None:
    """Raise :class:`UnsupportedError` for a path that no state dict has: sorting takes each beginning of one."""
    longest = max(len(key) if type(key) is str else 0 for key in keys)
    if len(keys) > _MOST_KEYS or longest > _LONGEST_KEY:
        problem = "an entry of this torch.distributed.checkpoint folder has a longer path than elastic_ckpt reads"
        expected = f"a path of at most {_MOST_KEYS} keys, each of at most {_LONGEST_KEY} characters"
        found = f"{len(keys)} keys, the longest of {longest} characters"
        remedy = "this is a limit of elastic_ckpt: save {'model': ..., 'optim': ...} with shorter names"
        raise UnsupportedError(problem, path, expected, found, remedy=remedy)


def _entries(
    tree: Any, path: str, budget: WorkBudget
) -> tuple[dict[str, tuple[str, Shape]], dict[tuple[str, Shape | None], Shape | None]]:
    """The tensors, and the sizes of all chunks by entry and offsets; of objects, these are ``None``."""
    tensors: dict[str, tuple[str, Shape]] = {}
    chunks: dict[tuple[str, Shape | None], Shape | None] = {}
    for name, entry in tree.state_dict_metadata.items():
        if type(name) is not str:
            raise unreadable(path, "entries that are not listed by name")
        if entry.name.endswith(".BytesStorageMetadata"):
            chunks[name, None] = None
            continue
        shape = checked_tensor_shape(entry.size, name)
        dtype = entry.properties.dtype.name.removeprefix("torch.")
        if dtype not in ITEMSIZE:
            problem = "a tensor has a dtype that is not supported"
            raise UnsupportedError(problem, None, ", ".join(ITEMSIZE), dtype, parameter=name)
        tensors[name] = dtype, shape
        budget.charge_objects((1 + len(shape)) * len(entry.chunks))  # many entries may share one list
        hashes = Counter[int]()
        for chunk in entry.chunks:
            offsets = checked_shape(chunk.offsets)
            sizes = checked_shape(chunk.sizes)
            if (name, offsets) not in chunks:
                hashes[hash(offsets)] += 1
                if hashes[hash(offsets)] > _MOST_OF_ONE_HASH:
                    raise unreadable(path, f"more than {_MOST_OF_ONE_HASH} chunks of {name} with the same hash")
            if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
                raise unreadable(path, f"a chunk of {sizes} at {offsets} of {name}, of shape {shape}")
            chunks[name, offsets] = sizes
        covered = sum(math.prod(checked_shape(chunk.sizes)) for chunk in entry.chunks)
        if covered < math.prod(shape):  # which dcp.save refuses to write
            problem = "the chunks of a tensor do not cover it, by this .metadata"
            expected = f"chunks of the {math.prod(shape)} elements of shape {shape}"
            remedy = (
                "the save is incomplete, or two are mixed: restore the folder from its original, or use another tag"
            )
            found = f"{covered} elements in {counted(len(entry.chunks), 'chunk')}"
            raise DamagedError(problem, path, expected, found, parameter=name, remedy=remedy)
    return tensors, chunks


def _refuse_overlaps(file: str, items: Sequence[StoredItem], path: str) -> None:
    """Raise :class:`DamagedError` for two items of a file, given by their places, that share bytes.

    Each is read as an archive of its own: one that all entries share would be read for each of them.
    """
    for item, following in pairwise(items):
        if item.start + item.nbytes > following.start or item.start == following.start:
            problem = f"two entries are in the same bytes of {file}, by this .metadata"
            expected = f"{following.name} behind {item.name}, which ends at byte {item.start + item.nbytes}"
            found = f"{following.name} at byte {following.start}"
            remedy = "save the checkpoint again, or use another tag: no save of torch writes it so"
            raise DamagedError(problem, path, expected, found, parameter=following.name, remedy=remedy)


def _part(stream: BinaryIO, item: StoredItem) -> BinaryIO:
    """An archive within an open file, as a file of its own."""

    def read(view: memoryview, at: int) -> int:
        stream.seek(item.start + at)
        return int(stream.readinto(view))  # type: ignore[attr-defined]

    return cast(BinaryIO, PartStream(read, item.nbytes))


def read_dcp_file(
    path: str,
    name: str,
    contents: DcpContents,
    wanted: Collection[str],
    groups: Collection[str] = (),
    trust_pickle: bool = False,
) -> DcpFile:
    """Locate the data of each item of a file, and read the values of the entries in ``wanted``, which are small.

    The value of an entry in ``groups``, a hyperparameter, is what :func:`.hyperparameters` makes of it:
    ``{"": value}``, or nothing. :class:`DamagedError` if the file is not what ``.metadata`` says.
    """
    offsets = array("q")
    values = dict[str, Any]()
    trees = Trees()
    records: list[tuple[int, int, int]] = []
    with named_errors(path), open_stream(path) as stream, ExitStack() as kept:
        nbytes = size_of(stream)
        reads = kept.enter_context(SmallReads(path, nbytes).kept_open())
        for item in contents.files[name]:
            if item.start + item.nbytes > nbytes:
                end = item.start + item.nbytes
                raise unreadable(path, f"{nbytes} bytes, but {item.name} ends at byte {end}")
            offset = -1
            if item.sizes is not None or item.name in wanted:
                try:
                    part = _part(stream, item)
                    archive = read_archive_tree(part, path, trust_pickle, trees, memory=reads.memory)
                    with reads.memory.given_back():
                        file = _moved(of_archive(replace(archive, nbytes=nbytes), reads), item.start)
                    if item.name in groups:
                        values[item.name] = hyperparameters(file, {"": file.tree})
                    elif item.name in wanted:
                        is_scalar = isinstance(file.tree, TensorRef) and not file.tree.shape
                        read = read_numbers(file, [file.tree])[0].item() if is_scalar else materialise(file, file.tree)
                        values[item.name] = read
                    if item.sizes is not None:
                        offset = _data_of(item, file.tree, contents, path)
                    records += file.records
                except (UnsafePickleError, UnsupportedError) as error:
                    reads.budget.refuse_if_used_up()
                    if item.sizes is not None:
                        raise
                    values[item.name] = without_frames(error)
            offsets.append(offset)
    return DcpFile(path, nbytes, offsets, values, modified(path), records=Records.of(records))


def _moved(file: PickledFile, start: int) -> PickledFile:
    """An archive that begins at a byte of its file, with its tensors' places in that."""

    def moved(leaf: Any) -> Any:
        is_there = isinstance(leaf, (TensorRef, StorageRef))
        return replace(leaf, byte_offset=leaf.byte_offset + start) if is_there else leaf

    records = Records.of((offset + start, nbytes, crc32) for offset, nbytes, crc32 in file.records)
    tree = replace_leaves(file.tree, moved, charge=file.charge)
    return replace(file, tree=tree, records=records)


def _data_of(item: StoredItem, tree: Any, contents: DcpContents, path: str) -> int:
    """Where a tensor's data begins; :class:`DamagedError` if it is another tensor than ``.metadata`` lists."""
    dtype, _ = contents.tensors[item.name]
    expected = dtype, [size for size in item.sizes or () if size != 1]  # but for dimensions of one layer
    if not isinstance(tree, TensorRef) or (tree.dtype, [size for size in tree.shape if size != 1]) != expected:
        problem = "this file holds another tensor than .metadata lists: files of two saves are mixed"
        found = f"{tree.dtype} of shape {tree.shape}" if isinstance(tree, TensorRef) else type(tree).__name__
        listed = f"{dtype} of shape {item.sizes} at byte {item.start}"
        raise DamagedError(problem, path, listed, found, parameter=item.name)
    refuse_view(item.name, "this tensor", tree, path)
    return tree.byte_offset

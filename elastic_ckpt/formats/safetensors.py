"""Folders of safetensors: of Hugging Face's libraries, and of ``elastic-ckpt export`` with optimizer states. For tools.

The format is that of https://github.com/huggingface/safetensors#format (0.8.0): the header's length as a little-endian
64-bit integer, the header as JSON, and the tensors in row-major order, without gaps. Files are untrusted.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any

from elastic_ckpt.core.flat_ranges import checked_shape, checked_tensor_shape
from elastic_ckpt.core.metadata import FROZEN, ITEMSIZE, MASTER, WEIGHTS, CheckpointMetadata, SavedParameter, SourceFile
from elastic_ckpt.core.state_kinds import MOMENTS, StateOptions
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.values import TrainingState, is_number
from elastic_ckpt.errors import DamagedError, MismatchError, Remedy, UnsupportedError, listed
from elastic_ckpt.formats.base import Checkpoint, CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.known_states import check_master, check_shapes, check_tensor, check_value
from elastic_ckpt.formats.metadata_builder import Tensors, dense_tensor
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import named_errors
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.storage import absolute, file_names, is_folder, open_stream, size_of

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
METADATA = "__metadata__"
_EXPECTED = "a complete safetensors file, or an index of some, as their library writes them"
#: torch dtype -> its name in the format.
DTYPES: Mapping[str, str] = MappingProxyType(
    {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (64, 32, 16, 8)}
    | {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
)
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
#: File with optimizer states, as ``elastic-ckpt export --optimizer`` writes it.
_OPTIMIZER = "optimizer"
#: File with the weights.
_MODEL = "model"
_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
#: Text that is read of a file at most: the largest header that the library of safetensors reads.
_MOST_JSON_NBYTES = 100_000_000
#: Bytes that Python takes at most for what a sign begins or separates, and for a character, which may be a wide one.
_COSTS: Mapping[bytes, int] = MappingProxyType({b"{": 250, b"[": 90, b":": 160, b",": 70})
_COST_OF_ASCII = 7
_COST_OF_OTHERS = 10
_MOST_MEMORY_NBYTES = 1 << 30
_MOST_DIGITS = 21  # of integers, with a sign
_FEW_DIGITS = 19  # fewer are within 64 bits
_MOST_DEPTH = 128  # of containers in param groups, as in pickles


@dataclass(frozen=True)
class WeightsFile(SourceFile):
    """One file: its tensors by name, and its metadata."""

    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str] = field(default_factory=dict)


def find_safetensors(folder: str) -> CheckpointInfo | None:
    """The folder, if it has safetensors files or an index of some."""
    names = file_names(folder) if is_folder(folder) else []
    return info_of(folder) if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names) else None


def info_of(folder: str) -> CheckpointInfo:
    """A folder of whole tensors under their names."""
    path = absolute(folder)
    return CheckpointInfo("safetensors", path, os.path.basename(path), sort_names((), is_universal=False))


def read_safetensors(found: CheckpointInfo, options: MetadataOptions) -> Checkpoint:
    """Read the headers of one model's files, and of its optimizer's. Local.

    Of several models, the one called ``model`` is read, and a note names the other files. Raises :class:`DamagedError`
    if a file is missing or damaged, or an index disagrees with its files; :class:`MismatchError` if two files have a
    tensor of a name, or none of several models is called ``model``; :class:`UnsupportedError` for an unknown dtype.
    """
    names = {name for name in file_names(found.folder) if name.endswith((SUFFIX, INDEX_SUFFIX))}
    headers: dict[str, WeightsFile] = {}
    stems = {_stem(name) for name in names}
    if len(models := stems - {_OPTIMIZER}) > 1 and _MODEL not in models:
        problem = "this folder has safetensors files of several models"
        expected = f"{_MODEL}{SUFFIX}, or files of one"
        remedy = "put the files of the one that you mean into a folder of their own"
        raise MismatchError(problem, found.folder, expected, listed(models), remedy=remedy)
    for stem in sorted(({_MODEL} if len(models) > 1 else models) | (stems & {_OPTIMIZER})):
        is_indexed = stem + INDEX_SUFFIX in names
        of_stem = read_indexed(found, stem + INDEX_SUFFIX) if is_indexed else _read_plain(found, stem, names)
        headers |= {os.path.basename(file.path): file for file in of_stem}
    files = list(headers.values())
    unread = [name for name in names if name.endswith(SUFFIX) and name not in headers]
    notes = (f"files that do not belong to this model are not read: {listed(unread)}",) if unread else ()
    metadata = metadata_of(found, files, notes, options.counting_states)
    steps = max((float(dict(saved.scalars).get("step", 0)) for saved in metadata.parameters.values()), default=0)
    return Checkpoint(metadata, TrainingState.after(steps), files[0].path, len(files))


def _stem(name: str) -> str:
    """What the files and the index of one model have in common: ``model`` of ``model-00001-of-00002.safetensors``."""
    return _NUMBER.sub("", name.removesuffix(INDEX_SUFFIX).removesuffix(SUFFIX))


def _read_plain(found: CheckpointInfo, stem: str, names: set[str]) -> list[WeightsFile]:
    """Files without an index: one, or all that their numbers count."""
    files = sorted(name for name in names if _stem(name) == stem)
    if files not in ([stem + SUFFIX], [f"{stem}-{n + 1:05d}-of-{len(files):05d}{SUFFIX}" for n in range(len(files))]):
        problem = "these files have no index, and are not all files of one save"
        raise DamagedError(problem, found.path(files[0]), f"{stem}{INDEX_SUFFIX}", listed(files))
    return [read_header(found.path(name)) for name in files]


def read_header(path: str) -> WeightsFile:
    """One file of safetensors."""
    with named_errors(path, _EXPECTED), open_stream(path) as stream:
        size = size_of(stream)
        (nbytes,) = struct.unpack("<Q", stream.read(8))
        if nbytes > min(_MOST_JSON_NBYTES, size - 8):
            raise ValueError(f"a header of {nbytes} bytes in a file of {size}")
        header = parse_json(stream.read(nbytes))
        metadata = header.pop(METADATA, {})
        position = 8 + nbytes
        tensors = {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata whose values are not text")
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] not in _TORCH_DTYPES:
                problem = "a tensor has a dtype that is not supported"
                found = str(entry["dtype"])
                remedy = Remedy("convert it to one of these, and save the file again")
                raise UnsupportedError(problem, None, listed(_TORCH_DTYPES), found, parameter=name, remedy=remedy)
            dtype = _TORCH_DTYPES[entry["dtype"]]
            shape = checked_tensor_shape(entry["shape"], name)
            start, stop = (8 + nbytes + offset for offset in checked_shape(entry["data_offsets"], name))
            if start != position or stop - start != math.prod(shape) * ITEMSIZE[dtype]:
                raise ValueError(f"{name} of {dtype} and shape {shape} from byte {start} to {stop}, after {position}")
            tensors[name] = TensorRef(dtype, shape, _strides(shape), start)
            position = stop
        if position != size:
            raise ValueError(f"{size} bytes, where the header's tensors end at byte {position}")
    return WeightsFile(path, size, tensors, metadata)


def _strides(shape: Shape) -> tuple[int, ...]:
    """Elements between neighbours in each dimension of a contiguous tensor."""
    return tuple(accumulate(shape[:0:-1], operator.mul, initial=1))[::-1] if shape else ()


def read_indexed(
    found: CheckpointInfo, name: str, read: Callable[[str], WeightsFile] = read_header, tied: Collection[str] = ()
) -> list[WeightsFile]:
    """The files that an index names, which have the tensors that it names; but those that are ``tied``."""
    path = found.path(name)
    with named_errors(path, _EXPECTED), open_stream(path) as stream:
        index = parse_json(stream.read(_MOST_JSON_NBYTES))["weight_map"]
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise ValueError("a weight_map that does not name files")
        if any(os.path.basename(file) != file for file in index.values()):
            raise ValueError("a file that is not in this folder")
    files = [read(found.path(file)) for file in sorted(set(index.values()))]
    check_index(path, index, files, tied)
    return files


def check_index(path: str, index: Mapping[str, str], files: Sequence[WeightsFile], tied: Collection[str]) -> None:
    """Raise :class:`DamagedError` unless files have the tensors that an index names; but those that are ``tied``."""
    tied = {*tied, *(alias for file in files for alias in file.metadata)}  # some indexes list them
    there = {(name, os.path.basename(file.path)) for file in files for name in file.tensors}
    differ = {name for name, _ in there.symmetric_difference(index.items())}
    differ -= tied - {name for name, _ in there}
    if differ:
        problem = "the index does not belong to these files: they have other tensors than it names"
        raise DamagedError(problem, path, "each tensor in the file that the index names", parameter=differ)


def _groups_and_scalars(
    files: Sequence[WeightsFile], options: StateOptions
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Param groups, with the names of their parameters, and scalar states, as ``elastic-ckpt export`` writes them."""
    of_optimizer = [file for file in files if _stem(os.path.basename(file.path)) == _OPTIMIZER]
    facts = {key: value for file in of_optimizer for key, value in file.metadata.items()}
    if not facts:
        return [], {}
    with named_errors(of_optimizer[0].path, _EXPECTED):
        groups = parse_json(facts.get("param_groups", "[]").encode())
        scalars = parse_json(facts.get("scalars", "{}").encode())
        if _is_deeper(groups, _MOST_DEPTH):  # whoever compares values recurses into them
            raise ValueError(f"param groups with values that are nested more than {_MOST_DEPTH} deep")
        members = [name for group in groups for name in group["params"]]
        if not all(isinstance(name, str) for name in members) or len(set(members)) < len(members):
            raise ValueError("param groups whose params are not names, or have one twice")
        plain = (value for values in scalars.values() for value in values.values())
        if not all(value is None or isinstance(value, int | float) for value in plain):
            raise ValueError("scalar states that are not numbers")
    for name, values in scalars.items():
        for key, value in values.items():
            check_value(of_optimizer[0].path, key, value, options, name)
    return groups, scalars


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and dictionaries of a JSON value are nested in more than ``most`` of them."""
    level = [value]
    for _ in range(most):
        containers = [each.values() if isinstance(each, dict) else each for each in level if _is_container(each)]
        level = list(chain.from_iterable(containers))
    return any(map(_is_container, level))


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _owners(files: Sequence[WeightsFile]) -> dict[tuple[bool, str], int]:
    """Whether it is an optimizer's, and the name of each tensor -> the one of the files that has it."""
    owner: dict[tuple[bool, str], int] = {}
    for number, file in enumerate(files):
        for name in file.tensors:
            first = owner.setdefault((_stem(os.path.basename(file.path)) == _OPTIMIZER, name), number)
            if first != number:
                raise in_two_files(name, file.path, files[first].path)
    return owner


def in_two_files(name: str, path: str, other: str) -> MismatchError:
    """The error for a tensor that another file of the folder has, too."""
    problem = "two files of this folder have a tensor of one name"
    remedy = "remove the one that is foreign"
    return MismatchError(problem, path, "one file for each tensor", f"also in {other}", parameter=name, remedy=remedy)


def metadata_of(
    found: CheckpointInfo,
    files: Sequence[WeightsFile],
    notes: tuple[str, ...] = (),
    options: StateOptions = StateOptions(),  # noqa: B008  frozen
) -> CheckpointMetadata:
    """What the files hold; :class:`MismatchError` if two of them have a tensor of a name.

    Raises :class:`DamagedError` for optimizer states of known names that no optimizer keeps.
    """
    owner = _owners(files)
    (saved_groups, scalars) = _groups_and_scalars(files, options)
    groups = [
        {key: tuple(value) if isinstance(value, list) and key != "params" else value for key, value in group.items()}
        for group in saved_groups
    ]
    members = {name: number for number, group in enumerate(groups) for name in group.pop("params")}
    tensors: Tensors = {}
    for (is_state, entry), number in owner.items():
        key, _, name = entry.partition(".") if is_state else (MASTER if entry in members else FROZEN, "", entry)
        tensors[name, key] = dense_tensor(name, key, files[number].tensors[entry], number)
    tensors |= _states(tensors, members, files, options)
    parameters = {
        name: SavedParameter(tensors[name, MASTER].shape, group, tuple(sorted(scalars.get(name, {}).items())))
        for name, group in members.items()
        if (name, MASTER) in tensors
    }
    every = [file.metadata.items() for file in files]
    ties = {alias: name for items in every for alias, name in items if (False, name) in owner and alias != "format"}
    return CheckpointMetadata(
        source=found.source(0, 1, files=len(files)),
        files=tuple(SourceFile(file.path, file.nbytes, records=file.records) for file in files),
        parameters=parameters,
        tensors=tensors,
        groups=tuple(groups),
        aliases={alias: name for alias, name in ties.items() if (False, alias) not in owner},
        notes=notes,
    )


def _states(tensors: Tensors, members: Collection[str], files: Sequence[WeightsFile], options: StateOptions) -> Tensors:
    """The optimizer states, each with whether it has another shape than its parameter; checks masters, too."""
    found: Tensors = {}
    moments: dict[str, dict[str, Shape]] = {}
    paths = {place: files[chunk.file].path for place, tensor in tensors.items() for chunk in tensor.chunks}
    for (name, key), tensor in tensors.items():
        path = paths.get((name, key), files[0].path)
        if key == MASTER:
            check_master(path, tensor.dtype, tensor.shape, name)
        if key in WEIGHTS:
            continue
        if (name, MASTER) not in tensors:
            problem = "an optimizer state is of no parameter of a param group"
            expected = "only states of parameters"
            raise DamagedError(problem, path, expected, f"{key}.{name}", parameter=name)
        own = tensors[name, MASTER].shape
        check_tensor(path, key, tensor.dtype, tensor.shape, options, name)
        found[name, key] = replace(tensor, has_own_shape=own not in (tensor.shape, tensor.shape[1:]))
        if key in MOMENTS:
            moments.setdefault(name, {})[key] = tensor.shape
    for name, shapes in moments.items():
        check_shapes(
            paths.get((name, next(iter(shapes))), files[0].path), shapes, tensors[name, MASTER].shape, options, name
        )
    return found


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8; ``UnsupportedError`` above 1 GiB.

    ``ValueError`` if it is none, is in another encoding, has a key twice, or an integer beyond 64 bits, to which
    nothing in these files counts.
    """
    needed = len(text) * (_COST_OF_ASCII if text.isascii() else _COST_OF_OTHERS)
    needed += sum(cost * text.count(sign) for sign, cost in _COSTS.items())
    if needed > _MOST_MEMORY_NBYTES:
        problem = "this file has too much JSON"
        remedy = "save fewer tensors in one file"
        expected = f"JSON that takes at most {_MOST_MEMORY_NBYTES} bytes of memory"
        found = f"{len(text)} bytes of text, which may take {needed}"
        raise UnsupportedError(problem, expected=expected, found=found, remedy=remedy)
    try:
        # of bytes, json would guess the encoding, and other readers of the format see another text
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def _integer(digits: str) -> int:
    if len(digits) < _FEW_DIGITS:
        return int(digits)  # as almost every one of the millions that a header may have
    if len(digits) > _MOST_DIGITS or not is_number(value := int(digits)):
        raise ValueError(f"an integer of {len(digits)} digits")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("two entries of one name")
    return found

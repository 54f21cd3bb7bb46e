"""Pretrained weights: the folders that Transformers' ``from_pretrained`` loads, of safetensors or ``torch.save``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import DamagedError, NotFoundError, Remedy, UnsupportedError, listed
from elastic_ckpt.formats.metadata_builder import refuse_view
from elastic_ckpt.formats.pickled import open_file, refuse_unmade
from elastic_ckpt.formats.safetensors import (
    INDEX_SUFFIX,
    SUFFIX,
    WeightsFile,
    check_index,
    info_of,
    metadata_of,
    read_header,
    read_indexed,
)
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.storage import absolute, file_names, is_folder

_CONTIGUOUS = Remedy("save the weights again, each with .contiguous()")
_INDEX_OF_ARCHIVES = ".bin.index.json"
#: Of a name of a weight. Transformers' patterns for names are Python's ``re``, which takes the square of it.
_MOST_CHARACTERS = 2048
#: The files of which ``from_pretrained`` takes the first that is there.
_CHOICES = (f"model{SUFFIX}", f"model{INDEX_SUFFIX}", "pytorch_model.bin", f"pytorch_model{_INDEX_OF_ARCHIVES}")


def read_weights(
    folder: str,
    paths: Sequence[str] | None,
    trust_pickle: bool,
    tied: Collection[str] = (),
    index: Mapping[str, str] | None = None,
) -> list[WeightsFile]:
    """What each file of a folder holds: of those that ``from_pretrained`` takes, unless ``paths`` names them. Local.

    ``tied``: names that an index may list though no file has them; ``index``: which of ``paths`` has which tensor, by
    the names of files, if an index of the folder says so. Raises :class:`NotFoundError` if there are no
    weights, :class:`DamagedError` if a file is missing or damaged or the index disagrees with them,
    :class:`UnsupportedError` or :class:`UnsafePickleError` for what cannot be read by its bytes.
    """
    read = partial(_read_file, trust_pickle=trust_pickle)
    if paths is not None:
        check_names(folder, index or {})
        files = [read(absolute(path)) for path in paths]
        if index:
            # Transformers loads what files have and their index does not list, too
            unlisted = {
                name: os.path.basename(file.path) for file in files for name in file.tensors.keys() - index.keys()
            }
            check_index(_path_of_index(folder), {**unlisted, **index}, files, tied)
        return files
    if not is_folder(folder):
        raise no_folder(folder)
    names = set(file_names(folder))
    name = next((choice for choice in _CHOICES if choice in names), None)
    if name is None:
        problem = "this folder has no weights"
        remedy = "give the folder that save_pretrained wrote"
        expected = f"one of {', '.join(_CHOICES)}"
        found = f"{counted(len(names), 'other file')}"
        raise NotFoundError(problem, folder, expected, found, remedy=remedy)
    info = info_of(folder)
    return read_indexed(info, name, read, tied) if name.endswith(".json") else [read(info.path(name))]


def weights_metadata(folder: str, files: Sequence[WeightsFile]) -> CheckpointMetadata:
    """The weights in these files, under the names that they have there."""
    return replace(metadata_of(info_of(folder), files), aliases={})


def check_names(folder: str, index: Mapping[str, str]) -> None:
    """Raise :class:`DamagedError` if the index of a folder names files that are not in it. Local."""
    outside = {file for file in index.values() if os.path.basename(file) != file}
    if outside:
        problem = "the index names files that are not in its folder"
        expected = "names of files beside the index"
        names = [name for name, file in index.items() if file in outside]
        raise DamagedError(problem, _path_of_index(folder), expected, listed(outside), parameter=names)


def _path_of_index(folder: str) -> str:
    """The only index in a folder; the folder, if it has several."""
    info = info_of(folder)
    names = [name for name in file_names(folder) if ".index." in name and name.endswith(".json")]
    return info.path(names[0]) if len(names) == 1 else info.folder


def no_folder(folder: str) -> NotFoundError:
    """The error for what is no folder, such as a model's name or page on the hub."""
    problem = "there is no such folder"
    expected = "a folder that save_pretrained wrote, or the URL of one (s3://...)"
    remedy = 'of a model on the Hugging Face hub: huggingface_hub.snapshot_download("organization/model") returns one'
    return NotFoundError(problem, folder, expected, remedy=remedy)


def check_length(path: str, names: Iterable[Any]) -> None:
    """Raise :class:`DamagedError` if a file has a weight of a name that is longer than any module's. Local."""
    longest = max((name for name in names if isinstance(name, str)), key=len, default="")
    if len(longest) > _MOST_CHARACTERS:
        problem = "a weight of this file has a name that is too long"
        expected = f"names of at most {_MOST_CHARACTERS} characters"
        found = f"{longest[:100]}..., of {len(longest)} characters"
        raise DamagedError(problem, path, expected, found)


def _read_file(path: str, trust_pickle: bool) -> WeightsFile:
    file = read_header(path) if path.endswith(SUFFIX) else _read_archive(path, trust_pickle)
    check_length(path, file.tensors)
    return file


def _read_archive(path: str, trust_pickle: bool) -> WeightsFile:
    file = open_file(path, trust_pickle)
    refuse_unmade(file)
    if not isinstance(file.tree, Mapping):
        raise other_than_weights(path, type(file.tree).__name__)
    tensors = {}
    for name, ref in file.tree.items():
        if not isinstance(name, str) or not isinstance(ref, TensorRef):
            raise other_than_weights(path, f"{type(ref).__name__} under {str(name)[:100]!r}")
        refuse_view(name, "this weight", ref, path, _CONTIGUOUS)
        tensors[name] = ref
    return WeightsFile(**file.facts, tensors=tensors)


def other_than_weights(path: str, found: str) -> UnsupportedError:
    """The error for a file of ``torch.save`` that is no state dict."""
    problem = "this file holds more than weights"
    expected = "the state dict of a module: a tensor for each name"
    return UnsupportedError(problem, path, expected, found, remedy="save only module.state_dict()")

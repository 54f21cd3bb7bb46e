"""Pretrained weights: the folders that Transformers' ``from_pretrained`` loads, of safetensors or ``torch.save``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import NotFoundError, Remedy, UnsupportedError
from elastic_ckpt.formats.metadata_builder import refuse_view
from elastic_ckpt.formats.pickled import open_file, refuse_unmade
from elastic_ckpt.formats.safetensors import (
    INDEX_SUFFIX,
    SUFFIX,
    WeightsFile,
    info_of,
    metadata_of,
    read_header,
    read_indexed,
)
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.storage import absolute, file_names, is_folder

_CONTIGUOUS = Remedy("save the weights again, each with .contiguous()")
_INDEX_OF_ARCHIVES = ".bin.index.json"
#: The files of which ``from_pretrained`` takes the first that is there.
_CHOICES = (f"model{SUFFIX}", f"model{INDEX_SUFFIX}", "pytorch_model.bin", f"pytorch_model{_INDEX_OF_ARCHIVES}")


def read_weights(
    folder: str, paths: Sequence[str] | None, trust_pickle: bool, tied: Collection[str] = ()
) -> list[WeightsFile]:
    """What each file of a folder holds: of those that ``from_pretrained`` takes, unless ``paths`` names them. Local.

    ``tied``: names that an index may list though no file has them. Raises :class:`NotFoundError` if there are no
    weights, :class:`DamagedError` if a file is missing or damaged or the index disagrees with them,
    :class:`UnsupportedError` or :class:`UnsafePickleError` for what cannot be read by its bytes.
    """
    read = partial(_read_file, trust_pickle=trust_pickle)
    if paths is not None:
        return [read(absolute(path)) for path in paths]
    if not is_folder(folder):
        raise no_folder(folder)
    names = set(file_names(folder))
    name = next((choice for choice in _CHOICES if choice in names), None)
    if name is None:
        problem, remedy = "this folder has no weights", "give the folder that save_pretrained wrote"
        expected, found = f"one of {', '.join(_CHOICES)}", f"{counted(len(names), 'other file')}"
        raise NotFoundError(problem, folder, expected, found, remedy=remedy)
    info = info_of(folder)
    return read_indexed(info, name, read, tied) if name.endswith(".json") else [read(info.path(name))]


def weights_metadata(folder: str, files: Sequence[WeightsFile]) -> CheckpointMetadata:
    """The weights in these files, under the names that they have there."""
    return replace(metadata_of(info_of(folder), files), aliases={})


def no_folder(folder: str) -> NotFoundError:
    """The error for what is no folder, such as a model's name or page on the hub."""
    problem, expected = "there is no such folder", "a folder that save_pretrained wrote, or the URL of one (s3://...)"
    remedy = 'of a model on the Hugging Face hub: huggingface_hub.snapshot_download("organization/model") returns one'
    return NotFoundError(problem, folder, expected, remedy=remedy)


def _read_file(path: str, trust_pickle: bool) -> WeightsFile:
    if path.endswith(SUFFIX):
        return read_header(path)
    file = open_file(path, trust_pickle)
    refuse_unmade(file)
    if not isinstance(file.tree, Mapping):
        raise _other_than_weights(path, type(file.tree).__name__)
    tensors = {}
    for name, ref in file.tree.items():
        if not isinstance(name, str) or not isinstance(ref, TensorRef):
            raise _other_than_weights(path, f"{type(ref).__name__} under {str(name)[:100]!r}")
        refuse_view(name, "this weight", ref, path, _CONTIGUOUS)
        tensors[name] = ref
    return WeightsFile(**file.facts, tensors=tensors)


def _other_than_weights(path: str, found: str) -> UnsupportedError:
    problem, expected = "this file does not hold weights alone", "the state dict of a module: a tensor for each name"
    return UnsupportedError(problem, path, expected, found, remedy="save module.state_dict() alone")

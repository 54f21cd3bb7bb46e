"""What an export holds: selected tensors, their dtypes, and the files that they are in.

Files are cut and named as by ``huggingface_hub.split_torch_state_dict_into_shards``, which Transformers uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, is_floating
from elastic_ckpt.errors import ConfigError, UnsupportedError, listed
from elastic_ckpt.tools.export.safetensors import DTYPES, METADATA
from elastic_ckpt.tools.logical import Whole, weights_by_name

INDEX = "model.safetensors.index.json"
Dtype = Literal["fp32", "bf16", "fp16"]
_TORCH_NAMES: Mapping[str, str] = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor of the checkpoint, and what is written of it: the same, perhaps in another dtype."""

    whole: Whole
    entry: Whole


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of the export, its tensors, and the tied names of these: alias -> name with the data."""

    file: str
    tensors: tuple[Exported, ...]
    aliases: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.entry.nbytes for tensor in self.tensors)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the file, as ``safetensors.torch.save_model`` writes it."""
        return {**self.aliases, "format": "pt"}


def nbytes_of(size: str) -> int:
    """Bytes, from ``5GB``, ``500MB`` or ``2GiB``. Raises :class:`ConfigError` if it is no such size."""
    match = _SIZE.fullmatch(size.strip())
    power = 0 if match is None else _POWERS[match[2].upper()]
    nbytes = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if nbytes < 1:
        raise ConfigError("the maximum size of a shard is no size", expected="5GB, 500MB or 2GiB", found=repr(size))
    return nbytes


def checked_dtype(dtype: str | None) -> str | None:
    """The torch dtype that ``fp32``, ``bf16`` or ``fp16`` stands for. Raises :class:`ConfigError` for another."""
    if dtype is not None and dtype not in _TORCH_NAMES:
        raise ConfigError("an export cannot have this dtype", expected=listed(_TORCH_NAMES), found=repr(dtype))
    return None if dtype is None else _TORCH_NAMES[dtype]


def to_export(wholes: Iterable[Whole], dtype: str | None) -> list[Exported]:
    """Tensors with the dtype that they are written in: parameters in ``dtype``, buffers and integers as they are.

    Raises :class:`UnsupportedError` if the format has no such dtype or name, :class:`MismatchError` if names clash.
    """
    found = []
    for whole in weights_by_name(wholes).values():
        converts = dtype is not None and whole.key != BUFFER and is_floating(whole.dtype)
        entry = replace(whole, dtype=dtype if converts and dtype else whole.dtype)
        if entry.dtype not in DTYPES or entry.name == METADATA:
            raise UnsupportedError(
                "safetensors files cannot hold this tensor",
                parameter=whole.name,
                expected=f"a dtype of {listed(DTYPES)}, and a name other than {METADATA}",
                found=f"{entry.dtype} of shape {entry.shape}",
                remedy="leave it out with --exclude",
            )
        found.append(Exported(whole, entry))
    return found


def selected(
    metadata: CheckpointMetadata, wholes: Iterable[Whole], include: Sequence[str], exclude: Sequence[str]
) -> list[Whole]:
    """Tensors of which a name, or a tied one, matches a pattern of ``include``, if any, and none matches ``exclude``.

    Patterns are regular expressions, searched for anywhere in the name. Raises :class:`ConfigError` for one that is
    invalid or matches nothing, or if nothing is selected.
    """
    names: dict[Whole, list[str]] = {whole: [whole.name] for whole in wholes}
    by_name = {whole.name: whole for whole in names}
    for alias, name in metadata.aliases.items():
        if name in by_name:
            names[by_name[name]].append(alias)
    keep, drop = (
        [_matching(pattern, names, metadata.source.folder) for pattern in patterns] for patterns in (include, exclude)
    )
    kept = [whole for whole in names if not keep or any(whole in match for match in keep)]
    kept = [whole for whole in kept if not any(whole in match for match in drop)]
    if not kept:
        found = f"{len(names)} tensors, none of which is selected" if names else "none"
        raise ConfigError("there is nothing to export", file=metadata.source.folder, expected="tensors", found=found)
    return kept


def _matching(pattern: str, names: Mapping[Whole, Sequence[str]], folder: str) -> set[Whole]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError("a pattern is no regular expression", expected=pattern, found=str(error)) from error
    found = {whole for whole, known in names.items() if any(map(expression.search, known))}
    if not found:
        raise ConfigError(
            "a pattern matches no tensor of the checkpoint",
            file=folder,
            expected=pattern,
            found=listed(whole.name for whole in names),
            remedy="elastic-ckpt inspect --params lists the names",
        )
    return found


def shards_of(tensors: Sequence[Exported], aliases: Mapping[str, str], limit_nbytes: int) -> tuple[Shard, ...]:
    """Tensors in files of at most ``limit_nbytes``; a larger tensor has a file of its own."""
    groups: list[list[Exported]] = []
    current: list[Exported] = []
    current_nbytes = 0
    for tensor in tensors:
        nbytes = tensor.entry.nbytes
        if nbytes > limit_nbytes:
            groups.append([tensor])
            continue
        if current and current_nbytes + nbytes > limit_nbytes:
            groups.append(current)
            current, current_nbytes = [], 0
        current.append(tensor)
        current_nbytes += nbytes
    if current:
        groups.append(current)
    shards = []
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        names = {tensor.entry.name for tensor in group}
        tied = {alias: name for alias, name in aliases.items() if name in names}
        shards.append(Shard(file, tuple(group), tied))
    return tuple(shards)


def index_of(shards: Sequence[Shard]) -> str:
    """The text of :data:`INDEX`: which file has which tensor."""
    files = {tensor.entry.name: shard.file for shard in shards for tensor in shard.tensors}
    whole = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": files}
    return json.dumps(whole, indent=2, sort_keys=True) + "\n"

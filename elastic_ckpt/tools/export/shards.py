"""The files of an export: which tensors are in which, and what they are called.

Files are cut and named as by ``huggingface_hub.split_torch_state_dict_into_shards``, which Transformers uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from elastic_ckpt.errors import ConfigError, MismatchError, UnsupportedError, listed
from elastic_ckpt.formats.safetensors import DTYPES, METADATA
from elastic_ckpt.tools.logical import Whole

Format = Literal["safetensors", "torch"]
SAFETENSORS = ".safetensors"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor of the checkpoint, and what is written of it: the same, perhaps in another dtype or by another name."""

    whole: Whole
    entry: Whole


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of the export: its tensors, their tied names (alias -> name with the data), and further metadata."""

    file: str
    tensors: tuple[Exported, ...]
    aliases: Mapping[str, str]
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.entry.nbytes for tensor in self.tensors)

    @property
    def is_safetensors(self) -> bool:
        """Whether it is a safetensors file, or else one of ``torch.save``."""
        return self.file.endswith(SAFETENSORS)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of a safetensors file; tied names as ``safetensors.torch.save_model`` writes them."""
        return {**self.aliases, **self.more, "format": "pt"}


@dataclass(frozen=True, slots=True)
class Naming:
    """How files that belong together are called: ``model-00001-of-00002.safetensors`` has this stem and suffix."""

    stem: str
    suffix: str

    def file(self, number: int, count: int) -> str:
        """Name of a file of ``count``, the first of which has number 1."""
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}" if count > 1 else f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        """Name of the file that says which of several files has which tensor."""
        return f"{self.stem}{self.suffix}.index.json"


#: Files of optimizer states, whatever the format of the weights.
OPTIMIZER = Naming("optimizer", SAFETENSORS)
_MODEL = MappingProxyType({"safetensors": Naming("model", SAFETENSORS), "torch": Naming("pytorch_model", ".bin")})


def checked_format(format: str, adapter: str | None) -> Naming:
    """How files of weights are called, those of a PEFT adapter ``adapter_model``. Raises :class:`ConfigError`."""
    if format not in _MODEL:
        raise ConfigError("an export cannot have this format", expected=listed(_MODEL), found=repr(format))
    return _MODEL[format] if adapter is None else Naming("adapter_model", _MODEL[format].suffix)


def nbytes_of(size: str) -> int:
    """Bytes, from ``5GB``, ``500MB`` or ``2GiB``. Raises :class:`ConfigError` if it is no such size."""
    match = _SIZE.fullmatch(size.strip())
    power = 0 if match is None else _POWERS[match[2].upper()]
    nbytes = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if nbytes < 1:
        raise ConfigError("the maximum size of a shard is no size", expected="5GB, 500MB or 2GiB", found=repr(size))
    return nbytes


def shards_of(
    tensors: Sequence[Exported], aliases: Mapping[str, str], naming: Naming, limit_nbytes: float, **first: str
) -> tuple[Shard, ...]:
    """Tensors in files of at most ``limit_nbytes``; a larger tensor has a file of its own.

    ``first`` is metadata of the first file. Raises :class:`UnsupportedError` if the format has no such dtype or name,
    and :class:`MismatchError` if two tensors have the same name.
    """
    if naming.suffix == SAFETENSORS:
        _refuse_inexpressible(tensors)
    by_name = {tensor.entry.name: tensor for tensor in tensors}
    for tensor in tensors:
        if (other := by_name[tensor.entry.name]) is not tensor:
            found = " and ".join(f"{each.whole.key} of {each.whole.name}" for each in (tensor, other))
            raise MismatchError("two tensors of the checkpoint share a name", parameter=tensor.entry.name, found=found)
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
    if current or not groups:
        groups.append(current)
    shards = []
    for number, group in enumerate(groups, 1):
        names = {tensor.entry.name for tensor in group}
        tied = {alias: name for alias, name in aliases.items() if name in names}
        shards.append(Shard(naming.file(number, len(groups)), tuple(group), tied, {} if number > 1 else first))
    return tuple(shards)


def _refuse_inexpressible(tensors: Iterable[Exported]) -> None:
    for tensor in tensors:
        entry = tensor.entry
        if entry.dtype not in DTYPES or entry.name == METADATA:
            raise UnsupportedError(
                "safetensors files cannot hold this tensor",
                parameter=tensor.whole.name,
                expected=f"a dtype of {listed(DTYPES)}, and a name other than {METADATA}",
                found=f"{entry.dtype} of shape {entry.shape}",
                remedy="leave it out with --exclude, or write --format torch",
            )


def index_of(shards: Sequence[Shard]) -> str:
    """The text of an index: which file has which tensor. Tied names are in files of ``torch.save`` alone."""
    files = {tensor.entry.name: shard.file for shard in shards for tensor in shard.tensors}
    files |= {alias: shard.file for shard in shards if not shard.is_safetensors for alias in shard.aliases}
    whole = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": files}
    return json.dumps(whole, indent=2, sort_keys=True) + "\n"

"""File names of DeepSpeed checkpoints, parsed here alone.

Source: ``DeepSpeedEngine._get_ckpt_name`` and ``_get_rank_zero_ckpt_name`` (engine.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_OPTIMIZER = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
_MODEL_ZERO3 = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_EXPERT = re.compile(r"^(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt$|^expp_rank_\d+_.*optim_states\.pt$")
_PIPELINE_LAYER = re.compile(r"^layer_(\d+)-model_(?:(\d+)-model_)?states\.pt$")

#: Folder of a universal checkpoint with one folder per parameter.
UNIVERSAL_FOLDER = "zero"
#: Folder of a tag to which DeepSpeed copies optimizer states on NVMe.
SWAPPED_FOLDER = "offloaded_tensors"
#: File in :data:`UNIVERSAL_FOLDER` with what belongs to no parameter.
UNIVERSAL_OPTIMIZER = "optimizer_state.pt"


@dataclass(frozen=True)
class FolderFiles:
    """The file names of one tag, by kind.

    Attributes:
        optimizer, model_zero3: (dp rank, mp rank) -> ``*optim_states.pt``, ``zero_pp_rank_*_model_states.pt``.
        model: mp rank -> ``mp_rank_*_model_states.pt``.
        layers: (layer, tensor-parallel rank) -> its file.
        experts, clashes: files of mixture-of-experts layers; second files of one rank (a bf16 and an fp32 save mixed).
        is_universal: whether it is a universal checkpoint.
    """

    optimizer: dict[tuple[int, int], str]
    model: dict[int, str]
    model_zero3: dict[tuple[int, int], str]
    experts: tuple[str, ...]
    layers: dict[tuple[int, int], str]
    clashes: tuple[str, ...]
    is_universal: bool

    @property
    def mp_ranks(self) -> set[int]:
        """Model-parallel (tensor x pipeline) ranks that have files."""
        return {mp for _, mp in self.optimizer} | set(self.model) | {mp for _, mp in self.model_zero3}


def sort_names(names: Iterable[str], is_universal: bool) -> FolderFiles:
    """Sort file names by kind; ignores others (scripts, RNG files)."""
    optimizer: dict[tuple[int, int], str] = {}
    model: dict[int, str] = {}
    model_zero3: dict[tuple[int, int], str] = {}
    layers: dict[tuple[int, int], str] = {}
    experts, clashes = [], []
    for name in sorted(names):
        if match := _OPTIMIZER.match(name):
            if optimizer.setdefault((int(match[1]), int(match[2])), name) != name:
                clashes.append(name)
        elif match := _MODEL_ZERO3.match(name):
            model_zero3[int(match[1]), int(match[2])] = name
        elif match := _MODEL.match(name):
            model[int(match[1])] = name
        elif _EXPERT.match(name):
            experts.append(name)
        elif match := _PIPELINE_LAYER.match(name):
            clashes += [name] if layers.setdefault((int(match[1]), int(match[2] or 0)), name) != name else []
    return FolderFiles(optimizer, model, model_zero3, tuple(experts), layers, tuple(clashes), is_universal)


def is_another_file(root: str, stem: str) -> bool:
    """Whether names (without suffix) are of two files of one kind: two ranks', layers' or optimizer states'."""
    (pattern, numbers), (other_pattern, other_numbers) = _numbered(root), _numbered(stem)
    return pattern == other_pattern and numbers != other_numbers


def _numbered(stem: str) -> tuple[str, tuple[int, ...]]:
    stem = stem.removeprefix("bf16_").removeprefix("fp16_")
    return re.sub(r"\d+", "#", stem), tuple(map(int, re.findall(r"\d+", stem)))

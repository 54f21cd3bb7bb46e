"""File names of DeepSpeed checkpoints, parsed here alone.

Source: ``DeepSpeedEngine._get_ckpt_name`` and ``_get_rank_zero_ckpt_name`` (engine.py). Below ZeRO-3, DeepSpeed's
``fast`` checkpoint writer appends ``-<writer>.<writers>`` (``CheckpointWriterFactory.create_writer``), and its own
loader then looks for the name without it. Each writer's file is a whole archive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

#: Field of :class:`FolderFiles` -> names of its files, with their ranks, layers and experts.
_PATTERNS = {
    "optimizer": re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$"),
    "model_zero3": re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$"),
    "model": re.compile(r"^mp_rank_(\d+)_model_states\.pt$"),
    "experts": re.compile(r"^(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt$"),
    "expert_optimizers": re.compile(r"^expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$"),
    "layers": re.compile(r"^layer_(\d+)-model_(?:(\d+)-model_)?states\.pt$"),
}
_WRITER = re.compile(r"(?<=\.pt)-(\d+)\.(\d+)$")

#: Of a file's name, on any file system.
_MOST_CHARACTERS = 255

UNIVERSAL_FOLDER = "zero"  # of a universal checkpoint, with one folder per parameter
UNIVERSAL_OPTIMIZER = "optimizer_state.pt"  # in it, with what belongs to no parameter
SWAPPED_FOLDER = "offloaded_tensors"  # of a tag, to which DeepSpeed copies optimizer states on NVMe
DCP_METADATA = ".metadata"  # lists the entries of a ``torch.distributed.checkpoint`` folder
DCP_SUFFIX = ".distcp"  # ends the names of its other files


@dataclass(frozen=True)
class FolderFiles:
    """The file names of one tag, by kind."""

    optimizer: dict[tuple[int, int], str]  # (dp rank, mp rank) -> ``*optim_states.pt``
    model: dict[int, str]  # mp rank -> ``mp_rank_*_model_states.pt``
    model_zero3: dict[tuple[int, int], str]  # (dp rank, mp rank) -> ``zero_pp_rank_*_model_states.pt``
    layers: dict[tuple[int, int], str]  # (layer, tensor-parallel rank) -> its file
    clashes: tuple[str, ...]  # second files of one rank (a bf16 and an fp32 save mixed)
    is_universal: bool
    #: (``MoE`` layer, expert, mp rank) -> its file; layer -1 in files of DeepSpeed before 0.5.
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optimizers: dict[tuple[int, int], str] = field(default_factory=dict)  # (expert-parallel rank, mp rank)
    copies: dict[str, str] = field(default_factory=dict)  # of other data-parallel writers -> what they are copies of
    by_fast_writer: bool = False  # has names that only the ``fast`` writer gives, which DeepSpeed does not find

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        kinds = (self.optimizer, self.model, self.model_zero3, self.layers, self.experts, self.expert_optimizers)
        return frozenset(chain(self.copies, *(kind.values() for kind in kinds)))

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The files of ``MoE`` layers."""
        return (*self.experts.values(), *self.expert_optimizers.values())

    @property
    def of_weights_alone(self) -> bool:
        """Whether no file is one of optimizer states, and weights are not in those that are missing (ZeRO-3)."""
        return not (self.optimizer or self.expert_optimizers or self.model_zero3 or self.is_universal)

    @property
    def mp_ranks(self) -> set[int]:
        """Model-parallel (tensor x pipeline) ranks that have files."""
        return {mp for _, mp in self.optimizer} | set(self.model) | {mp for _, mp in self.model_zero3}


def plain_name(name: str) -> str:
    """A file's name without what the ``fast`` writer appends."""
    return _WRITER.sub("", name)


def number_of_writers(name: str) -> int:
    """How many data-parallel writers wrote copies of a file, by its name; 0 for a name of any other writer."""
    match = _WRITER.search(name)
    return int(match[2]) if match else 0


def sort_names(names: Iterable[str], is_universal: bool) -> FolderFiles:
    """Sort file names by kind; ignores others (scripts, RNG files)."""
    by_plain: dict[str, list[str]] = {}
    for name in sorted(names):
        by_plain.setdefault(plain_name(name), []).append(name)
    found: dict[str, dict[Any, str]] = {kind: {} for kind in _PATTERNS}
    clashes: list[str] = []
    copies: dict[str, str] = {}
    for plain, files in by_plain.items():
        # a name without a suffix comes first, then the files of the most writers: where only some ranks are writers,
        # all others write one and the same "-0.1"
        first, *others = sorted(
            files, key=lambda name: (number_of_writers(name) > 0, -number_of_writers(name), len(name), name)
        )
        for kind, match in ((kind, pattern.match(plain)) for kind, pattern in _PATTERNS.items()):
            if match is not None:
                missing = -1 if kind == "experts" else 0
                at = tuple(missing if each is None else int(each) for each in match.groups())
                if found[kind].setdefault(at if len(at) > 1 else at[0], first) == first:
                    copies |= dict.fromkeys(others, first)
                else:
                    clashes.append(first)
    once = {*found["optimizer"].values(), *found["model_zero3"].values()}
    models = found["model"].values()
    for copy, name in copies.items():  # one save may have written both; of model-states files, their contents decide
        of_one_save = number_of_writers(copy) == number_of_writers(name) or name in models
        if name in once or not number_of_writers(name) or not of_one_save:
            clashes.append(copy)
    return FolderFiles(
        clashes=tuple(clashes),
        is_universal=is_universal,
        copies={copy: name for copy, name in copies.items() if copy not in clashes},
        by_fast_writer=any(number_of_writers(name) for files in found.values() for name in files.values()),
        **found,
    )


def is_another_file(root: str, stem: str) -> bool:
    """Whether names (without suffix) are of two files of one kind: two ranks', layers' or optimizer states'."""
    names = [re.sub("^(?:bf16_)?(?:fp16_)?", "", name) for name in (root, stem)]
    pattern, other_pattern = (re.sub(r"\d+", "#", name) for name in names)
    if pattern != other_pattern or max(map(len, names)) > _MOST_CHARACTERS:  # an archive may have any name
        return False
    numbers, others = (list(map(int, re.findall(r"\d+", name))) for name in names)
    return numbers != others

"""Loads of tensor and pipeline parallel engines that are refused, with remedies that a program can follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.distributed import damage
from tests.distributed.foreign_folders import as_megatron
from tests.distributed.parallel_models import Parallel
from tests.distributed.remedy_parallel_jobs import ParallelCell, add_to_master

TWO_STAGES = Parallel("pipeline", "uniform", pp=2, reverses=True)
SHARDED, WHOLE = Parallel("3d", "uniform", tp=2, stage=1), Parallel("3d", "uniform", stage=1)
GROWN = Parallel("3d", "uniform", tp=2, stage=1, rows=66)
#: A pipeline without ZeRO numbers its states.
FACTORED = Parallel("megatron", "llama", tp=2, optimizer="adafactor")
EIGHT_BIT = Parallel("3d", "uniform", tp=2, stage=1, optimizer="adamw8bit")
#: As Megatron-DeepSpeed since it fuses attention of contiguous thirds, whatever its arguments say.
THIRDS = Parallel("thirds", "real", tp=2, stage=1)
CONTIGUOUS = "megatron-deepspeed-contiguous"
#: What two ranks save, and as many load.
SAVED = [TWO_STAGES, SHARDED, FACTORED, EIGHT_BIT]
#: The same, of other code bases.
SAVED_FOREIGN = [THIRDS]
EMBEDDING = {"pattern": r"tied_modules\.embed\.weight", "kind": "vocabulary"}
#: A norm and a matrix of which each rank has all: of the matrix, nobody but its shape says so.
NORM, POSITIONS = "2.norm.weight", "1.weight"
MORE = 0.25
BY_COPY = {"tp_rules": [{"pattern": r".*norm\..*", "kind": "replicated"}]}
MEAN = {**BY_COPY, "replicated_params": "mean"}


@dataclass(frozen=True)
class ParallelCase:
    """A refusal of what two ranks saved.

    Attributes:
        saved: by which engine.
        cell: the load.
        kind: of the error.
        count: how many of its remedies a program can follow, where the cell's conditions hold.
        change: of the files, before.
    """

    saved: Parallel
    cell: ParallelCell
    kind: str = "MismatchError"
    count: int = 1
    change: Callable[[Path], Any] | None = None


def drifts(name: str) -> Callable[[Path], None]:
    """Change the second tensor-parallel rank's copy of a parameter in all files that have it."""
    layer, _, inside = name.partition(".")

    def change_weight(tree: dict[str, torch.Tensor]) -> None:
        tree[inside] += MORE

    def apply(copy: Path) -> None:
        damage.edit(f"layer_{int(layer):02}-model_01-model_states.pt", change_weight)(copy)
        optimizer = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
        damage.edit(optimizer, lambda tree: add_to_master(tree, name, MORE))(copy)

    return apply


def by_megatron(**arguments: Any) -> Callable[[Path], None]:
    """A folder as Megatron-DeepSpeed's code writes it, whose arguments do not tell how attention is fused, but for more."""

    def apply(copy: Path) -> None:
        native = copy.with_name("native")
        copy.rename(native)
        as_megatron(native, copy, THIRDS.tp, fpdt=False)
        for path in damage.tag(copy).glob("mp_rank_*.pt"):
            damage.edit(path.name, lambda tree: vars(tree["args"]).update(arguments))(copy)

    return apply


CELLS: dict[str, ParallelCase] = {
    "states that are numbered by stage, in an order of the user's own": ParallelCase(
        TWO_STAGES, ParallelCell(Parallel("pipeline", "uniform", stage=1)), "UnsupportedError"
    ),
    "rows that are added to shards": ParallelCase(
        SHARDED, ParallelCell(GROWN, config={"added_rows": [".*embed.*"]}), "UnsupportedError"
    ),
    "shards of a vocabulary with more rows": ParallelCase(
        SHARDED, ParallelCell(GROWN, holds=("if rows at the end of a vocabulary are all that differs",))
    ),
    "a vocabulary with fewer rows": ParallelCase(
        SHARDED,
        ParallelCell(
            Parallel("3d", "uniform", stage=1, rows=61),
            config={"tp_rules": [EMBEDDING]},
            holds=("if the live one holds all tokens",),
        ),
    ),
    "a rule that contradicts the shapes": ParallelCase(
        SHARDED,
        ParallelCell(
            WHOLE,
            config={"tp_rules": [{"pattern": r"2\.down\.weight", "kind": "column"}]},
            holds=("if it is sharded by row",),
        ),
    ),
    "fused parts": ParallelCase(
        SHARDED,
        ParallelCell(
            WHOLE, unmarked=r"3\.gate_up\.weight", holds=("if each rank holds its parts one behind the other",)
        ),
    ),
    "copies that drifted apart": ParallelCase(
        SHARDED, ParallelCell(WHOLE, config=BY_COPY, drift={NORM: MORE}), count=2, change=drifts(NORM)
    ),
    "factors of a whole parameter": ParallelCase(
        FACTORED, ParallelCell(Parallel("megatron", "llama", optimizer="adafactor"))
    ),
    "a mean of 8-bit states": ParallelCase(
        EIGHT_BIT,
        ParallelCell(Parallel("3d", "uniform", stage=1, optimizer="adamw8bit"), config=MEAN),
        count=2,
    ),
    "fused attention of an unknown release": ParallelCase(
        THIRDS,
        ParallelCell(replace(THIRDS, tp=1), holds=(f"if code of {CONTIGUOUS} saved it",)),
        change=by_megatron(),
    ),
    "fused attention of another release": ParallelCase(
        THIRDS,
        ParallelCell(
            replace(THIRDS, tp=1),
            arguments={"ds_sequence_parallel_fpdt": False},
            holds=("if the weights were rearranged since",),
        ),
        change=by_megatron(moe_expert_parallel_size=1),
    ),
    "what seems to be copies": ParallelCase(
        SHARDED,
        ParallelCell(WHOLE, drift={POSITIONS: MORE}, holds=("if they are copies that drifted apart",)),
        change=drifts(POSITIONS),
    ),
}

"""Loads of tensor and pipeline parallel engines that are refused, with remedies that a program can follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed import damage
from tests.distributed.parallel_models import Parallel
from tests.distributed.remedy_parallel_jobs import ParallelCell, add_to_master

TWO_STAGES = Parallel("pipeline", "uniform", pp=2)
SHARDED, WHOLE = Parallel("3d", "uniform", tp=2, stage=1), Parallel("3d", "uniform", stage=1)
GROWN = Parallel("3d", "uniform", tp=2, stage=1, rows=66)
#: What two ranks save, and as many load.
SAVED = [TWO_STAGES, SHARDED]
EMBEDDING = {"pattern": r"tied_modules\.embed\.weight", "kind": "vocabulary"}
NORM = "2.norm.weight"
DRIFT = {NORM: 0.25}
BY_COPY = {"tp_rules": [{"pattern": r".*norm\..*", "kind": "replicated"}]}


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


def drift(copy: Path) -> None:
    """The second tensor-parallel rank's copy of a norm is another one, in all files that have it."""

    def change_weight(tree: dict[str, torch.Tensor]) -> None:
        tree["norm.weight"] += DRIFT[NORM]

    damage.edit("layer_02-model_01-model_states.pt", change_weight)(copy)
    optimizer = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    damage.edit(optimizer, lambda tree: add_to_master(tree, NORM, DRIFT[NORM]))(copy)


CELLS: dict[str, ParallelCase] = {
    "states that are numbered by stage": ParallelCase(
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
    "a copy that drifted apart": ParallelCase(
        SHARDED, ParallelCell(WHOLE, config=BY_COPY, drift=DRIFT), count=2, change=drift
    ),
}

"""Experts in tensor-parallel models: sliced by tensor-parallel ranks or not, at any degree to any other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import damage
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.expert_tensor_jobs import Sharded
from tests.distributed.facts import Loaded, Refused, Resumes

pytestmark = pytest.mark.nightly


def saved(*run: Any, **more: Any) -> Save:
    sharded = Sharded(*run, **more)
    return Save(sharded, sharded.world, "expert_jobs.save_each")


SLICED, WHOLE = saved(4, 1, 2), saved(4, 1, 2, slices=False)
SAVED = [
    SLICED,
    WHOLE,
    saved(4, 2, 4, "fp32", slices=False, group_size=400),
    saved(4, 2, 2, data_first=True),
    saved(4, 0, 2, "fp32"),
    saved(2, 1, 2, "fp32", degree=1),
]
TARGETS = [
    Sharded(4, 2, 2),
    Sharded(4, 1, 4, slices=False),
    Sharded(2, 1, 1),
    Sharded(1, 1, 1, "fp32", degree=1),
    Sharded(4, 2, 2, degree=1),
    Sharded(2, 0, 1, "fp32"),
    Sharded(2, 2, 2, "fp32", slices=False),
    Sharded(2, 1, 1, slices=False),  # each tensor-parallel rank has every expert whole
]


def resumed(save: Save, run: Sharded) -> Cell:
    """A checkpoint that goes on in an engine of this run."""
    kind = "universal" if save.converted else "native"
    name = f"{save.setup.name}{' universal' * save.converted} to {run.name}"
    return Cell(name, save, "expert_jobs.resume", run.world, {"run": run}, expected=Resumes(kind, 0.05))


@cells([resumed(save, run) for run in TARGETS for save in SAVED])
def test_sliced_and_whole_experts_load_at_any_degrees(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    for load in facts:
        assert "100 %" in str(load.report.verified), load.text


#: AutoEP with AutoTP: whole experts, whose expert-parallel groups take in several tensor-parallel ranks.
MIXTRAL = Sharded(4, 1, 2, "bf16", (4, 4), slices=False, autoep=True, preset="mixtral")
FOLDED = [
    Save(run, run.world, "expert_jobs.save_each")
    for run in (
        MIXTRAL,
        replace(MIXTRAL, stage=3, ep=4),
        replace(MIXTRAL, degree=1),
        replace(MIXTRAL, stage=2, precision="fp32"),
    )
]
UNIVERSAL = [replace(save, converted=True, converter="convert.convert_by_command") for save in FOLDED]
FOLDED_TARGETS = [
    replace(MIXTRAL, ep=4),
    replace(MIXTRAL, stage=3),
    replace(MIXTRAL, stage=2, ep=1, degree=1, world=1),
    replace(MIXTRAL, stage=3, degree=1, ep=4),
    replace(MIXTRAL, stage=0, degree=1, world=2),
]


@cells([resumed(save, run) for run in FOLDED_TARGETS for save in FOLDED + UNIVERSAL])
def test_autoep_folded_with_autotp_loads_at_any_degrees(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@cells(
    [
        Cell(save.setup.name, save, "expert_jobs.deepspeed_loads", save.setup.world, {"run": save.setup})
        for save in UNIVERSAL[:2]
    ]
)
def test_deepspeed_loads_what_our_command_writes_at_the_degrees_of_the_save(cell: Cell, facts: list[Any]) -> None:
    """At others, it refuses what was folded."""
    assert facts == [{}] * cell.ranks


EXPERT = "layer_1_expert_5_mp_rank_01_model_states.pt"


def without_a_tensor_parallel_rank(copy: Path) -> None:
    for path in damage.tag(copy).glob("*mp_rank_01_model_states.pt"):
        path.unlink()


#: What was saved, what happens to it, and what the error says.
REFUSED: dict[str, tuple[Save, Callable[[Path], None] | None, str]] = {
    "slice": (SLICED, damage.remove(EXPERT), rf"the file of an expert is missing.*{EXPERT}"),
    "whole": (WHOLE, damage.remove(EXPERT), r"the file of an expert is missing.*layer_1_expert_5_mp_rank_\*"),
    "tensor-parallel rank": (
        WHOLE,
        without_a_tensor_parallel_rank,
        r"a file of the checkpoint is missing.*mp_rank_01_model_states",
    ),
    "without ZeRO": (
        saved(4, 0, 2, slices=False),
        None,
        r"without ZeRO, experts that tensor-parallel ranks do not slice",
    ),
    # no file tells which of the ranks are neighbors: the weights do
    "another order of ranks": (
        Save(replace(WHOLE.setup, ep=4, outer=True), 4, "expert_tensor_jobs.save_alone"),
        None,
        r"are not those of the weights saved beside it",
    ),
}
LIVE = [Sharded(2, 1, 2, "fp32", degree=1), Sharded(2, 1, 1, slices=False)]


@cells(
    [
        Cell(
            f"{name}, {run.name}",
            save,
            "expert_jobs.refuse",
            2,
            {"run": run},
            change,
            expected=words,
            fits=(WHOLE, {"run": run}),
        )
        for name, (save, change, words) in REFUSED.items()
        for run in LIVE
    ]
)
def test_what_is_missing_in_another_order_or_saved_without_zero_is_named(cell: Cell, facts: list[Refused]) -> None:
    (refused,) = facts
    (text,) = refused.texts
    assert refused.kinds and refused.changed == set(), text
    assert re.search(cell.expected, text.replace("\n", " ")), text

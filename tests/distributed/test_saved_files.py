"""Files of another run at the same step where no weights beside masters tell it, but the resume sheet does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elastic_ckpt.core.resume_sheet import SHEET
from tests.distributed import damage
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.expert_jobs import Experts
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel
from tests.distributed.saved_files_jobs import Outcome

EXPERTS, STAGES = Experts(2, 0, 2, "fp32"), Parallel("pipeline", "uniform", pp=2)
PARTITIONS = Setup(3, groups="one")
Run = Experts | Parallel | Setup
#: What loads them, and on how many ranks.
LIVE: dict[Run, tuple[Run, int]] = {
    EXPERTS: (Experts(1, 0, 1, "fp32"), 1),
    STAGES: (STAGES, 2),
    PARTITIONS: (PARTITIONS, 3),
}
MODEL, OTHER_MODEL = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"
EXPERT, OPTIMIZER = "layer_1_expert_3_mp_rank_00_model_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt"
PARTITION, BUFFERS = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"
LAYERS = ("layer_01-model_states.pt", "layer_02-model_states.pt")


def saved(setup: Run, first: int = 0) -> Save:
    return Save(setup, 2, "saved_files_jobs.save_run", {"first": first})


def without_sheet(*names: str) -> Callable[[Path, Path], None]:
    return damage.of_other(*names, then=[damage.remove(SHEET)])


def cell(name: str, setup: Run, change: Callable[[Path, Path], None] | None, expected: str) -> Cell:
    others = () if change is None else (saved(setup, first=10),)
    live, ranks = LIVE[setup]
    return Cell(name, saved(setup), "saved_files_jobs.load", ranks, {"setup": live}, change, others, expected)


MIXED = [
    cell("one expert", EXPERTS, damage.of_other(EXPERT), EXPERT),
    cell("the optimizer of a rank", EXPERTS, damage.of_other(OPTIMIZER), OPTIMIZER),
    cell("the same without a sheet", EXPERTS, without_sheet(OPTIMIZER), OPTIMIZER),
    cell("what is no expert", EXPERTS, damage.of_other(MODEL), MODEL),
    cell("one layer", STAGES, damage.of_other(LAYERS[1]), LAYERS[1]),
    cell("two layers", STAGES, damage.of_other(*LAYERS), LAYERS[0]),
    cell("the optimizer of a stage", STAGES, damage.of_other(OTHER_MODEL), OTHER_MODEL),
    cell("a ZeRO-3 partition", PARTITIONS, damage.of_other(PARTITION), PARTITION),
    cell("a rank of ZeRO-3", PARTITIONS, damage.of_other(PARTITION, BUFFERS), PARTITION),
]


@cells(MIXED)
def test_files_of_another_run_are_named_and_load_where_they_are_meant(cell: Cell, facts: list[Outcome]) -> None:
    (found,) = facts
    (text,) = found.refused.texts
    assert found.refused.kinds[:1] == ("MixedSavesError",) and found.refused.changed == set(), text
    assert f"/{cell.expected}" in text.partition("expected:")[0], text
    assert found.remedy == {"verify": "bytes"}
    assert found.compared > 3 and found.differences == [], "as it is in the files"


@cells([cell("experts", EXPERTS, None, ""), cell("stages", STAGES, None, ""), cell("partitions", PARTITIONS, None, "")])
def test_the_files_of_one_save_load(cell: Cell, facts: list[Outcome]) -> None:
    (found,) = facts
    assert found.refused.kinds == () and found.compared > 3 and found.differences == [], found.refused.texts

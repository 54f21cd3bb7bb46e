"""A frozen base weight of which each rank holds another shard, while checkpoints below ZeRO-3 have one rank's."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import Cell, cells
from tests.distributed.model import Setup

STAGES = (0, 1, 2)
SHARDED = {"sharding": 2, "leaves_out": False}
WITHOUT_THE_BASE = {"sharding": 2, "leaves_out": True}
WHOLE = {"sharding": 1, "leaves_out": False}


def saved_and_loaded(name: str, stage: int, base: dict[str, Any], fits: dict[str, Any] | None = None) -> Cell:
    setup = {"setup": Setup(stage, groups="one")}
    instead = None if fits is None else (None, {**setup, **fits})
    return Cell(f"{name}, ZeRO-{stage}", None, "sharded_base_jobs.save_and_load", 2, {**setup, **base}, fits=instead)


@cells([saved_and_loaded("sharded", stage, SHARDED, fits=WHOLE) for stage in STAGES])
def test_a_base_that_ranks_share_out_is_refused_by_name_and_each_rank_keeps_its_own(
    cell: Cell, facts: list[Any]
) -> None:
    assert len(facts) == cell.ranks
    for each in facts:
        assert type(each.error).__name__ == "UnsupportedError", each
        assert each.error.parameter == "q_proj.weight" and "base_weight_sharding: 2" in each.error.found
        assert each.kept_base and not each.has_lora, "the engine is untouched"


@cells(
    [
        saved_and_loaded(name, stage, base)
        for stage in STAGES
        for name, base in (("left out", WITHOUT_THE_BASE), ("whole", WHOLE))
    ]
)
def test_a_whole_base_loads_and_so_does_a_checkpoint_without_it(cell: Cell, facts: list[Any]) -> None:
    assert len(facts) == cell.ranks
    for each in facts:
        assert each.error is None and each.has_base and each.has_lora, each

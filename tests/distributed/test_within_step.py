"""A save within a step of the optimizer, as a signal handler makes it: recorded, and refused by a load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.distributed.cells import Cell, cells
from tests.distributed.conftest import SUB_GROUPS
from tests.distributed.facts import Refuses
from tests.distributed.model import Setup
from tests.distributed.within_step_jobs import AFTER, AMID, BEFORE

# Of ZeRO-1 and 2, torch's optimizer cannot make its state dict there; of ZeRO-3 it can between two sub-groups.
JOB = "within_step_jobs.save_and_load"
SETUPS = {
    "ZeRO-3": Setup(3, zero=SUB_GROUPS),
    "ZeRO-3 in bf16": Setup(3, "bf16", zero=SUB_GROUPS),
    "ZeRO-3 in fp16": Setup(3, "fp16", zero=SUB_GROUPS),
    "ZeRO-3, SGD": Setup(3, zero=SUB_GROUPS, optimizer="sgd"),
}


def cell_of(name: str, at: str, **case: Any) -> Cell:
    case = {"setup": SETUPS[name], "at": at, **case}
    return Cell(f"{name}, {at}", None, JOB, 2, case, fits=(None, {**case, "at": AFTER}))


@cells([cell_of(name, AMID) for name in SETUPS])
def test_a_save_amid_a_step_is_refused_as_it_was_recorded(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        Refuses("MixedSavesError", ("within a step of the optimizer",)).check([each.refused])
        assert any("within a step of the optimizer" in line for line in each.lines)


WHOLE = [(name, at) for name in SETUPS for at in (BEFORE, AFTER) if not (name.endswith("SGD") and at == BEFORE)]


@cells([replace(cell_of(*pair), fits=None) for pair in WHOLE])
def test_a_save_before_or_after_all_of_a_step_loads(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.refused.kinds == () and each.is_next, each.refused.texts
        assert each.differences == []
        assert not any("within a step" in line for line in each.lines)


@cells([cell_of("ZeRO-3", AMID, follows={"verify": "bytes"})])
def test_its_remedy_loads_it_as_it_is(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.refused.kinds == ()
        assert each.differences, "some parameters have stepped"
        assert any("within a step" in line for line in each.lines)

"""Every stage and degree to every other, natively and from universal checkpoints, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.conftest import EXTRA, MATRIX, in_precision, saved_at
from tests.distributed.facts import Loaded, Resumes
from tests.distributed.model import Setup

pytestmark = pytest.mark.core

#: By which losses of the run that goes on may differ: other ranks sum gradients in another order.
ROUNDING = {"fp32": 1e-5, "bf16": 5e-3}


def resumed(save: Save, target: Setup, ranks: int, goes_on: bool = True) -> Cell:
    """A checkpoint that an engine loads as it is, with or without the training that follows."""
    kind = "universal" if save.converted else "native"
    case = {"setup": target, "format": kind, "continue": goes_on}
    name = f"{save.setup.name}-dp{save.ranks}{' universal' * save.converted} to {target.name}-dp{ranks}"
    return Cell(name, save, "resume", ranks, case, expected=Resumes(kind, ROUNDING[target.precision]))


def crossings(target: Setup, ranks: int) -> list[Save]:
    """All checkpoints of a precision that an engine of so many ranks may load."""
    sources = [setup for setup in MATRIX if setup.precision == target.precision]
    native = [Save(setup, degree) for setup in sources for degree in saved_at(target)]
    return native + [Save(setup, 2 + ranks % 2, converted=True) for setup in sources]


def matrix() -> list[Cell]:
    """Every fourth crossing, of each stage at some degree: the cuts are proven in ``test_planner.py``.

    Two ranks are what most other tests load on, and another precision changes nothing about the cuts.
    """
    found = []
    for ranks in (1, 3, 4):
        for number, target in enumerate(MATRIX):
            if target.precision == "fp32" or ranks % 2:
                saves = crossings(target, ranks)[(number + ranks) % 4 :: 4]
                found += [resumed(save, target, ranks, goes_on=place % 8 == 0) for place, save in enumerate(saves)]
    return found


@cells(matrix())
def test_any_stage_and_degree_resumes_bit_exactly(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    for load in facts:
        assert load.report.verified.nbytes and not load.report.verified.without_checksum_nbytes, load.text


ADAM, CPU_ADAM = Setup(1), Setup(1, optimizer="cpuadam")
CPU_ADAM_3 = next(setup for setup in EXTRA if setup.stage == 3 and setup.optimizer == "cpuadam")
ROUND_ROBIN, ALIGNED = [setup for setup in EXTRA if "round_robin" in setup.name]
AMSGRAD = [setup for setup in EXTRA if setup.optimizer == "adam_amsgrad"]
IDLE = [setup for setup in EXTRA if setup.groups == "idle"]
#: Into which engine, and from which checkpoints of two ranks.
OTHERS: list[tuple[Setup, list[Setup]]] = [
    (ROUND_ROBIN, [ROUND_ROBIN, Setup(1), Setup(3)]),
    (ALIGNED, [ALIGNED, in_precision(Setup(1), "bf16"), in_precision(Setup(3), "bf16")]),
    (Setup(2, precision="bf16"), [ALIGNED]),
    (Setup(3, zero=(("sub_group_size", 150),)), [ROUND_ROBIN, CPU_ADAM]),
    (Setup(2), [ROUND_ROBIN]),
    (CPU_ADAM, [CPU_ADAM, Setup(3), CPU_ADAM_3]),
    (replace(CPU_ADAM, stage=3), [CPU_ADAM, ADAM]),
    *[(target, AMSGRAD) for target in AMSGRAD],
    *[(target, IDLE) for target in IDLE],
]


@cells([resumed(Save(setup), target, ranks) for ranks in (1, 3) for target, found in OTHERS for setup in found])
def test_round_robin_alignment_amsgrad_and_cpu_adam_resume_bit_exactly(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)

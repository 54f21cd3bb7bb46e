"""Experts that are frozen, have buffers, 8-bit states, or other places than those of their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.expert_exotic_jobs import Exotic

pytestmark = pytest.mark.nightly

ONE_LAYER = r"mixtures\.0\.deepspeed_moe\.experts.*"
BIASES = r".*deepspeed_experts.*bias"


def saved(*run: Any, **more: Any) -> Save:
    exotic = Exotic(*run, **more)
    return Save(exotic, exotic.world, "expert_exotic_jobs.save_each")


SAVED = [
    saved(4, 1, 2),
    saved(4, 2, 4, frozen=ONE_LAYER),
    saved(2, 0, 2, frozen=BIASES),
    saved(2, 1, 1, frozen=BIASES),
    saved(4, 2, 2, second=4),
    saved(2, 1, 2, second=1),
]
TARGETS = [
    Exotic(4, 1, 4),
    Exotic(2, 2, 1, frozen=ONE_LAYER),
    Exotic(4, 0, 1, frozen=BIASES),
    Exotic(1, 1, 1, frozen=BIASES),
    Exotic(2, 0, 2),
    Exotic(4, 1, 4, second=2),
]
STACKED = {"experts": (4, 4), "autoep": True}
PLACED = saved(4, 3, 2, placement=((2, 0), (1, 3)), **STACKED)
OTHER_PLACES = [
    Exotic(2, 3, 1, **STACKED),
    Exotic(4, 1, 4, **STACKED),
    Exotic(4, 3, 2, placement=((3, 1), (0, 2)), **STACKED),
]


def resumed(save: Save, run: Exotic, expected: Any = None) -> Cell:
    name = f"{save.setup.name} to {run.name}"
    return Cell(name, save, "expert_exotic_jobs.resume", run.world, {"run": run}, expected=expected)


def sources(run: Exotic) -> list[Save]:
    """What a run may load."""
    # without ZeRO, states are numbered: the same parameters have to train
    found = [save for save in SAVED if save.setup.stage or save.setup.frozen == run.frozen]
    if run.second:  # whose first layer has a param group of its own, for which DeepSpeed has no getter without states
        found = [save for save in found if save.setup.frozen != ONE_LAYER]
    return found


@cells(
    [
        *(resumed(save, run) for run in TARGETS for save in sources(run)),
        *(resumed(PLACED, run) for run in OTHER_PLACES),
    ]
)
def test_experts_come_back_whichever_side_freezes_them_and_wherever_they_are_placed(
    cell: Cell, facts: list[Any]
) -> None:
    for load in facts:
        assert load.report is not None and load.compared, load.where
        assert load.different == set() and load.drift == {}, (load.where, load.different, load.drift)


EIGHT_BIT = saved(4, 1, 2, "fp32", eight_bit=True)
#: By whether blocks stay whole: experts are whole blocks of each partition; dense parameters are not, and change
#: partitions with the ranks.
EIGHT_BIT_TARGETS = [(Exotic(4, 1, 4, "fp32", eight_bit=True), True), (Exotic(2, 2, 2, "fp32", eight_bit=True), False)]
#: By how much a state may differ, of the largest one of its kind.
BOUNDS = {"state1": 0.9 / 128, "state2": 0.9 / 256}


@cells([resumed(EIGHT_BIT, run, expected=stay_whole) for run, stay_whole in EIGHT_BIT_TARGETS])
def test_eight_bit_states_of_experts_keep_their_bytes_while_their_blocks_stay_whole(
    cell: Cell, facts: list[Any]
) -> None:
    for load in facts:
        assert load.different == set() and load.compared > 50, load.where
        assert not [name for name, _ in load.drift if "deepspeed_experts" in name], load.drift
        assert (load.drift == {}) is cell.expected, load.drift
        for (name, key), drift in load.drift.items():
            assert drift <= BOUNDS[key] * load.largest[key], (name, key, drift)

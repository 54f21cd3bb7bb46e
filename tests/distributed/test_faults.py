"""Loads in which one rank fails, dies or stops, at each of the load's rounds: the others raise an error, and soon.

Ranks that are killed or stopped take the launch of a cell with them. So one process forks the ranks of each case here,
and sees how each of them ends; the saves are those of cells.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.cells import Save, Saves
from tests.distributed.conftest import Launch
from tests.distributed.fault_jobs import Cell, Outcome
from tests.distributed.model import Setup

METADATA = "read the checkpoint's metadata"
OVERWRITES = ("read the checkpoint's tensors and set hyperparameters", 0)
#: What the ranks of a load do together, in order, and how many of that name came before.
ROUNDS = [
    ("read the configuration", 0),
    ("look for a checkpoint", 0),
    ("load the checkpoint", 0),
    ("describe the live engine", 0),
    (METADATA, 0),
    (METADATA, 1),
    ("fit the checkpoint's files together", 0),
    ("plan the load", 0),
    ("load the schedulers", 0),
    OVERWRITES,
    ("broadcast what every rank needs", 0),
    ("derive the weights from their masters", 0),
    ("set the counters", 0),
    ("list what was read", 0),
    ("verify what was read", 0),
]
#: With ZeRO-3 one more, before the counters: from there on collectives are DeepSpeed's.
GATHERS = ("gather persistent parameters", 0)
SOURCES = {name: Save(setup, more={"model": "BigLM"}) for name, setup in (("z1", Setup(1, "bf16")), ("z3", Setup(3)))}
Found = list[tuple[Cell, list[Outcome | int | None], str]]
Run = Callable[..., Found]


@pytest.fixture
def run(launch: Launch, saves: Saves, tmp_path: Path) -> Run:
    """``run(fault, source, target, rounds)``: a cell for each round, of another rank each time."""

    def cells(fault: str, source: str, target: Setup, rounds: list[tuple[str, int]]) -> Found:
        folder = str(saves.folder(SOURCES[source]))
        asked = [Cell(folder, target, fault, at, number % 3) for number, at in enumerate(rounds)]
        return launch(
            1, "tests.distributed.fault_jobs:run", {"cells": asked, "folder": str(tmp_path / target.name)}, 400
        )

    return cells


def assert_named(outcome: Outcome, cell: Cell) -> None:
    """The error says whether the engine is still as it was."""
    assert "ElasticCkptError" in outcome.kinds, (str(cell), outcome)
    assert outcome.is_changed <= ("PartialLoadError" in outcome.kinds), (str(cell), outcome)
    if "PartialLoadError" in outcome.kinds:
        assert "must not be trained or saved" in outcome.text


def test_a_load_has_these_rounds(run: Run) -> None:
    for source, target in (("z1", Setup(2, "bf16")), ("z3", Setup(3)), ("z1", Setup(0))):
        for cell, outcomes, printed in run("", source, target, [("", 0)]):
            for outcome in outcomes:
                assert isinstance(outcome, Outcome), printed
                assert [each for each in outcome.rounds if each != GATHERS] == ROUNDS, cell
                assert (GATHERS in outcome.rounds) == (target.stage == 3), cell
                assert outcome.kinds == () and outcome.differences == {}


@pytest.mark.parametrize(
    ("source", "target", "fault"),
    [
        pytest.param("z1", Setup(2, "bf16"), "SIGKILL", id="z2-SIGKILL"),
        pytest.param("z1", Setup(2, "bf16"), "SIGSTOP", id="z2-SIGSTOP"),
        pytest.param("z3", Setup(3), "SIGKILL", id="z3-SIGKILL", marks=pytest.mark.nightly),
        pytest.param("z3", Setup(3), "SIGSTOP", id="z3-SIGSTOP", marks=pytest.mark.nightly),
    ],
)
def test_the_others_raise_an_error_when_a_rank_is_gone(fault: str, source: str, target: Setup, run: Run) -> None:
    """Of one that is killed by its connections, of one that is stopped by the timeout of the group."""
    # the rounds of a load differ between stages only in what they write
    rounds = ROUNDS if source == "z1" else [GATHERS, *ROUNDS[ROUNDS.index(OVERWRITES) :]]
    for cell, outcomes, printed in run(fault, source, target, rounds):
        gone = outcomes.pop(cell.rank)
        assert gone == (-9 if fault == "SIGKILL" else None), printed
        for outcome in outcomes:
            assert isinstance(outcome, Outcome), (str(cell), outcome, printed)
            assert_named(outcome, cell)
            assert "a collective failed" in outcome.text and "start the job again" in outcome.text
            is_partial = cell.at == GATHERS or ROUNDS.index(cell.at) >= ROUNDS.index(OVERWRITES)
            assert ("PartialLoadError" in outcome.kinds) == is_partial, (str(cell), outcome)


@pytest.mark.parametrize(("source", "target"), [("z1", Setup(2, "bf16")), ("z3", Setup(3))], ids=["z2", "z3"])
def test_a_failure_between_collectives_reaches_the_others_before_the_groups_timeout(
    source: str, target: Setup, run: Run
) -> None:
    """The rank that has failed goes on living: no connection is closed."""
    rounds = ROUNDS if source == "z1" else [GATHERS, *ROUNDS[ROUNDS.index(OVERWRITES) :]]
    for cell, outcomes, printed in run("MemoryError", source, target, rounds):
        for outcome in outcomes:
            assert isinstance(outcome, Outcome), (str(cell), outcome, printed)
            assert_named(outcome, cell)
            assert f"failed to {cell.at[0]}: MemoryError: this rank has no memory left" in outcome.text, str(cell)
        assert len({outcome.text for outcome in outcomes}) == 1, outcomes


@pytest.mark.parametrize("fault", ["RLIMIT_AS", "RLIMIT_NOFILE"])
def test_a_rank_without_memory_or_descriptors_fails_on_all_ranks_or_on_none(fault: str, run: Run) -> None:
    found = run(fault, "z3", Setup(3), ROUNDS)
    failed = 0
    for cell, outcomes, printed in found:
        if not isinstance(outcomes[cell.rank], Outcome):
            outcomes.pop(cell.rank)  # it may end of it
        kinds = set()
        for outcome in outcomes:
            assert isinstance(outcome, Outcome), (str(cell), outcome, printed)
            kinds.add(bool(outcome.kinds))
            if outcome.kinds:
                assert_named(outcome, cell)
            assert outcome.differences == {}, (str(cell), outcome)
        assert len(kinds) == 1, (str(cell), outcomes)
        failed += kinds == {True}
    assert failed >= len(ROUNDS) // 2


@pytest.mark.parametrize("fault", ["EIO", "end of file"])
def test_a_file_that_cannot_be_read_is_named_on_every_rank(fault: str, run: Run) -> None:
    for cell, outcomes, printed in run(fault, "z1", Setup(2, "bf16"), [ROUNDS[0], ("plan the load", 0)]):
        for outcome in outcomes:
            assert isinstance(outcome, Outcome), (str(cell), outcome, printed)
            assert "PartialLoadError" in outcome.kinds and "_states.pt" in outcome.text
            assert ("Input/output error" if fault == "EIO" else "end of file at byte") in outcome.text
        assert len({outcome.text for outcome in outcomes}) == 1, outcomes


def test_short_reads_and_a_full_disk_for_the_report_do_no_harm(run: Run) -> None:
    full = Setup(2, "bf16", config=(("elastic_checkpoint", {"report": "/dev/full"}),))
    for cell, outcomes, printed in run("short reads", "z1", full, [ROUNDS[0], ("plan the load", 0)]):
        for outcome in outcomes:
            assert isinstance(outcome, Outcome), (str(cell), outcome, printed)
            assert outcome.kinds == () and outcome.differences == {}, (str(cell), outcome)
        assert "could not write its load report to /dev/full" in printed

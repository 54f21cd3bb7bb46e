"""Tied pipeline modules with parameters that the stages do not synchronize: only the first stage trains its copy."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.verification import verify
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.facts import Refused, Refuses
from tests.distributed.tied_jobs import Tied

#: Of which copies of the first stage are the parameters.
DEAD_COPIES = [Tied(), Tied(has_three=True), Tied("adam", declares=True), Tied("sgd", declares=True)]
#: Nothing says that copies which were trained, or may have been, are dead.
LIVE_COPIES = [Tied("adam"), Tied("sgd"), Tied(trains_copies=True)]
UNSYNCHRONIZED = "tied_modules.embed.norm.bias, tied_modules.embed.norm.weight, tied_modules.embed.positions"
#: Ranks, and pipeline stages of the run that loads; 3 of 3 have saved it.
OTHER_STAGES = [(1, 1), (2, 2), (2, 1)]


def saved(setup: Tied) -> Save:
    return Save(setup, 3, "tied_jobs.save")


def into(setup: Tied, ranks: int, pp: int, job: str = "tied_jobs.load", **more: Any) -> Cell:
    name = f"{setup.name}, {ranks} ranks in {pp} stages"
    return Cell(name, saved(setup), job, ranks, {"setup": setup, "pp": pp}, **more)


@cells([into(setup, 3, 3) for setup in DEAD_COPIES + LIVE_COPIES])
def test_at_the_saved_stages_each_gets_its_own_copy(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.differing == [[], [], []]
        notes = [note for note in found.notes if "every pipeline stage keeps its own copy" in note]
        assert any(UNSYNCHRONIZED in note for note in notes), found.notes


@cells([into(setup, ranks, pp) for ranks, pp in OTHER_STAGES for setup in DEAD_COPIES])
def test_at_other_stages_the_first_copy_is_the_parameter(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.differing == [[]] * cell.case["pp"]
        assert any("only the first pipeline stage trains" in note for note in found.notes), found.notes


REFUSED = Refuses("MismatchError", ("copies of replicated parameters differ",))


@cells(
    [
        into(
            setup,
            ranks,
            pp,
            "tied_jobs.refuse",
            expected=REFUSED,
            fits=(saved(Tied()), {"setup": Tied(), "pp": pp}),
        )
        for ranks, pp in OTHER_STAGES
        for setup in LIVE_COPIES
    ]
)
def test_at_other_stages_copies_that_may_have_trained_are_refused(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@pytest.mark.parametrize("setup", DEAD_COPIES + LIVE_COPIES, ids=lambda setup: setup.name)
def test_verify_accuses_no_copy_of_a_module_whose_tied_weights_are_equal(setup: Tied, saves: Saves) -> None:
    verified = verify(str(saves.folder(saved(setup))), None, ElasticConfig(), full=True)
    assert not verified.findings, verified
    noted = {note.message for note in verified.notes if note.kind == "drift"}
    assert bool(noted) == (setup.trains_copies or setup.optimizer != "adamw"), noted

"""The client state that a job gets back: at the saved topology each rank its own, elsewhere the first rank's."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Refused, Refuses
from tests.distributed.model import Setup

#: By ZeRO stage, engines that refuse an entry that cannot be read, and that skip it.
SAVED = {stage: Save(Setup(stage), 2, "client_jobs.save") for stage in (1, 3)}
SKIPPING = {stage: Setup(stage, config=(("elastic_checkpoint", {"on_unreadable_entry": "skip"}),)) for stage in SAVED}


def loaded(job: str, setups: dict[int, Setup], **more: Any) -> list[Cell]:
    """At the saved number of ranks, and on one."""
    return [
        Cell(f"ZeRO-{stage} on {ranks}", save, f"client_jobs.{job}", ranks, {"setup": setups[stage]}, **more)
        for ranks in (2, 1)
        for stage, save in SAVED.items()
    ]


REFUSES = Refuses("UnsafePickleError", ("the entry 'odd' of the client state", "NotAllowed"))


@cells(
    loaded(
        "refuse",
        {stage: save.setup for stage, save in SAVED.items()},
        expected=REFUSES,
        fits=(SAVED[1], {"setup": SKIPPING[1]}),
    )
)
def test_one_entry_that_cannot_be_read_is_refused_by_name(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@cells(loaded("skip", SKIPPING))
def test_all_others_are_what_deepspeeds_own_loader_returns(cell: Cell, facts: list[str | None]) -> None:
    assert facts == [None] * cell.ranks

"""Checkpoints of which no name is in the live model: refused, and restored once the error's own lines are followed."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.model import Setup


def saved(model: str, setup: Setup, **more: Any) -> Save:
    return Save(setup, 2, "nothing_matched_jobs.save", {"model": model, **more})


STAGE0, STAGE1, STAGE3 = (saved("model", setup) for setup in (Setup(0), Setup(1), Setup(3, "bf16")))
UNIVERSAL = Save(STAGE1.setup, 2, STAGE1.job, STAGE1.more, converted=True)
ADAPTER, WITH_BASE = saved("default", Setup(3), bare=True), saved("default", Setup(3))
FULL = saved("plain", Setup(1))
WRAPPED = {"model": "language_model", "names": ("model.", "language_model.")}
ADAPTED = {"model": "other", "names": (".default.", ".other.")}
INTO_BASE = {"model": "default", "names": ("", "base."), "frozen": True}
ALONE, WITHOUT_STATES = {"load_module_only": True}, {"load_optimizer_states": False}


def renamed(save: Save, target: Setup, live: dict[str, Any], **case: Any) -> Cell:
    """A load into a model that has another name for everything."""
    note = f"{live['model']} {case}"
    return crossing(save, target, 3, "nothing_matched_jobs.load", note=note, format=save.format, **live, **case)


@cells(
    [
        renamed(STAGE0, Setup(3), WRAPPED),
        renamed(STAGE1, Setup(0), WRAPPED),
        renamed(STAGE1, Setup(2), WRAPPED, arguments=ALONE),
        renamed(STAGE3, Setup(3, "bf16"), WRAPPED, arguments=WITHOUT_STATES),
        renamed(STAGE3, Setup(2, "bf16"), WRAPPED),
        renamed(UNIVERSAL, Setup(3), WRAPPED),
        renamed(ADAPTER, Setup(2), ADAPTED, bare=True),
        renamed(ADAPTER, Setup(3), ADAPTED, bare=True),
        renamed(WITH_BASE, Setup(2), ADAPTED, arguments=ALONE),
        renamed(FULL, Setup(2), INTO_BASE),
        renamed(FULL, Setup(3), INTO_BASE, arguments=ALONE),
    ]
)
def test_the_lines_of_the_error_restore_what_it_refuses(cell: Cell, facts: list[tuple[Refused, Loaded]]) -> None:
    for refused, loaded in facts:
        Refuses("MismatchError").check([refused])
        (text,) = refused.texts
        if cell.case["model"] == "other":  # a frozen base lies below the adapter, which is what is missing
            assert "base." not in text, text
        assert loaded.differences == {}, loaded.where
        is_frozen = cell.case.get("frozen", False)
        assert loaded.report.share.of_trained == (0.0 if is_frozen else 1.0), loaded.where
        assert ("WARNING: only 0 %" in str(loaded.report).splitlines()[0]) == is_frozen, loaded.text


def pipeline(name: str, pattern: str, **more: Any) -> Cell:
    return Cell(name, None, "nothing_matched_jobs.pipeline", 2, {"pattern": pattern}, **more)


SECOND, BOTH = "^([23])", "^([0123])"


@cells([pipeline("the second stage", SECOND, fits=(None, {"pattern": BOTH}))])
def test_a_pipeline_stage_of_which_nothing_matches_is_no_error_where_another_has_something(
    cell: Cell, facts: list[Refused]
) -> None:
    assert facts[0].texts == {"loaded without an error"} and facts[0].changed


@cells([pipeline("both stages", BOTH, fits=(None, {"pattern": SECOND}))])
def test_a_pipeline_of_which_nothing_matches_is_refused(cell: Cell, facts: list[Refused]) -> None:
    Refuses("MismatchError").check(facts)
    assert facts[0].kinds[0] == "MismatchError"

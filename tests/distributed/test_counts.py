"""Optimizers that count other steps than the engine, without any damage: no load, no command accuses the files."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_ckpt import find_latest
from elastic_ckpt.cli import app
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.conftest import SUB_GROUPS
from tests.distributed.model import Setup

#: The first of two param groups, and both.
FIRST, ALL = ("embedding", "hidden.weight", "back"), ("",)
PREVIOUS = (("elastic_checkpoint", {"on_damage": "previous"}),)
NEVER, ALWAYS, LATER = (False, False, False), (True, True, True), (False, True, True)
#: What trains in each of three phases, and whether the optimizer is stepped beside the engine, by name.
PHASES: dict[str, tuple[Setup, tuple[tuple[str, ...], ...], tuple[bool, ...]]] = {
    "unfrozen, fp32": (Setup(3, config=PREVIOUS), (FIRST, ALL, ALL), NEVER),
    "unfrozen, bf16": (Setup(3, "bf16", zero=SUB_GROUPS, config=PREVIOUS), (FIRST, ALL, ALL), NEVER),
    "beside the engine, ZeRO-3": (Setup(3, config=PREVIOUS), (ALL, ALL, ALL), ALWAYS),
    "beside the engine, ZeRO-2": (Setup(2, "bf16", config=PREVIOUS), (ALL, ALL, ALL), ALWAYS),
    # the counters stand still at what the first phase has counted
    "later beside the engine, ZeRO-3": (Setup(3, config=PREVIOUS), (ALL, ALL, ALL), LATER),
    "later beside the engine, fp16": (Setup(3, "fp16", config=PREVIOUS), (FIRST, ALL, ALL), LATER),
    "later beside the engine, ZeRO-2": (Setup(2, "bf16", config=PREVIOUS), (ALL, ALL, ALL), LATER),
}
#: Of each phase.
RANKS = (2, 3, 2)


def saved(setup: Setup, trains: tuple[tuple[str, ...], ...], beside: tuple[bool, ...]) -> Save:
    """What the last phase saves, beside the saves of those before it, each of which it goes on from."""
    save: Save | None = None
    for number, ranks in enumerate(RANKS):
        case = {"trains": trains[number], "after": 2 * number, "beside": beside[number]}
        save = Save(setup, ranks, "count_jobs.phase", case, source=save)
    assert save is not None
    return save


@cells([Cell(name, saved(*phases), "noted", 1, expected=phases[2]) for name, phases in PHASES.items()])
def test_each_save_resumes_bit_by_bit_and_none_goes_back(cell: Cell, facts: list[Any]) -> None:
    assert len(facts) == len(RANKS)
    for number, found in enumerate(facts):
        assert found.error is None and found.differences == [], (number, found.error, found.differences)
        assert not any("lost" in line or "mixed" in line for line in found.lines), found.lines
        # what the engine has not counted is no position in the data
        assert any("no data position" in line for line in found.lines_of_save) == cell.expected[number]
        assert found.steps == 2 * cell.expected[: number + 1].count(False)


@pytest.mark.parametrize("name", PHASES)
def test_the_commands_call_each_save_whole(name: str, saves: Saves) -> None:
    folder = str(saves.folder(saved(*PHASES[name])))
    assert find_latest(folder).endswith("after6")
    for command in (["verify", folder], ["plan", folder, "--dp", "4"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output


GOES_ON: dict[str, Any] = {"has_schedule": False, "mixed": False, "beside": 3}


@cells(
    [
        Cell(name, None, "count_jobs.left_standing", 2, {"setup": setup, **GOES_ON})
        for name, setup in {
            "ZeRO-3": Setup(3),
            "ZeRO-3, sub-groups, bf16": Setup(3, "bf16", zero=SUB_GROUPS),
            "ZeRO-3, fp16": Setup(3, "fp16"),
            "ZeRO-2": Setup(2, "bf16"),
        }.items()
    ]
)
def test_a_run_that_another_loop_went_on_with_is_no_mixture(cell: Cell, facts: list[Any]) -> None:
    """Saved without elastic_ckpt: the optimizer is further on all ranks, and nothing contradicts that."""
    for found in facts:
        assert found.kind == "" and found.differences == []
        assert found.report.samples_consumed is None, "nothing tells the position in the data"
    assert any("no engine.step has counted the last 3" in line for line in facts[0].lines), facts[0].lines


@cells(
    [
        Cell(
            name,
            None,
            "count_jobs.left_standing",
            2,
            {"setup": Setup(3), **GOES_ON, **more},
            fits=(None, {"setup": Setup(3), **GOES_ON}),
            expected=kind,
        )
        for name, kind, more in (
            ("the engine steps a schedule", "MixedSavesError", {"has_schedule": True}),
            ("one rank is behind", "DamagedError", {"mixed": True}),
            ("by one step, as within engine.step", "MixedSavesError", {"beside": 1}),
        )
    ]
)
def test_what_contradicts_it_is_refused(cell: Cell, facts: list[Any]) -> None:
    assert {found.kind for found in facts} == {cell.expected}

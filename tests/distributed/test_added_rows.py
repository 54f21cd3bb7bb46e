"""Tokens that were added since the save: the saved rows come back, the others stay, and never without being asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.added_rows_jobs import ADDED
from tests.distributed.cells import Cell, Save, Saves, cells, crossing
from tests.distributed.model import VOCABULARY, Setup

NOTHING_PERSISTENT = (("stage3_param_persistence_threshold", 0), ("sub_group_size", 150))
TIED = {"embedding.weight"}
UNTIED = {"embedding.weight", "head.weight", "head.bias"}
Z0, Z1, Z2, Z3 = map(Setup, range(4))
BF16_2 = Setup(2, "bf16")
CODED = Setup(1, optimizer="bnb.AdamW8bit")
WEIGHTS = {"load_optimizer_states": False}


def saved(model: str, setup: Setup, converted: bool = False) -> Save:
    return Save(setup, 2, "added_rows_jobs.save", {"model": model}, converted)


def grown(save: Save, target: Setup, note: str = "", **case: Any) -> Cell:
    """A load with more rows than were saved; a test expects the names of what has them in its error."""
    model = save.more["model"]
    names = TIED if model == "tied" else UNTIED
    return crossing(save, target, 3, "added_rows_jobs.load", names, f"{model}{note}", model=model, **case)


#: Every stage on both sides, tied and not, native and universal, with states and without.
GROWN = [
    grown(saved("biased", Z0), Z0),
    grown(saved("biased", Z0), Setup(3, zero=NOTHING_PERSISTENT)),
    grown(saved("biased", BF16_2), Setup(1, "bf16")),
    grown(saved("biased", BF16_2), Setup(0, "bf16")),
    grown(saved("biased", Z3), Z2),
    grown(saved("tied", Z1), Z3),
    grown(saved("tied", Setup(3, "bf16")), BF16_2, " without states", arguments=WEIGHTS),
    grown(saved("biased", Z1), Z3, " module only", arguments={"load_module_only": True}),
    grown(saved("biased", Z1, converted=True), Z2),
    grown(saved("biased", Z3, converted=True), Z3),
    grown(saved("wide", CODED), Setup(2, optimizer="bnb.AdamW8bit")),
]


@cells(GROWN)
def test_the_config_lines_of_the_refusal_restore_the_saved_rows(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        (text,) = found.refused.texts
        assert "MismatchError" in found.refused.kinds and not found.refused.changed, text
        assert all(f'"{name}"' in text for name in cell.expected), text
        assert found.differences == {} and found.goes_on, found.differences
        (note,) = [note for note in found.notes if note.startswith("rows added since the save")]
        assert f"embedding.weight ({VOCABULARY} -> {VOCABULARY + ADDED})" in note


ASKED = {"options": {"added_rows": ["embedding.weight", "head.*"]}}
FEWER = grown(saved("biased", Z3), Z2, " fewer", rows=VOCABULARY - 1, **ASKED)
MORE = grown(saved("biased", Z3), Z2, **ASKED)


@cells([replace(FEWER, fits=(MORE.save, MORE.case))])
def test_fewer_rows_are_no_added_rows(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        (text,) = found.refused.texts
        assert "does not have more rows" in text and not found.refused.changed


@cells([grown(saved("biased", Z3), Z2, " misspelt", options={"added_rows": ["embeding.weight"]})])
def test_a_name_that_fits_nothing_is_an_error_with_a_remedy(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        (text,) = found.refused.texts
        assert "ConfigError" in text and not found.refused.changed
        assert found.differences == {} and found.goes_on


@pytest.mark.parametrize(("converted", "zero"), [(False, 2), (True, 3)], ids=["native", "universal"])
def test_a_plan_forecasts_these_loads(converted: bool, zero: int, saves: Saves, tmp_path: Path) -> None:
    folder, config = saves.folder(saved("biased", Z1, converted)), tmp_path / "ds.json"
    config.write_text(json.dumps({"elastic_checkpoint": {"added_rows": ["head.*", "embedding.weight"]}}))
    line = ["plan", str(folder), "--config", str(config), "--dp", "3", "--zero", str(zero), "--json"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["loads"] and any("added_rows" in note for note in plan["notes"])

"""Tokens that were added since the save: the saved rows come back, the others stay, and never without being asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.added_rows_jobs import ADDED
from tests.distributed.conftest import Convert, Launch
from tests.distributed.model import VOCABULARY, Setup

NOTHING_PERSISTENT = (("stage3_param_persistence_threshold", 0), ("sub_group_size", 150))
NAMES = {
    "tied": {"embedding.weight"},
    "biased": {"embedding.weight", "head.weight", "head.bias"},
    "wide": {"embedding.weight", "head.weight", "head.bias"},
}
CODED = Setup(1, optimizer="bnb.AdamW8bit")
SAVED = {
    "tied": [Setup(1), Setup(3, "bf16")],
    "biased": [Setup(0), Setup(1), Setup(2, "bf16"), Setup(3)],
    "wide": [CODED],
}


def cases_of(native: Path, universal: Path) -> list[dict[str, Any]]:
    """Every stage on both sides, tied and not, native and universal, with states and without."""

    def case(model: str, source: Setup, target: Setup, folder: Path = native, **more: Any) -> dict[str, Any]:
        return {"folder": str(folder / model / f"{source.name}-dp2"), "setup": target, "model": model, **more}

    flat3 = Setup(3, zero=NOTHING_PERSISTENT)
    weights = {"load_optimizer_states": False}
    return [
        case("biased", Setup(0), Setup(0)),
        case("biased", Setup(0), flat3),
        case("biased", Setup(2, "bf16"), Setup(1, "bf16")),
        case("biased", Setup(2, "bf16"), Setup(0, "bf16")),
        case("biased", Setup(3), Setup(2)),
        case("tied", Setup(1), Setup(3)),
        case("tied", Setup(3, "bf16"), Setup(2, "bf16"), arguments=weights),
        case("biased", Setup(1), Setup(3), arguments={"load_module_only": True}),
        case("biased", Setup(1), Setup(2), universal),
        case("biased", Setup(3), Setup(3), universal),
        case("wide", CODED, Setup(2, optimizer="bnb.AdamW8bit")),
    ]


def planned(folder: Path, config: Path, zero: int) -> dict[str, Any]:
    config.write_text(json.dumps({"elastic_checkpoint": {"added_rows": ["head.*", "embedding.weight"]}}))
    line = ["plan", str(folder), "--config", str(config), "--dp", "3", "--zero", str(zero), "--json"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_config_lines_of_the_refusal_restore_the_saved_rows(
    launch: Launch, convert: Convert, tmp_path: Path
) -> None:
    native, universal = tmp_path / "native", tmp_path / "universal"
    for model, setups in SAVED.items():
        arguments = {"folder": str(native / model), "setups": setups, "model": model, "truth": model != "wide"}
        launch(2, "added_rows_jobs.save", arguments)
    (universal / "biased").mkdir(parents=True)
    convert(native / "biased", universal / "biased", [f"{Setup(1).name}-dp2", f"{Setup(3).name}-dp2"])
    cases = cases_of(native, universal)
    fewer = {**cases[4], "rows": VOCABULARY - 1, "options": {"added_rows": ["embedding.weight", "head.*"]}}
    unknown = {**cases[4], "options": {"added_rows": ["embeding.weight"]}}
    of_all = launch(3, "added_rows_jobs.load", [*cases, fewer, unknown])
    for start in range(0, len(of_all), len(cases) + 2):
        *found, shrunk, misspelt = of_all[start : start + len(cases) + 2]
        check(found, shrunk, misspelt)
    for folder, zero in ((native, 2), (universal, 3)):  # as a forecast of these loads, at the saved sizes
        plan = planned(folder / "biased" / f"{Setup(1).name}-dp2", tmp_path / "ds.json", zero)
        assert plan["loads"] and any("added_rows" in note for note in plan["notes"])


def check(found: list[Any], shrunk: Any, misspelt: Any) -> None:
    """What one rank has found."""
    for case, refused, differences, notes, goes_on in found:
        (text,) = refused.texts
        assert "MismatchError" in refused.kinds and not refused.changed, (case, text)
        assert all(f'"{name}"' in text for name in NAMES[case["model"]]), text
        assert differences == {} and goes_on, (case, differences)
        (note,) = [note for note in notes if note.startswith("rows added since the save")]
        assert f"embedding.weight ({VOCABULARY} -> {VOCABULARY + ADDED})" in note
    (text,) = shrunk[1].texts
    assert "does not have more rows" in text and not shrunk[1].changed
    (text,) = misspelt[1].texts
    assert "ConfigError" in text and not misspelt[1].changed and misspelt[2] == {} and misspelt[-1]

"""What a resumed run is asked for: other hyperparameters, and checkpoints that no ``latest`` file names."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.explain import explain
from elastic_ckpt.tools.opened import config_of, locate, open_folder
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.mid_run_jobs import LIVE, SCHEDULES, STEPS

TAG = f"global_step{STEPS}"
CHANGED = {"betas": (0.7, 0.95), "weight_decay": 0.3}
KEEP_LIVE = {"param_groups": "keep_live"}


def saved(schedule: str) -> Save:
    return Save(schedule, job="mid_run_jobs.save")


# --- folders without latest -------------------------------------------------------------------------------------------


def alone(copy: Path) -> None:
    """One tag, and no ``latest`` that names it."""
    (copy / "latest").unlink()


def published(copy: Path) -> None:
    """A universal checkpoint as BLOOM's are published."""
    universal = copy / f"{TAG}_universal"
    convert(open_folder(str(copy), None, config_of(None)), universal)
    (universal / "zero" / "optimizer_state.pt").unlink()  # which BLOOM's lack, of an older DeepSpeed
    path = universal / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "ds_version": "0.6.5"}, path)
    shutil.rmtree(copy / TAG)
    for latest in copy.glob("latest*"):
        latest.unlink()


def two(copy: Path) -> None:
    alone(copy)
    shutil.copytree(copy / TAG, copy / "global_step9")


def emptied(copy: Path) -> None:
    shutil.rmtree(copy)
    copy.mkdir()


def asked(name: str, change: Callable[[Path], None], expected: str, **case: Any) -> Cell:
    """A load of what a ``change`` has made of a save, or of what is ``below`` it."""
    return Cell(name, saved("WarmupLR"), "mid_run_jobs.look", 3, case, change, expected=expected)


UNIVERSAL = {"below": f"{TAG}_universal"}
NATIVE = {"below": TAG}
WARY = {"mode": "require", "on_damage": "previous"}
ITSELF = "is a checkpoint itself"
#: What is said of what is loaded.
ASKED = [
    asked("universal, its folder", published, ITSELF, flag="auto", **UNIVERSAL),
    asked("universal, the folder above", published, f"loaded {TAG}_universal, the only checkpoint", flag="auto"),
    asked("universal, load_universal", published, f"loaded {TAG}_universal, the only checkpoint", load_universal=True),
    asked("universal, required", published, ITSELF, section=WARY, **UNIVERSAL),
    asked("native, its folder", alone, ITSELF, flag="auto", **NATIVE),
    asked("native, the folder above", alone, f"loaded {TAG}, the only checkpoint", flag="require"),
    # by DeepSpeed's own loader, which the tag is given
    asked("native, module only", alone, ITSELF, flag="auto", arguments={"load_module_only": True}, **NATIVE),
    asked("universal, by its tag", published, "", arguments={"tag": f"{TAG}_universal"}),
]


@cells(ASKED)
def test_a_lone_checkpoint_that_is_asked_for_is_loaded_and_named(cell: Cell, facts: list[Any]) -> None:
    for rank, each in enumerate(facts):
        assert each.error is None, each.error
        tag = f"{TAG}_universal" if cell.change is published else TAG
        below = Path(each.folder)
        assert Path(each.path).parent == (below if below.name == tag else below / tag) and Path(each.path).is_file()
        assert each.differences == {}, each.differences
        texts = [text for text in (*each.notes, *each.lines) if cell.expected in text]
        assert len(texts) == 1 or rank or not cell.expected, (each.notes, each.lines)


NO_CHECKPOINT = "there is no DeepSpeed checkpoint to load"
#: What the error says.
REFUSED = [
    asked("universal, its folder", published, "load_dir is the folder of a checkpoint", **UNIVERSAL),
    asked("native, previous ones", alone, "load_dir is the folder of a checkpoint", section={"on_damage": "previous"}, **NATIVE),
    asked("two", two, "the checkpoint to load is not there", flag="auto"),
    asked("empty", emptied, NO_CHECKPOINT, flag="auto"),
    asked("empty, load_universal", emptied, NO_CHECKPOINT, load_universal=True),
    asked("not there", emptied, NO_CHECKPOINT, flag="auto", below="not there"),
]  # fmt: skip


@cells([replace(cell, fits=(cell.save, {})) for cell in REFUSED])
def test_others_are_errors_on_every_rank(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.error is not None and each.error[0] == "NotFoundError" and cell.expected in each.error[1]
        if cell.expected.startswith("load_dir"):
            folder = Path(each.folder)
            assert f"load_checkpoint('{folder.parent}', tag='{folder.name}')" in each.error[1]


@cells(
    [
        asked("empty", emptied, ""),
        asked("two", two, "elastic_ckpt loads nothing"),
        asked("alone", alone, TAG),
    ]
)
def test_a_run_that_asks_for_none_begins(cell: Cell, facts: list[Any]) -> None:
    assert {(each.error, each.path) for each in facts} == {(None, None)}
    assert cell.expected in " ".join(facts[0].lines)


def test_the_commands_open_the_same_folders(saves: Saves, tmp_path: Path) -> None:
    native, universal = (shutil.copytree(saves.folder(saved("WarmupLR")), tmp_path / name) for name in ("a", "b"))
    alone(native)
    published(universal)
    for folder in (universal / f"{TAG}_universal", universal):
        assert locate(str(folder), None).folder == str(universal / f"{TAG}_universal")
    assert explain(str(native), str(native / TAG), config_of(None)).steps == (STEPS,)


# --- other hyperparameters --------------------------------------------------------------------------------------------

#: Schedule, config, what the live run has; then of the first step, what is the live run's.
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    *((name, KEEP_LIVE, CHANGED, ("betas", "weight_decay")) for name in SCHEDULES if name != "OneCycle"),
    ("OneCycle", KEEP_LIVE, {"weight_decay": 0.3}, ("weight_decay",)),
    ("none", KEEP_LIVE, {"lr": 0.25}, ("lr",)),
    ("LambdaLR", {"states": {"betas": "fresh"}}, CHANGED, ("betas",)),
    ("WarmupLR", {"states": {"betas": "fresh", "weight_decay": "fresh"}}, CHANGED, ("betas", "weight_decay")),
    ("none", {"states": {"lr": "fresh"}}, {"lr": 0.25}, ("lr",)),
    ("WarmupLR", {}, CHANGED, ()),
    ("none", {}, {"lr": 0.25}, ()),
    ("CosineAnnealingLR", {}, {}, ()),
    ("OneCycle", {}, {}, ()),
    # below a restored schedule, the first step is not that of its beginning
    ("WarmupLR", {"states": {"lr": "fresh"}}, {}, ()),
    ("LambdaLR", {"states": {"lr": "fresh"}}, {}, ()),
]
COSINE = "CosineAnnealingLR"


def cosine(lr: float, step: int, steps: int = 20) -> float:
    """What the saved schedule has at a step."""
    return 1e-4 + (lr - 1e-4) * (1 + math.cos(math.pi * step / steps)) / 2


#: By which the saved schedule changes the rate that is in a group.
RATIO = cosine(1.0, STEPS + 1) / cosine(1.0, STEPS)
#: Rows of the recipe about a new lr: schedule, case, the lr of the first step and of the second, and what is said.
NEW_LR: dict[str, tuple[str, dict[str, Any], float, float, str]] = {
    "a schedule begins anew": (COSINE, {"section": KEEP_LIVE, "arguments": {"load_lr_scheduler_states": False}}, 0.25, cosine(0.25, 1), "restarts"),
    "torch's has its saved options again, at the new rate": (f"{COSINE}-longer", {"section": KEEP_LIVE}, cosine(0.25, STEPS), cosine(0.25, STEPS + 1), "what the restored lr"),
    # as the Trainer's, it begins with 0
    "a framework restores its own, with the old rate": ("none", {"section": KEEP_LIVE, "outside": "LambdaLR"}, 0.0, 1e-2 * (STEPS + 1) / 8, "LambdaLR outside of the engine sets it"),
    # whatever the section says
    "one that is new since the save begins with the live lr": ("none", {"section": {"states": {"betas": "fresh"}}, "outside": "LambdaLR"}, 0.0, 1e-2 * (STEPS + 1) / 8, ""),
    "but for one that goes from the rate in the group to the next": ("none", {"section": KEEP_LIVE, "outside": COSINE}, 0.25, 0.25 * RATIO, "CosineAnnealingLR outside of the engine continues"),
}  # fmt: skip
NEW_VALUES = {"lr": 0.25, "betas": (0.85, 0.97)}


def changed(name: str, schedule: str, values: dict[str, Any], expected: Any, **case: Any) -> Cell:
    """A run that goes on with other values, on one rank."""
    case |= {"schedule": schedule, "values": values}
    return Cell(name, saved(schedule.partition("-")[0]), "mid_run_jobs.change", 1, case, expected=expected)


@cells([changed(name, schedule, NEW_VALUES, wanted, **case) for name, (schedule, case, *wanted) in NEW_LR.items()])
def test_a_new_lr_is_taken_as_the_recipe_says(cell: Cell, facts: list[Any]) -> None:
    (found,) = facts
    first, second, said = cell.expected
    assert found.first["lr"] == pytest.approx(first)
    assert found.second["lr"] == pytest.approx(second, rel=0.02)
    assert found.first["betas"] == NEW_VALUES["betas"] and said in found.text, found.text


def changes() -> list[Cell]:
    found = []
    for number, (schedule, section, values, kept) in enumerate(CHANGES):
        name, stage = f"{schedule}, {section}, {values}", 3 if number % 2 else 1
        found.append(changed(name, schedule, values, kept, section=section, stage=stage))
    return found


@cells(changes())
def test_the_first_step_has_the_values_that_were_asked_for(cell: Cell, facts: list[Any]) -> None:
    (found,), kept = facts, cell.expected
    schedule, section, values = (cell.case[key] for key in ("schedule", "section", "values"))
    expected = found.saved | {key: (LIVE | values)[key] for key in kept}
    assert found.first == expected
    # a schedule sets the next step's lr, and nothing that is kept
    assert {key: found.second[key] for key in kept} == {key: expected[key] for key in kept}
    assert found.second["lr"] > 0
    notes = [note for note in found.report.notes if "replace those of the live run" in note]
    replaced = sorted(set(values) - set(kept)) if section != KEEP_LIVE else []
    assert len(notes) == bool(replaced)
    for key in replaced:
        assert f"{key} {(LIVE | values)[key]} -> {found.saved[key]}" in notes[0]
        assert f'"{key}": "fresh"' in notes[0] and '{"param_groups": "keep_live"}' in notes[0]
    assert ("which replaced live ones" in found.report.goes_on) == bool(replaced and not kept)
    if section == KEEP_LIVE:
        schedules = ", but for what the restored lr scheduler sets" * (schedule != "none")
        assert f"hyperparameters of the live group stay{schedules}" in found.text
        assert "continue from lr" not in found.text

"""What a resumed run is asked for: other hyperparameters, and checkpoints that no ``latest`` file names."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.explain import explain
from elastic_ckpt.tools.opened import config_of, locate, open_folder
from tests.distributed.conftest import Launch
from tests.distributed.mid_run_jobs import LIVE, SCHEDULES, STEPS

TAG = f"global_step{STEPS}"
CHANGED = {"betas": (0.7, 0.95), "weight_decay": 0.3}
KEEP_LIVE = {"param_groups": "keep_live"}


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("mid_run")
    values = launch(2, "mid_run_jobs.save", str(folder))[0]
    publish(folder)
    return SimpleNamespace(folder=folder, values=values)


def publish(folder: Path) -> None:
    """Folders without ``latest``: with one tag, native or universal as BLOOM's are published, with two, and with none."""
    native = folder / "WarmupLR"
    universal = folder / "published" / f"{TAG}_universal"
    universal.parent.mkdir()
    convert(open_folder(str(native), None, config_of(None)), universal)
    (universal / "zero" / "optimizer_state.pt").unlink()  # which BLOOM's lack, of an older DeepSpeed
    path = universal / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "ds_version": "0.6.5"}, path)
    for latest in universal.parent.glob("latest*"):
        latest.unlink()
    for copy in (folder / "alone" / TAG, folder / "two" / TAG, folder / "two" / "global_step9"):
        shutil.copytree(native / TAG, copy)
    (folder / "empty").mkdir()


# --- folders without latest -------------------------------------------------------------------------------------------

#: Folder, what it is asked for with, and what of it is loaded.
ASKED: list[tuple[str, dict[str, Any], str]] = [
    (f"published/{TAG}_universal", {"flag": "auto"}, "is a checkpoint itself"),
    ("published", {"flag": "auto"}, f"loaded {TAG}_universal, the only checkpoint"),
    ("published", {"load_universal": True}, f"loaded {TAG}_universal, the only checkpoint"),
    (f"published/{TAG}_universal", {"section": {"mode": "require", "on_damage": "previous"}}, "checkpoint itself"),
    (f"alone/{TAG}", {"flag": "auto"}, "is a checkpoint itself"),
    ("alone", {"flag": "require"}, f"loaded {TAG}, the only checkpoint"),
    # by DeepSpeed's own loader, which the tag is given
    (f"alone/{TAG}", {"flag": "auto", "arguments": {"load_module_only": True}}, "is a checkpoint itself"),
    ("published", {"arguments": {"tag": f"{TAG}_universal"}}, ""),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (f"published/{TAG}_universal", {}, "load_dir is the folder of a checkpoint"),
    (f"alone/{TAG}", {"section": {"on_damage": "previous"}}, "load_dir is the folder of a checkpoint"),
    ("two", {"flag": "auto"}, "the checkpoint to load is not there"),
    ("empty", {"flag": "auto"}, "there is no DeepSpeed checkpoint to load"),
    ("empty", {"load_universal": True}, "there is no DeepSpeed checkpoint to load"),
    ("not there", {"flag": "auto"}, "there is no DeepSpeed checkpoint to load"),
]
FRESH: list[tuple[str, dict[str, Any], str]] = [
    ("empty", {}, ""),
    ("two", {}, "elastic_ckpt loads nothing"),
    ("alone", {}, TAG),
]


@pytest.fixture(scope="module")
def looked(saved: SimpleNamespace, launch: Launch) -> list[list[SimpleNamespace]]:
    """By case, what each of three ranks has found."""
    truth = str(saved.folder / "truth.pt")
    cases = [
        {**options, "folder": str(saved.folder / name), "truth": truth} for name, options, _ in ASKED + REFUSED + FRESH
    ]
    found = launch(3, "mid_run_jobs.look", cases)
    return [found[number :: len(cases)] for number in range(len(cases))]


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_a_lone_checkpoint_that_is_asked_for_is_loaded_and_named(
    number: int, saved: SimpleNamespace, looked: list[list[SimpleNamespace]]
) -> None:
    name, _, said = ASKED[number]
    for rank, each in enumerate(looked[number]):
        assert each.error is None, each.error
        below = saved.folder / name
        tag = below if below.name.startswith(TAG) else next(below.iterdir())
        assert Path(each.path).parent == tag and Path(each.path).is_file()
        assert each.differences == {}, each.differences
        texts = [text for text in (*each.notes, *each.lines) if said in text]
        assert len(texts) == 1 or rank or not said, (each.notes, each.lines)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_others_are_errors_on_every_rank(number: int, looked: list[list[SimpleNamespace]]) -> None:
    _, _, said = REFUSED[number]
    for each in looked[len(ASKED) + number]:
        assert each.error is not None and each.error[0] == "NotFoundError" and said in each.error[1]
        if said.startswith("load_dir"):
            folder = Path(each.case["folder"])
            assert f"load_checkpoint('{folder.parent}', tag='{folder.name}')" in each.error[1]


@pytest.mark.parametrize("number", range(len(FRESH)))
def test_a_run_that_asks_for_none_begins(number: int, looked: list[list[SimpleNamespace]]) -> None:
    first, *others = looked[len(ASKED) + len(REFUSED) + number]
    assert {(each.error, each.path) for each in (first, *others)} == {(None, None)}
    assert FRESH[number][2] in " ".join(first.lines)


def test_the_commands_open_the_same_folders(saved: SimpleNamespace) -> None:
    for name in (f"published/{TAG}_universal", "published"):
        assert locate(str(saved.folder / name), None).folder == str(saved.folder / "published" / f"{TAG}_universal")
    folders = [str(saved.folder / "alone"), str(saved.folder / "alone" / TAG)]
    assert explain(*folders, config_of(None)).steps == (STEPS,)


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
NEW_LR: list[tuple[str, dict[str, Any], float, float, str]] = [
    # it begins anew
    (COSINE, {"section": KEEP_LIVE, "arguments": {"load_lr_scheduler_states": False}}, 0.25, cosine(0.25, 1), "begins anew"),
    # torch's has its saved options again, at the new rate
    (f"{COSINE}-longer", {"section": KEEP_LIVE}, cosine(0.25, STEPS), cosine(0.25, STEPS + 1), "what the restored lr"),
    # a framework restores its own, with the old rate; as the Trainer's, it begins with 0
    ("none", {"section": KEEP_LIVE, "outside": "LambdaLR"}, 0.0, 1e-2 * (STEPS + 1) / 8, "outside of the engine"),
    # one that is new since the save begins with the live lr, whatever the section says
    ("none", {"section": {"states": {"betas": "fresh"}}, "outside": "LambdaLR"}, 0.0, 1e-2 * (STEPS + 1) / 8, ""),
    # but for one that goes from the rate in the group to the next
    ("none", {"section": KEEP_LIVE, "outside": COSINE}, 0.25, 0.25 * RATIO, "outside of the engine"),
]  # fmt: skip


def test_a_new_lr_is_taken_as_the_recipe_says(saved: SimpleNamespace, launch: Launch) -> None:
    values = {"lr": 0.25, "betas": (0.85, 0.97)}
    cases = [{"schedule": schedule, "values": values, **case} for schedule, case, *_ in NEW_LR]
    facts = launch(1, "mid_run_jobs.change", {"folder": str(saved.folder), "cases": cases})
    for found, (_, _, first, second, said) in zip(facts, NEW_LR, strict=True):
        text = " ".join(found.text.replace("│", " ").split())
        assert found.first["lr"] == pytest.approx(first), found.case
        assert found.second["lr"] == pytest.approx(second, rel=0.02), found.case
        assert found.first["betas"] == values["betas"] and said in text, text


@pytest.fixture(scope="module")
def changed(saved: SimpleNamespace, launch: Launch) -> list[SimpleNamespace]:
    cases = [
        {"schedule": schedule, "section": section, "values": values, "stage": 3 if number % 2 else 1}
        for number, (schedule, section, values, _) in enumerate(CHANGES)
    ]
    return launch(1, "mid_run_jobs.change", {"folder": str(saved.folder), "cases": cases})


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_the_first_step_has_the_values_that_were_asked_for(
    number: int, saved: SimpleNamespace, changed: list[SimpleNamespace]
) -> None:
    schedule, section, values, kept = CHANGES[number]
    found = changed[number]
    expected = saved.values[schedule] | {key: (LIVE | values)[key] for key in kept}
    assert found.first == expected, found.case
    # a schedule sets the next step's lr, and nothing that is kept
    assert {key: found.second[key] for key in kept} == {key: expected[key] for key in kept}
    assert found.second["lr"] > 0
    notes = [note for note in found.report.notes if "replace those of the live run" in note]
    replaced = sorted(set(values) - set(kept)) if section != KEEP_LIVE else []
    assert len(notes) == bool(replaced)
    for key in replaced:
        assert f"{key} {(LIVE | values)[key]} -> {saved.values[schedule][key]}" in notes[0]
        assert f'"{key}": "fresh"' in notes[0] and '{"param_groups": "keep_live"}' in notes[0]
    assert ("which replaced live ones" in found.report.goes_on) == bool(replaced and not kept)
    if section == KEEP_LIVE:
        schedules = ", but for what the restored lr scheduler sets" * (schedule != "none")
        assert f"hyperparameters of the live group stay{schedules}" in " ".join(found.text.replace("│", " ").split())
        assert "continue from lr" not in found.text

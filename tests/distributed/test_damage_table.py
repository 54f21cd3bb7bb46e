"""Every kind of damage in every kind of checkpoint: what finds it, as ``docs/verification.md`` has it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed import damage
from tests.distributed.conftest import Convert, Launch
from tests.distributed.facts import Refused
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
Change = Callable[[Path], Any]


class Layout(NamedTuple):
    """Files of a checkpoint of one kind, and the keys of their tensors; of an empty name, it has no such file.

    ``optimizer`` and ``other`` hold masters, ``moments`` the moments, ``model`` what else is resumed.
    """

    optimizer: str
    other: str
    moments: str
    model: str
    masters: str
    moment: str


MODEL = "mp_rank_00_model_states.pt"
RANK0, RANK1 = (damage.OPTIMIZER.format(rank) for rank in (0, 1))
FOLDER = "zero/hidden.weight"
PIPELINE = Parallel("pipeline", "uniform", pp=2, stage=1)
LAYOUTS = {
    "ZeRO-0": Layout("", "", MODEL, MODEL, "module", "exp_avg"),
    "ZeRO-1": Layout(RANK1, RANK0, RANK1, MODEL, "fp32", "exp_avg"),
    "ZeRO-3": Layout(RANK1, RANK0, RANK1, f"zero_pp_rank_1_{MODEL}", "fp32", "exp_avg"),
    "universal": Layout(f"{FOLDER}/fp32.pt", "zero/back.weight/fp32.pt", f"{FOLDER}/exp_avg.pt", MODEL, "param", "param"),
    "pipeline": Layout(RANK0, RANK0.replace("mp_rank_00", "mp_rank_01"), RANK0, MODEL, "fp32", "exp_avg"),
}  # fmt: skip
#: What happens to some files; ``None``: there are no such files in this layout.
KINDS: dict[str, Callable[[Layout, Path | None], Change | None]] = {
    "a file of masters or states is missing": lambda files, _: damage.remove(files.optimizer) if files.optimizer else None,
    "a model-states file is missing": lambda files, _: damage.remove(files.model),
    "a file is truncated": lambda files, _: damage.truncate(files.optimizer or files.model, 0.9),
    "a file is empty, as on a full disk": lambda files, _: damage.truncate(files.model, 0),
    "noise for a pickle": lambda files, _: damage.rewrite_pickle(files.optimizer or files.model),
    "two files changed places": lambda files, _: damage.swap(files.optimizer, files.other) if files.optimizer else None,
    "a file was copied over another": lambda files, _: damage.copy_over(files.other, files.optimizer) if files.optimizer else None,
    "a file of another step": lambda files, older: damage.replace_by(files.optimizer, older / files.optimizer) if older else None,
    "a bit of a master weight": lambda files, _: damage.flip_bit(files.optimizer or files.model, files.masters, 0.6),
    "a bit of a moment": lambda files, _: damage.flip_bit(files.moments, files.moment, 0.3),
    "NaN over a moment": lambda files, _: damage.write_nan(files.moments, files.moment),
    "`latest` names no checkpoint": lambda files, _: write_latest,
}  # fmt: skip


def write_latest(copy: Path) -> None:
    for latest in copy.glob("latest*"):
        latest.write_text("global_step9")


class Saved(NamedTuple):
    """A checkpoint, and the tag's folder of the same run's save at another step, if there is one."""

    folder: Path
    older: Path | None = None


@pytest.fixture(scope="module")
def saved(launch: Launch, convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    names = {stage: Setup(stage).name + "-dp2" for stage in (0, 1, 3)}
    whole, shorter = (tmp_path_factory.mktemp(name) for name in ("whole", "shorter"))
    for folder, steps in ((whole, 4), (shorter, 3)):
        launch(2, "save", {"folder": str(folder), "setups": [Setup(stage) for stage in names], "steps": steps})
        (folder / "universal").mkdir()
        convert(folder, folder / "universal", [names[1]])
    launch(2, "parallel_jobs.save", {"folder": str(whole), "setups": [PIPELINE]})
    return {
        "ZeRO-0": Saved(whole / names[0]),
        "ZeRO-1": Saved(whole / names[1], shorter / names[1] / "step4"),
        "ZeRO-3": Saved(whole / names[3], shorter / names[3] / "step4"),
        "universal": Saved(whole / "universal" / names[1], shorter / "universal" / names[1] / "step4_universal"),
        "pipeline": Saved(next(path for path in whole.iterdir() if path.name.startswith("pipeline"))),
    }


def found_by_load(refused: Refused) -> str:
    assert len(refused.texts) == 1, "the same on all ranks"
    if "PartialLoadError" in refused.kinds:
        return "after"
    assert refused.changed == set() or not refused.kinds
    return "before" if refused.kinds else "no"


def found_by_verify(folder: Path, *words: str) -> bool:
    result = CliRunner().invoke(app, ["verify", str(folder), *words])
    assert result.exit_code in (0, 1, 3), result.output
    return result.exit_code != 0


def test_what_finds_which_damage_is_what_the_page_has(
    launch: Launch, saved: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases: list[dict[str, Any]] = []
    for layout, files in LAYOUTS.items():
        for kind, change_of in KINDS.items():
            change = change_of(files, saved[layout].older)
            if change is not None:
                copy = tmp_path_factory.mktemp("damaged") / "copy"
                shutil.copytree(saved[layout].folder, copy)
                change(copy)
                cases.append({"layout": layout, "kind": kind, "folder": str(copy), "setup": Setup(2)})
    pipelines = [{**case, "setup": PIPELINE} for case in cases if case["layout"] == "pipeline"]
    refusals = launch(3, "refusal_jobs.refuse", [case for case in cases if case["layout"] != "pipeline"])
    found: dict[str, dict[str, tuple[str, bool, bool]]] = {kind: {} for kind in KINDS}
    for refused in [*refusals, *launch(2, "damage_jobs.refuse_pipeline", pipelines)]:
        case, folder = refused.case, Path(refused.case["folder"])
        by_verify = found_by_verify(folder), found_by_verify(folder, "--full")
        found[case["kind"]][case["layout"]] = found_by_load(refused), *by_verify
    assert table(found) in PAGE.read_text(encoding="utf-8"), f"\n{table(found)}"


def table(found: dict[str, dict[str, tuple[str, bool, bool]]]) -> str:
    """A row for each kind of damage; ``verify`` finds it in all layouts that have it, or in those that are named."""
    lines = [f"| damage | {' | '.join(LAYOUTS)} | `verify` | `verify --full` |", "|---" * (len(LAYOUTS) + 3) + "|"]
    for kind, cells in found.items():
        words = [cells[layout][0] if layout in cells else "" for layout in LAYOUTS]
        for number in (1, 2):
            layouts = [layout for layout, cell in cells.items() if cell[number]]
            words.append("yes" if len(layouts) == len(cells) else ", ".join(layouts) or "no")
        lines.append(f"| {kind} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"

"""Every kind of damage in every kind of checkpoint: what finds it, as ``docs/how-a-load-goes.md`` has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed import damage
from tests.distributed.cells import Cell, Change, Save, cells
from tests.distributed.facts import Refused
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

PAGE = Path(__file__).parents[2] / "docs" / "how-a-load-goes.md"


class Layout(NamedTuple):
    """A checkpoint of one kind: its files, and the keys of their tensors; of an empty name, it has no such file.

    ``optimizer`` and ``other`` hold masters, ``moments`` the moments, ``model`` what else is resumed. ``older`` is the
    same run's save at another step, if there is one.
    """

    save: Save
    optimizer: str
    other: str
    moments: str
    model: str
    masters: str = "fp32"
    moment: str = "exp_avg"
    older: Save | None = None


MODEL = "mp_rank_00_model_states.pt"
RANK0, RANK1 = map(damage.OPTIMIZER.format, range(2))
STAGE1 = RANK0.replace("mp_rank_00", "mp_rank_01")
FOLDER = "zero/hidden.weight"
PIPELINE = Parallel("pipeline", "uniform", pp=2, stage=1)


def shorter(stage: int, converted: bool = False) -> Save:
    return Save(Setup(stage), more={"steps": 3}, converted=converted)


LAYOUTS = {
    "ZeRO-0": Layout(Save(Setup(0)), "", "", MODEL, MODEL, masters="module"),
    "ZeRO-1": Layout(Save(Setup(1)), RANK1, RANK0, RANK1, MODEL, older=shorter(1)),
    "ZeRO-3": Layout(Save(Setup(3)), RANK1, RANK0, RANK1, f"zero_pp_rank_1_{MODEL}", older=shorter(3)),
    "universal": Layout(
        Save(Setup(1), converted=True),
        f"{FOLDER}/fp32.pt",
        "zero/back.weight/fp32.pt",
        f"{FOLDER}/exp_avg.pt",
        MODEL,
        masters="param",
        moment="param",
        older=shorter(1, converted=True),
    ),
    "pipeline": Layout(Save(PIPELINE, 2, "parallel_jobs.save_each"), RANK0, STAGE1, RANK0, MODEL),
}


def write_latest(copy: Path) -> None:
    for latest in copy.glob("latest*"):
        latest.write_text("global_step9")


#: What happens to files that every layout has.
OF_ANY_LAYOUT: dict[str, Callable[[Layout], Change]] = {
    "a model-states file is missing": lambda files: damage.remove(files.model),
    "a file is truncated": lambda files: damage.truncate(files.optimizer or files.model, 0.9),
    "a file is empty, as on a full disk": lambda files: damage.truncate(files.model, 0),
    "noise for a pickle": lambda files: damage.rewrite_pickle(files.optimizer or files.model),
    "a bit of a master weight": lambda files: damage.flip_bit(files.optimizer or files.model, files.masters, 0.6),
    "a bit of a moment": lambda files: damage.flip_bit(files.moments, files.moment, 0.3),
    "NaN over a moment": lambda files: damage.write_nan(files.moments, files.moment),
    "`latest` names no checkpoint": lambda files: write_latest,
}
#: To files that partitions alone have.
OF_PARTITIONS: dict[str, Callable[[Layout], Change]] = {
    "a file of masters or states is missing": lambda files: damage.remove(files.optimizer),
    "two files changed places": lambda files: damage.swap(files.optimizer, files.other),
    "a file was copied over another": lambda files: damage.copy_over(files.other, files.optimizer),
}
#: With files of the same run's save at another step.
OF_TWO_STEPS: dict[str, Callable[[Layout], Change]] = {
    "a file of another step": lambda files: damage.of_other(files.optimizer)
}


def kinds_of(files: Layout) -> dict[str, Callable[[Layout], Change]]:
    """What can happen to a checkpoint of this layout."""
    return OF_ANY_LAYOUT | (OF_PARTITIONS if files.optimizer else {}) | (OF_TWO_STEPS if files.older else {})


def damaged(layout: str, kind: str) -> Cell:
    """A load on another number of ranks than it was saved on; of a pipeline, on the same number."""
    files = LAYOUTS[layout]
    is_pipeline = layout == "pipeline"
    return Cell(
        f"{kind}, {layout}",
        files.save,
        "parallel_jobs.refuse" if is_pipeline else "refusal_jobs.refuse",
        2 if is_pipeline else 3,
        {"setup": PIPELINE if is_pipeline else Setup(2)},
        kinds_of(files)[kind](files),
        others=(files.older,) if kind in OF_TWO_STEPS and files.older else (),
        expected=(layout, kind),
    )


def page() -> dict[str, dict[str, str]]:
    """The page's table: by kind of damage and column, what it says."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## What finds which damage\n")[2]
    lines = section.partition("\n## ")[0].splitlines()
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    columns = next(row for row in rows if row[0] == "damage")
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows if row != columns}


def found_by_load(refused: Refused) -> str:
    assert len(refused.texts) == 1, "the same on all ranks"
    if "PartialLoadError" in refused.kinds:
        return "after"
    assert refused.changed == set() or not refused.kinds
    return "before" if refused.kinds else "no"


def found_by_verify(folder: str, *words: str) -> bool:
    result = CliRunner().invoke(app, ["verify", folder, *words])
    assert result.exit_code in (0, 1, 3), result.output
    return result.exit_code != 0


@cells([damaged(layout, kind) for layout, files in LAYOUTS.items() for kind in kinds_of(files)])
def test_what_finds_which_damage_is_what_the_page_has(cell: Cell, facts: list[Refused]) -> None:
    layout, kind = cell.expected
    row, (refused,) = page()[kind], facts
    assert found_by_load(refused) == row[layout]
    for column, words in (("`verify`", []), ("`verify --full`", ["--full"])):
        says_it_is_found = row[column] == "yes" or layout in row[column].split(", ")
        assert found_by_verify(refused.case["folder"], *words) == says_it_is_found, column


def test_the_page_has_a_word_for_each_layout_that_has_such_files() -> None:
    has_word = {kind: [layout for layout in LAYOUTS if row[layout]] for kind, row in page().items()}
    kinds = {**OF_PARTITIONS, **OF_ANY_LAYOUT, **OF_TWO_STEPS}
    assert has_word == {
        kind: [layout for layout, files in LAYOUTS.items() if kind in kinds_of(files)] for kind in kinds
    }

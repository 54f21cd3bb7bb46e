"""What an error names as a way out is followed, word by word: the load completes and is right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.tools.export import export
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.remedy_jobs import Cell

DIARY = Setup(1, optimizer="diary")
SAVED = [Setup(0), Setup(1), Setup(3), Setup(1, optimizer="sgd"), DIARY]
LARGER_BATCH = (("train_batch_size", 24), ("train_micro_batch_size_per_gpu", 8))
#: Loads that are refused on three ranks, of what two ranks saved: the setup that saved it, the cell, class, and how many
#: of its remedies a program can follow. Add yours.
CELLS: dict[str, tuple[Setup, Cell, str, int]] = {
    "another optimizer": (Setup(1, optimizer="sgd"), Cell("", Setup(1)), "MismatchError", 1),
    "a state of unknown layout": (DIARY, Cell("", DIARY), "UnsupportedError", 1),
    "a parameter more": (Setup(1), Cell("", Setup(3), "RicherLM"), "MismatchError", 1),
    "a parameter fewer": (Setup(3), Cell("", Setup(2), "PoorerLM"), "MismatchError", 1),
    "groups that were merged": (Setup(1), Cell("", Setup(2, groups="one")), "MismatchError", 1),
    "unnamed states in other groups": (Setup(0), Cell("", Setup(1, groups="mixed")), "MismatchError", 1),
    "another batch": (
        Setup(1),
        Cell("", Setup(1, config=LARGER_BATCH), config={"on_change": "error"}),
        "MismatchError",
        1,
    ),
    "a tag that is not there": (Setup(3), Cell("", Setup(1), arguments={"tag": "step5"}), "NotFoundError", 1),
    "the folder of a tag": (Setup(3), Cell("", Setup(1), inside="step4"), "NotFoundError", 1),
    "masters that would be rounded": (
        Setup(1),
        Cell("", Setup(1, "bf16_masters"), config={"on_change": "error"}, exact=()),
        "MismatchError",
        1,
    ),
}


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch(2, "save", {"folder": str(folder), "setups": SAVED})
    return folder


def test_every_remedy_holds_what_it_promises(launch: Launch, saved: Path) -> None:
    cells = {name: replace(cell, folder=str(saved / f"{by.name}-dp2")) for name, (by, cell, *_) in CELLS.items()}
    of_topology: set[str] = set()
    for outcome in launch(3, "remedy_jobs.follow", cells):
        *_, kind, count = CELLS[outcome.name]
        assert outcome.refused.kinds[:1] == (kind,), f"{outcome.name}: {outcome.refused.texts}"
        assert len(outcome.refused.texts) == 1 and not outcome.refused.changed, outcome.name
        assert len(outcome.followed) == count, f"{outcome.name}: {outcome.refused.remedies}"
        for followed in outcome.followed:
            assert followed.error == "" and followed.differences == {}, f"{outcome.name}, {followed.remedy}: {followed}"
        assert not any("mode" in each.config for each in outcome.refused.remedies), (
            "DeepSpeed's loader does not reshard"
        )
        of_topology |= {outcome.name for each in outcome.refused.remedies if each.at_saved_topology}
    assert of_topology == {"a state of unknown layout"}
    there = {name: replace(cells[name], setup=CELLS[name][0]) for name in of_topology}
    for outcome in launch(2, "remedy_jobs.at_saved_topology", there):
        assert outcome.refused.kinds == (), outcome.refused.texts


def test_a_command_runs(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export(str(saved / f"{Setup(1).name}-dp2"), str(tmp_path / "new"), include=["^nothing"])
    (remedy,) = caught.value.remedies
    command = [sys.executable, "-m", "elastic_ckpt", *remedy.command[1:]]
    assert remedy.command[0] == "elastic-ckpt"
    assert subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0


def test_a_load_at_its_topology_is_never_told_to_load_there(launch: Launch, saved: Path) -> None:
    required = {"mode": "require"}  # which leaves nothing to DeepSpeed's own loader
    cells = {"diary": Cell(str(saved / f"{DIARY.name}-dp2"), DIARY, config=required)}
    for outcome in launch(2, "remedy_jobs.follow", cells):
        assert outcome.refused.kinds[:1] == ("UnsupportedError",)
        assert not any(each.at_saved_topology for each in outcome.refused.remedies)
        assert [each.remedy.config for each in outcome.followed] == [{}, {"mode": "off"}]
        for followed in outcome.followed:
            assert followed.error == "" and followed.differences == {}, followed

"""What an error names as a way out is followed, word by word: the load completes and is right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ConfigError, ElasticCkptError, Remedy
from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.export import export
from elastic_ckpt.tools.opened import open_folder
from tests.distributed import damage
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.remedy_cells import (
    CELLS,
    DIARY,
    EIGHT_BIT,
    MODEL,
    PLAIN,
    REASONS,
    SAVED,
    UNKNOWN,
    UNKNOWN_WHOLE,
    Change,
    edits,
)
from tests.distributed.remedy_jobs import Cell, Outcome
from tests.distributed.remedy_parallel_cells import CELLS as PARALLEL
from tests.distributed.remedy_parallel_cells import SAVED as SAVED_PARALLEL
from tests.distributed.remedy_sites import Site, noted, sites


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch(2, "save", {"folder": str(folder), "setups": SAVED})
    launch(3, "save", {"folder": str(folder), "setups": [PLAIN]})
    launch(2, "save", {"folder": str(folder), "setups": [UNKNOWN, UNKNOWN_WHOLE], "truth": False})
    launch(2, "save", {"folder": str(folder), "setups": [EIGHT_BIT], "model": "WideLM", "truth": False})
    for setup in (UNKNOWN, UNKNOWN_WHOLE, EIGHT_BIT):
        _write_weights(folder / f"{setup.name}-dp2")
    return folder


def _write_weights(folder: Path) -> None:
    """The truth of a save whose states are not known: in fp32 its weights are the masters."""
    tree = torch.load(folder / "step4" / MODEL, weights_only=False)
    trained = list(chain(*tree["param_shapes"])) if tree["param_shapes"] else tree["module"]
    weights = {name: tree["module"][name] for name in trained}
    torch.save({"masters": weights, "weights": weights, "states": {}}, folder / "truth.pt")


@pytest.fixture(scope="module")
def outcomes(launch: Launch, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """By cell: what each of three ranks found."""
    cells = {}
    for name, case in CELLS.items():
        folder = _changed(saved / f"{case.saved.name}-dp{case.ranks}", case.change, tmp_path_factory)
        cells[name] = replace(case.cell, folder=folder)
    return _by_name(launch(3, "remedy_jobs.follow", cells))


@pytest.fixture(scope="module")
def parallel_outcomes(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """The same of tensor and pipeline parallel engines, on two ranks."""
    folders = {setup: tmp_path_factory.mktemp("parallel") for setup in SAVED_PARALLEL}
    launch(2, "parallel_jobs.save_each", [{"setup": setup, "folder": str(at)} for setup, at in folders.items()])
    cells = {}
    for name, case in PARALLEL.items():
        folder = _changed(folders[case.saved], case.change, tmp_path_factory)
        cells[name] = replace(case.cell, folder=folder)
    return _by_name(launch(2, "remedy_parallel_jobs.follow", cells))


def _changed(folder: Path, change: Change | None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A changed copy of a checkpoint; without a change, the checkpoint."""
    if change is None:
        return str(folder)
    copy = tmp_path_factory.mktemp("changed") / "copy"
    shutil.copytree(folder, copy)
    change(copy)
    return str(copy)


def _by_name(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.name, []).append(outcome)
    return found


@pytest.fixture(scope="module")
def at_their_topology(launch: Launch, saved: Path) -> list[Outcome]:
    required = {"mode": "require"}  # which leaves nothing to DeepSpeed's own loader
    cells = {"diary": Cell(str(saved / f"{DIARY.name}-dp2"), DIARY, config=required)}
    return launch(2, "remedy_jobs.follow", cells)


#: What ``convert`` refuses: of which save, what is done to a copy, and the word under ``"states"`` that is true of it.
CONVERSIONS: dict[str, tuple[Setup, Change | None, str]] = {
    "a state of unknown layout": (DIARY, None, "fresh"),
    "an entry that runs code": (Setup(1), edits(damage.plant_bomb, MODEL), ""),
}


@dataclass
class Conversion:
    """What ``convert`` refused, the remedy that was followed, where it was made, and what then became of it."""

    error: ElasticCkptError
    remedy: Remedy
    sites: set[Site]
    result: Result


@pytest.fixture(scope="module")
def conversions(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conversion]:
    found = {}
    for name, (setup, change, word) in CONVERSIONS.items():
        copy = tmp_path_factory.mktemp("converted") / "copy"
        shutil.copytree(saved / f"{setup.name}-dp2", copy)
        if change is not None:
            change(copy)
        source, target = str(copy / "step4"), str(copy / "step4_universal")
        with noted() as sites_run, pytest.raises(ElasticCkptError) as caught:
            convert(open_folder(source, None, ElasticConfig()), Path(target))
        ways = [each for each in caught.value.remedies if each.config and "trust_pickle" not in each.config]
        (remedy,) = [each for each in ways if not word or set(each.config["states"].values()) == {word}]
        config = copy / "ds.json"
        config.write_text(json.dumps({"elastic_checkpoint": remedy.config}))
        result = CliRunner().invoke(app, ["convert", source, target, "--config", str(config)])
        found[name] = Conversion(caught.value, remedy, sites_run, result)
    return found


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_remedy_of_convert_converts(name: str, conversions: dict[str, Conversion]) -> None:
    assert conversions[name].result.exit_code == 0, conversions[name].result.output


@pytest.mark.parametrize("name", CELLS)
def test_every_remedy_holds_what_it_promises(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    _check(outcomes[name], CELLS[name].kind, CELLS[name].count)


@pytest.mark.parametrize("name", PARALLEL)
def test_every_remedy_of_parallel_engines_holds_what_it_promises(
    name: str, parallel_outcomes: dict[str, list[Outcome]]
) -> None:
    _check(parallel_outcomes[name], PARALLEL[name].kind, PARALLEL[name].count)


def _check(outcomes: list[Outcome], kind: str, count: int) -> None:
    """One refusal of a kind on all ranks, and what each of so many remedies did."""
    for outcome in outcomes:
        assert outcome.refused.kinds[:1] == (kind,), outcome.refused.texts
        assert len(outcome.refused.texts) == 1 and not outcome.refused.changed
        assert len(outcome.followed) == count, outcome.refused.remedies
        for followed in outcome.followed:
            assert followed.error == "" and followed.differences == {}, f"{followed.remedy}: {followed}"
        # DeepSpeed's loader does not reshard
        assert not any("mode" in each.config for each in outcome.refused.remedies)


def test_a_load_at_the_topology_of_the_save_is_named_where_it_works(
    launch: Launch, saved: Path, outcomes: dict[str, list[Outcome]]
) -> None:
    of_topology = {
        name for name, (first, *_) in outcomes.items() if any(each.at_saved_topology for each in first.refused.remedies)
    }
    there = {
        name: replace(CELLS[name].cell, folder=str(saved / f"{CELLS[name].saved.name}-dp2"), setup=CELLS[name].saved)
        for name in of_topology
        if CELLS[name].change is None
    }
    expected = {"a state of unknown layout", "a table of each parameter", "blocks that may not be requantized"}
    assert there.keys() == expected
    for outcome in launch(2, "remedy_jobs.at_saved_topology", there):
        assert outcome.refused.kinds == (), outcome.refused.texts


def test_each_way_out_is_followed_or_has_a_reason(
    outcomes: dict[str, list[Outcome]],
    parallel_outcomes: dict[str, list[Outcome]],
    at_their_topology: list[Outcome],
    conversions: dict[str, Conversion],
) -> None:
    """A new remedy that a program can follow needs a cell here, or says what a cell would need."""
    every = [*chain(*outcomes.values(), *parallel_outcomes.values()), *at_their_topology]
    followed = {
        site.name
        for outcome in every
        for site in outcome.sites
        if site.is_among(each.remedy for each in outcome.followed)
    }
    for each in conversions.values():
        followed |= {site.name for site in each.sites if site.is_among([each.remedy])}
    assert {site.name for site in sites()} - followed - REASONS.keys() == set()
    assert REASONS.keys() & followed == set(), "a cell follows it"
    assert REASONS.keys() - {site.name for site in sites()} == set(), "it is no more"


def test_a_command_runs(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export(str(saved / f"{Setup(1).name}-dp2"), str(tmp_path / "new"), include=["^nothing"])
    (remedy,) = caught.value.remedies
    command = [sys.executable, "-m", "elastic_ckpt", *remedy.command[1:]]
    assert remedy.command[0] == "elastic-ckpt"
    assert subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0


def test_a_load_at_its_topology_is_never_told_to_load_there(at_their_topology: list[Outcome]) -> None:
    for outcome in at_their_topology:
        assert outcome.refused.kinds[:1] == ("UnsupportedError",)
        assert not any(each.at_saved_topology for each in outcome.refused.remedies)
        assert [each.remedy.config for each in outcome.followed] == [{}, {"mode": "off"}]
        for followed in outcome.followed:
            assert followed.error == "" and followed.differences == {}, followed

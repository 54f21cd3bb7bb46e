"""What an error names as a way out is followed, word by word: the load completes and is right."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.tools.export import export
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel
from tests.distributed.remedy_cells import CELLS as COMMON
from tests.distributed.remedy_cells import (
    DIARY,
    EIGHT_BIT,
    MODEL,
    PLAIN,
    REASONS,
    SAVED,
    UNKNOWN,
    UNKNOWN_WHOLE,
    Change,
)
from tests.distributed.remedy_commands import REFUSALS, Followed, command_line, follow, requirements_of
from tests.distributed.remedy_jobs import Cell, Outcome
from tests.distributed.remedy_parallel_cells import CELLS as PARALLEL
from tests.distributed.remedy_parallel_cells import SAVED as SAVED_PARALLEL
from tests.distributed.remedy_parallel_cells import SAVED_FOREIGN
from tests.distributed.remedy_rare_cells import CELLS as RARE
from tests.distributed.remedy_rare_cells import CLIPPED, CPU_ADAM
from tests.distributed.remedy_sites import sites
from tests.storage.buckets import serve_bucket

CELLS = COMMON | RARE


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch(2, "save", {"folder": str(folder), "setups": [*SAVED, CPU_ADAM]})
    launch(3, "save", {"folder": str(folder), "setups": [PLAIN]})
    for model in ("UntiedLM", "BigLM"):
        launch(2, "save", {"folder": str(folder / model), "setups": [PLAIN], "model": model})
    launch(1, "save", {"folder": str(folder), "setups": [CLIPPED], "truth": False})
    launch(2, "save", {"folder": str(folder), "setups": [UNKNOWN, UNKNOWN_WHOLE, CLIPPED], "truth": False})
    launch(2, "save", {"folder": str(folder), "setups": [EIGHT_BIT], "model": "WideLM", "truth": False})
    for name in ("unknown", "bnb.AdamW8bit", "clipped"):
        for path in folder.glob(f"z?-fp32-{name}-dp?"):
            _write_weights(path)
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
        place = saved if case.model == "TinyLM" else saved / case.model
        folder = _changed(place / f"{case.saved.name}-dp{case.ranks}", case.change, tmp_path_factory)
        cells[name] = replace(case.cell, folder=folder)
    return _by_name(launch(3, "remedy_jobs.follow", cells))


@pytest.fixture(scope="module")
def parallel_saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[Parallel, Path]:
    folders = {setup: tmp_path_factory.mktemp("parallel") for setup in (*SAVED_PARALLEL, *SAVED_FOREIGN)}
    for job, setups in {"parallel_jobs": SAVED_PARALLEL, "foreign_jobs": SAVED_FOREIGN}.items():
        launch(2, f"{job}.save_each", [{"setup": setup, "folder": str(folders[setup])} for setup in setups])
    return folders


@pytest.fixture(scope="module")
def parallel_outcomes(
    launch: Launch, parallel_saved: dict[Parallel, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    """The same of tensor and pipeline parallel engines, on two ranks."""
    cells = {}
    for name, case in PARALLEL.items():
        folder = _changed(parallel_saved[case.saved], case.change, tmp_path_factory)
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


@pytest.fixture(scope="module")
def commands(
    saved: Path, parallel_saved: dict[Parallel, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Followed]:
    found = {}
    for name, refusal in REFUSALS.items():
        copy = tmp_path_factory.mktemp("commands") / "copy"
        is_parallel = isinstance(refusal.saved, Parallel)
        folder = parallel_saved[refusal.saved] if is_parallel else saved / f"{refusal.saved.name}-dp2"
        shutil.copytree(folder, copy)
        if refusal.change is not None:
            refusal.change(copy)
        found[name] = follow(refusal, copy)
    return found


@pytest.mark.parametrize("name", REFUSALS)
def test_a_remedy_of_a_command_has_it_succeed(name: str, commands: dict[str, Followed]) -> None:
    followed = commands[name]
    assert followed.result.exit_code == 0, followed.result.output
    assert followed.differences == set()


@pytest.mark.parametrize("name", CELLS)
def test_every_remedy_holds_what_it_promises(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    case = CELLS[name]
    _check(outcomes[name], case.kind, case.count, case.overwrites)


@pytest.mark.parametrize("name", PARALLEL)
def test_every_remedy_of_parallel_engines_holds_what_it_promises(
    name: str, parallel_outcomes: dict[str, list[Outcome]]
) -> None:
    _check(parallel_outcomes[name], PARALLEL[name].kind, PARALLEL[name].count)


def _check(outcomes: list[Outcome], kind: str, count: int, overwrites: bool = False) -> None:
    """One refusal of a kind on all ranks, and what each of so many remedies did."""
    for outcome in outcomes:
        assert outcome.refused.kinds[:1] == (kind,), outcome.refused.texts
        assert len(outcome.refused.texts) == 1 and bool(outcome.refused.changed) == overwrites
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
        if CELLS[name].change is None and CELLS[name].saved.optimizer == CELLS[name].cell.setup.optimizer
    }
    expected = {
        "a state of unknown layout",
        "a table of each parameter",
        "blocks that may not be requantized",
        "norms of each rank",
    }
    assert there.keys() == expected
    for outcome in launch(2, "remedy_jobs.at_saved_topology", there):
        assert outcome.refused.kinds == (), outcome.refused.texts


def test_each_way_out_is_followed_or_has_a_reason(
    outcomes: dict[str, list[Outcome]],
    parallel_outcomes: dict[str, list[Outcome]],
    at_their_topology: list[Outcome],
    commands: dict[str, Followed],
) -> None:
    """A new remedy that a program can follow needs a cell here, or says what a cell would need."""
    every = [*chain(*outcomes.values(), *parallel_outcomes.values()), *at_their_topology]
    followed = {
        site.name
        for outcome in every
        for site in outcome.sites
        if site.is_among(each.remedy for each in outcome.followed)
    }
    for each in commands.values():
        followed |= {site.name for site in each.sites if site.is_among([each.remedy])}
    assert {site.name for site in sites()} - followed - REASONS.keys() == set()
    assert REASONS.keys() & followed == set(), "a cell follows it"
    assert REASONS.keys() - {site.name for site in sites()} == set(), "it is no more"


def test_a_command_runs(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export(str(saved / f"{Setup(1).name}-dp2"), str(tmp_path / "new"), include=["^nothing"])
    (remedy,) = caught.value.remedies
    assert remedy.command[0] == "elastic-ckpt"
    assert command_line(remedy.command[1:]).returncode == 0


def test_a_missing_package_is_one_of_the_extra_that_the_error_names(saved: Path, tmp_path: Path) -> None:
    folder, config = saved / f"{PLAIN.name}-dp2", tmp_path / "ds.json"
    with serve_bucket() as bucket:
        bucket.put(folder, "run")
        config.write_text(json.dumps({"elastic_checkpoint": {"storage_options": bucket.options}}))
        cases = {
            "matplotlib": ["plan", str(folder), "--plot", str(tmp_path / "plan.svg")],
            "obstore": ["inspect", "s3://bucket/run", "--config", str(config)],
        }
        for package, words in cases.items():
            refused = command_line([*words, "--json"], without=package)
            (remedy,) = json.loads(refused.stdout)["remedies"]
            assert refused.returncode == 2, refused
            assert package in requirements_of(shlex.join(remedy["command"]))
            assert command_line(words).returncode == 0, "with the package"


def test_a_load_at_its_topology_is_never_told_to_load_there(at_their_topology: list[Outcome]) -> None:
    for outcome in at_their_topology:
        assert outcome.refused.kinds[:1] == ("UnsupportedError",)
        assert not any(each.at_saved_topology for each in outcome.refused.remedies)
        assert [each.remedy.config for each in outcome.followed] == [{}, {"mode": "off"}]
        for followed in outcome.followed:
            assert followed.error == "" and followed.differences == {}, followed

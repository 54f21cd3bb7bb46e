"""Checkpoints that no node sees whole: saved by DeepSpeed to disks of nodes, resumed on others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.damage import flip_bit
from tests.distributed.facts import Loaded, Refused
from tests.distributed.model import Setup

SETUPS = [Setup(0), Setup(1), Setup(2, precision="bf16"), Setup(3), Setup(3, precision="bf16")]
TWO_BY_TWO = ["a", "a", "b", "b"]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved on two nodes of two ranks each, at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("nodes")
    launch(4, "node_jobs.save_on_nodes", {"folder": str(folder), "setups": SETUPS, "nodes": TWO_BY_TWO, "older": True})
    return folder


def cases(folder: Path, nodes: list[str], **more: Any) -> list[dict[str, Any]]:
    return [{"folder": str(folder / setup.name), "setup": setup, "nodes": nodes, **more} for setup in SETUPS]


def assert_exact(found: list[Loaded], count: int) -> None:
    assert len(found) == count
    for each in found:
        assert each.differences == {} and each.loss_gap < (5e-3 if "bf16" in each.where else 1e-5), each.where


def test_no_node_sees_the_whole_checkpoint(saved: Path) -> None:
    for setup in SETUPS[1:]:
        names = [{path.name for path in (saved / setup.name / node / "run" / "step4").glob("*optim*")} for node in "ab"]
        assert names[0] and names[1] and not names[0] & names[1]


@pytest.mark.parametrize("nodes", [["b", "a", "b", "a"], ["a", "b", "b"], ["b", "a"]], ids="-".join)
def test_ranks_resume_on_any_of_the_nodes(saved: Path, launch: Launch, nodes: list[str]) -> None:
    found = launch(len(nodes), "node_jobs.load_on_nodes", cases(saved, nodes))
    assert_exact(found, len(nodes) * len(SETUPS))
    for each in found:
        if each.case["setup"].stage:  # else each node has all, of which DeepSpeed's own loader takes its node's
            assert " on 2 nodes, of which " in each.text, each.where


FOUR = ["a", "b", "c", "d"]
MEMORY = [Setup(1), Setup(2, precision="bf16"), Setup(3)]


@pytest.fixture(scope="module")
def replicated(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved on four nodes of one rank each; each node has the next one's files, too."""
    folder = tmp_path_factory.mktemp("memory")
    launch(4, "node_jobs.save_on_nodes", {"folder": str(folder), "setups": MEMORY, "nodes": FOUR, "replicas": 1})
    return folder


@pytest.fixture
def memory(replicated: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(replicated, tmp_path / "memory")


def elsewhere(folder: Path, nodes: list[str], **more: Any) -> list[dict[str, Any]]:
    """Each checkpoint at another stage."""
    pairs = zip(MEMORY, MEMORY[1:] + MEMORY[:1], strict=True)
    moved = [(one, Setup(other.stage, one.precision)) for one, other in pairs]
    return [{"folder": str(folder / one.name), "setup": other, "nodes": nodes, **more} for one, other in moved]


@pytest.mark.parametrize("lost", FOUR)
def test_a_job_goes_on_from_memory_without_a_node(memory: Path, launch: Launch, lost: str) -> None:
    for setup in MEMORY:
        shutil.rmtree(memory / setup.name / lost)
    left = [node for node in FOUR if node != lost]
    assert_exact(launch(3, "node_jobs.load_on_nodes", elsewhere(memory, left)), 3 * len(MEMORY))


def test_two_neighbours_lost_are_refused_by_name(memory: Path, launch: Launch) -> None:
    for setup in MEMORY:
        for node in "bc":
            shutil.rmtree(memory / setup.name / node)
    found: list[Refused] = launch(2, "node_jobs.refuse_on_nodes", elsewhere(memory, ["a", "d"]))
    for each in found:
        assert len(each.texts) == 1 and each.changed == frozenset(), each
        (text,) = each.texts
        assert "zero_pp_rank_2_mp_rank_00" in text and "files on all nodes: " in text and "(rank 0) has " in text, text


def test_a_copy_with_a_flipped_bit_is_left_out(memory: Path, launch: Launch) -> None:
    for setup in MEMORY:
        name = f"{'bf16_' if setup.precision == 'bf16' else ''}zero_pp_rank_1_mp_rank_00_optim_states.pt"
        run = memory / setup.name / "b" / "run"
        written = (run / "step4" / name).stat().st_mtime_ns
        for tenth in range(10):  # ranks on other nodes may read another copy
            flip_bit(name, "fp32", tenth / 10)(run)
        os.utime(run / "step4" / name, ns=(written, written))  # as memory that has lost bits leaves it
    found = launch(3, "node_jobs.load_on_nodes", elsewhere(memory, ["b", "d", "a"]))
    assert_exact(found, 3 * len(MEMORY))
    for each in found:
        assert "was damaged in another copy" in each.text

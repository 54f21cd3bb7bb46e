"""Checkpoints on disks of nodes that share nothing but a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.damage import flip_bit
from tests.distributed.facts import Loaded, Refused
from tests.distributed.model import Setup
from tests.distributed.namespaces import Cluster

SETUPS = [Setup(1), Setup(3, precision="bf16"), Setup(3)]
TWO_BY_TWO = [0, 0, 1, 1]
Make = Callable[[int], Cluster]


@pytest.fixture(scope="module")
def make(extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """``make(count)``: a cluster of so many nodes, which ends with the module's tests."""
    made: list[Cluster] = []

    def cluster(count: int) -> Cluster:
        made.append(Cluster(count, tmp_path_factory.mktemp("cluster"), extensions_dir))
        return made[-1]

    yield cluster
    while made:
        made.pop().close()


def spread_truth(cluster: Cluster, saver: int, nodes: list[int]) -> None:
    """Tell the ranks of all nodes what to compare with, which those of no job can know of each other."""
    for path in cluster.files(saver).glob("*/truth.pt"):
        for node in nodes:
            folder = cluster.files(node) / path.parent.name
            folder.mkdir(exist_ok=True)
            if node != saver:
                shutil.copy(path, folder)


def cases(cluster: Cluster, setups: list[Setup], kind: str = "", **more: Any) -> list[dict[str, Any]]:
    return [{"folder": str(cluster.disk / (setup.name + kind)), "setup": setup, **more} for setup in setups]


def assert_exact(found: list[Loaded], count: int) -> None:
    assert len(found) == count
    for each in found:
        assert each.differences == {} and each.loss_gap < (5e-3 if "bf16" in each.where else 1e-5), each.where


def assert_refused(found: list[Refused], count: int, *words: str) -> None:
    """All ranks raise one error with these words, and leave the engine as it was."""
    assert len(found) == count
    for each in found:
        assert len(each.texts) == 1 and each.changed == frozenset(), (each.texts, each.lines)
        (text,) = each.texts
        assert "ElasticCkptError" in each.kinds and all(word in text for word in words), text


@pytest.fixture(scope="module")
def pair(make: Make) -> Cluster:
    """Three nodes, of which two have saved with two ranks each, and one has nothing."""
    cluster = make(3)
    arguments = {"folder": str(cluster.disk), "setups": SETUPS, "older": True}
    cluster.run(TWO_BY_TWO, "node_jobs.save_on_nodes", arguments, "eth0")
    spread_truth(cluster, 0, [0, 1, 2])
    return cluster


def test_each_node_has_its_own_files(pair: Cluster) -> None:
    for setup in SETUPS:
        runs = [pair.files(node) / setup.name / "run" for node in range(3)]
        names = [{path.name for path in run.glob("step4/*optim*")} for run in runs]
        assert len(names[0]) == len(names[1]) == 2 and not names[0] & names[1] and not names[2]
        assert [(run / "latest").exists() for run in runs] == [True, False, False]


@pytest.mark.parametrize(("nodes", "interface"), [([1, 1, 0, 0], ""), ([0, 1, 2], "eth0"), ([2, 1, 0, 2], "")])
def test_ranks_resume_on_other_nodes(pair: Cluster, nodes: list[int], interface: str) -> None:
    found = pair.run(nodes, "node_jobs.load_on_nodes", cases(pair, SETUPS), interface)
    assert_exact(found, len(nodes) * len(SETUPS))


def copied(cluster: Cluster, setup: Setup, kind: str) -> list[Path]:
    """A copy of a checkpoint on each of the first two nodes, to be changed; its runs."""
    for node in range(2):
        disk = cluster.files(node)
        shutil.copytree(disk / setup.name, disk / (setup.name + kind))
    return [cluster.files(node) / (setup.name + kind) / "run" for node in range(2)]


def test_the_latest_file_that_was_written_last_counts(pair: Cluster) -> None:
    for setup in SETUPS:
        first, second = copied(pair, setup, "-latest")
        shutil.move(first / "latest", second)
        (first / "latest").write_text("step2")
        os.utime(first / "latest", (1, 1))
    found = pair.run([0, 1], "node_jobs.load_on_nodes", cases(pair, SETUPS, "-latest"), "eth0")
    assert_exact(found, 2 * len(SETUPS))
    for each in found:
        assert "latest differs between nodes: the newest was taken, 5 bytes" in each.text, each.text


def test_a_file_in_two_versions_is_refused_with_the_names_of_both_nodes(pair: Cluster) -> None:
    for setup in SETUPS:
        first, second = copied(pair, setup, "-versions")
        (path,) = second.glob("step2/*zero_pp_rank_2_mp_rank_00_optim_states.pt")
        shutil.copy(path, first / "step4")  # as a rank left it that was on this node once
    found = pair.run([1, 0], "node_jobs.refuse_on_nodes", cases(pair, SETUPS, "-versions"))
    assert_refused(found, 2 * len(SETUPS), "zero_pp_rank_2_mp_rank_00_optim", "node0 (rank 1)", "node1 (rank 0)")


def test_without_a_node_its_files_are_named(pair: Cluster) -> None:
    """The last test of this cluster, which has one node less from then on."""
    pair.lose(1)
    found = pair.run([0, 0, 0], "node_jobs.refuse_on_nodes", cases(pair, SETUPS))
    assert_refused(found, 3 * len(SETUPS), "zero_pp_rank_2_mp_rank_00", "missing")

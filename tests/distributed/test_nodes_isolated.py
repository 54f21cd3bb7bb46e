"""Checkpoints on disks of nodes that share nothing but a network.

Each node is a network namespace with a disk of its own, which outlives jobs and may be lost with its ranks. The runner of
cells gives all ranks one folder, so these are none.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.expert_jobs import Experts
from tests.distributed.facts import Loaded, Refused
from tests.distributed.model import Setup
from tests.distributed.namespaces import Cluster
from tests.distributed.node_jobs import BULK_ROWS, LOCAL, Measured, Survivor
from tests.distributed.parallel_models import Parallel

SETUPS = [Setup(1), Setup(3, precision="bf16"), Setup(3)]
TWO_BY_TWO = [0, 0, 1, 1]
#: Of a load of any size: metadata, agreement, and the small parameters that ZeRO-3 gathers.
OTHER_NBYTES = 1 << 20
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


@pytest.mark.parametrize(("nodes", "interface"), [([1, 1, 0, 0], ""), ([2, 1, 0], "eth0")])
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
        assert "copies of latest differ: the newest was taken, 5 bytes" in each.text, each.text


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


def test_a_job_goes_on_from_memory_alone_without_one_of_four_nodes(make: Make) -> None:
    cluster = make(4)
    setups = [Setup(1), Setup(2, precision="bf16"), Setup(3)]
    arguments = {"folder": str(cluster.disk), "setups": setups, "replicas": 1}
    cluster.run([0, 1, 2, 3], "node_jobs.save_on_nodes", arguments)
    spread_truth(cluster, 0, [0, 1, 3])
    cluster.lose(2)
    moved = [
        {**case, "setup": replace(case["setup"], stage=case["setup"].stage % 3 + 1)} for case in cases(cluster, setups)
    ]
    assert_exact(cluster.run([3, 0, 1], "node_jobs.load_on_nodes", moved, "eth0"), 3 * len(setups))
    assert not list(cluster.disk.iterdir())  # where this process and all nodes would share it


LOST = [(signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0)]
#: Seconds after which collectives give up on a rank that was stopped. One that was killed closes its connections.
LIMIT_SECONDS = {signal.SIGSTOP: 8, signal.SIGKILL: 3600}


@pytest.fixture(scope="module")
def bulk(make: Make) -> Cluster:
    """Three nodes, of which each has saved with one rank."""
    cluster = make(3)
    arguments = {"folder": str(cluster.disk), "setups": [Setup(2)], "model": "BigLM"}
    cluster.run([0, 1, 2], "node_jobs.save_on_nodes", arguments)
    return cluster


@pytest.mark.nightly
@pytest.mark.parametrize(("what", "lost"), LOST)
def test_others_hear_of_a_holder_that_is_lost_in_a_transfer(
    bulk: Cluster, tmp_path: Path, what: signal.Signals, lost: int
) -> None:
    (case,) = cases(bulk, [Setup(2)], signal=what, lost=lost, apart=str(tmp_path), limit=LIMIT_SECONDS[what])
    case["linger"] = what != signal.SIGSTOP or lost  # rank 0 has the store by which ranks hear of failures, too
    nodes, job = [1, 2, 0], "tests.distributed.node_jobs:lose_a_holder"
    found: list[Survivor] = bulk.run(nodes, job, case, "eth0", killed=lost, timeout=40)
    print(found)
    for each in found:
        assert "PartialLoadError" in each.kinds and "start the job again" in each.text, each
    named = [bulk.addresses[nodes[lost]] in each.text for each in found]
    if lost:
        assert len({each.text for each in found}) == 1, found
    if what == signal.SIGKILL:  # without the store, one may hear just that another one has ended, which says why
        assert all(named) if lost else any(named), found


@pytest.fixture(scope="module")
def measured(make: Make) -> tuple[Cluster, list[Measured]]:
    """A bulky model, saved by two nodes of three, and what their ranks saved."""
    cluster = make(3)
    return cluster, cluster.run([0, 1], "node_jobs.measure", measured_case(cluster, loads=False), "eth0")


def measured_case(cluster: Cluster, loads: bool) -> dict[str, Any]:
    return {"folder": str(cluster.disk / "bulky"), "setup": Setup(3), "loads": loads}


@pytest.mark.parametrize(("nodes", "lacked"), [([1, 0], [1, 1]), ([0, 1, 2], [0, 1 / 2, 1])], ids=["moved", "empty"])
def test_what_a_rank_lacks_comes_once_and_straight_into_its_partition(
    measured: tuple[Cluster, list[Measured]], nodes: list[int], lacked: list[float]
) -> None:
    cluster, saved = measured
    found: list[Measured] = cluster.run(nodes, "node_jobs.measure", measured_case(cluster, loads=True), "eth0")
    for each, part in zip(found, lacked, strict=True):
        owned_nbytes = 12 * BULK_ROWS**2 // len(nodes)
        print(f"{each.received / owned_nbytes:.4f} of what it owns, {each.growth >> 20} MiB, {each.seconds:.2f} s")
        assert part * owned_nbytes <= each.received < 1.02 * part * owned_nbytes + OTHER_NBYTES, each
        assert each.growth < 64 << 20, each
    if len(nodes) == len(saved):
        assert [each.digests for each in found] == [each.digests for each in saved]


PARALLEL = [Parallel("3d", "uniform", tp=2, pp=2, stage=1), Parallel("3d", "uniform", tp=2, stage=1)]
EXPERTS = [Experts(4, 1, 2), Experts(4, 2, 4)]


def test_tensor_and_pipeline_parallel_ranks_resume_on_other_nodes(make: Make) -> None:
    """One rank on each node: DeepSpeed saves model states on the first rank of a node alone, whichever shard it has."""
    cluster, config = make(4), dict(LOCAL)
    arguments = {"folder": str(cluster.disk), "setups": PARALLEL, "config": config}
    cluster.run([0, 1, 2, 3], "parallel_jobs.save", arguments, "eth0")
    spread_truth(cluster, 0, [0, 1, 2, 3])
    sources = [{"folder": str(cluster.disk / path.parent.name)} for path in cluster.files(0).glob("*/truth.pt")]
    targets = [replace(PARALLEL[0], tp=1), replace(PARALLEL[1], tp=4)]
    cells = [{"setup": target, "sources": sources, "config": config} for target in targets]
    assert_exact(cluster.run([3, 1, 2, 0], "parallel_jobs.load", cells), 4 * len(targets) * len(PARALLEL))


def test_experts_resume_on_other_nodes(make: Make) -> None:
    cluster = make(2)
    arguments = {"folder": str(cluster.disk), "config": dict(LOCAL)}
    cluster.run(TWO_BY_TWO, "expert_jobs.save", {**arguments, "runs": EXPERTS}, "eth0")
    spread_truth(cluster, 0, [0, 1])
    arguments |= {"runs": EXPERTS[::-1], "sources": EXPERTS}
    assert_exact(cluster.run([1, 1, 0, 0], "expert_jobs.load", arguments), 4 * len(EXPERTS) ** 2)

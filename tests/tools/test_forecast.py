"""Forecasts: reads against the reader's own batching, memory against bytes a parameter, nodes and seconds."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, RequantizeItem, Slot
from elastic_ckpt.io import coalesce
from elastic_ckpt.io.coalesce import ReadOptions, read_sizes, sort_reads
from elastic_ckpt.io.reader import execute
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from elastic_ckpt.tools.virtual.forecast import (
    Cluster,
    LiveRun,
    Memory,
    RankForecast,
    Reads,
    bytes_by_file,
    forecast_rank,
    memory_of,
    nodes_of,
    reading_time,
    reads_of,
    spread,
    survey,
)
from tests.simulation import saved
from tests.tools.test_scale import catalog_of
from tests.tools.test_virtual import RULES, sharded

# --- reads ------------------------------------------------------------------------------------------------------------


#: In place of the kernel's limit, which takes thousands of rows to reach.
FEW_BUFFERS = 6


@st.composite
def copies(draw: st.DrawFn) -> list[ReadItem]:
    """Copies into one slot of floats, often neighbours in the file, some of them strided, some of another dtype."""
    found: list[ReadItem] = []
    file, offset = 0, 0
    for _ in range(draw(st.integers(1, 8))):
        gap = draw(st.sampled_from([0, 0, 0, 4, 8]))
        if draw(st.integers(0, 9)) == 0:
            file, offset = file + 1, 0
        numel = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]))
        rows = draw(st.sampled_from([1, 1, 2, 3, 7, FEW_BUFFERS, 2 * FEW_BUFFERS + 1])) if numel else 1
        dtype = draw(st.sampled_from(["float32", "float32", "float32", "bfloat16"]))
        between = draw(st.sampled_from([0, 0, 1, 3]))
        stride = numel + between if rows > 1 else 0
        copy = ReadItem(file, offset + gap, 0, 0, numel, dtype, rows, stride, stride)
        found.append(copy)
        offset = copy.byte_offset + ((rows - 1) * stride + numel) * ITEMSIZE[dtype]
    return found


@settings(deadline=None, max_examples=150)
@given(
    copies(),
    st.sampled_from([4, 8, 12, 20, 64, 100, 4096, 1 << 24]),
    st.sampled_from([16, 64, 1 << 20]),
    st.sampled_from([0, 0, 4, 8, 12, 4096]),
)
def test_reads_are_those_of_the_reader(
    held: list[ReadItem], chunk_nbytes: int, staging_nbytes: int, gap_nbytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesce, "MAX_BUFFERS", FEW_BUFFERS)
        compare_with_reader(held, ReadOptions(2, chunk_nbytes, staging_nbytes, gap_nbytes=gap_nbytes))


def compare_with_reader(held: list[ReadItem], options: ReadOptions) -> None:
    numel = max(2, *((copy.rows - 1) * copy.slot_stride + copy.numel for copy in held))
    plan = ReadPlan((), (Slot("fp32", 0, "", numel, "float32"),), tuple(held))
    direct, staged = sort_reads(plan, [torch.zeros(numel)], options)
    expected = Counter(read[2] for read in direct if read[2]) + by_row(staged)
    found = read_sizes(plan, options, on_accelerator=False)
    assert all(count > 0 for count in found.values())
    assert found == expected
    # what preadv cannot write into: every row by itself
    staged = sort_reads(plan, [torch.zeros(2 * numel)[::2]], options)[1]
    assert read_sizes(plan, options, on_accelerator=True) == by_row(staged)


def by_row(staged: list[ReadItem]) -> Counter[int]:
    return +sum((Counter({item.nbytes // item.rows: item.rows}) for item in staged), Counter())


def test_means_are_read_in_chunks(tmp_path: Path) -> None:
    """Of a mean of two copies, both are read: 5,000 elements of bfloat16 each, in as many chunks as the reader's."""
    path = tmp_path / "file"
    path.write_bytes(torch.ones(12_000, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    pieces = tuple(ReadItem(0, start * 2, 0, 0, 5_000, "bfloat16") for start in (100, 6_000))
    slots = (Slot("fp32", 0, "", 5_000, "float32"),)
    recode = RequantizeItem(0, 0, 5_000, None, -1, 0, pieces, 0.5)
    plan = ReadPlan((SourceFile(str(path), 24_000),), slots, (), (recode,))
    options = ReadOptions(threads=2, staging_nbytes=2 * 48 * 1_500)
    stats = execute(plan, [torch.zeros(5_000)], options, show_progress=False)
    sizes = read_sizes(plan, options, on_accelerator=False)
    assert (sum(n * c for n, c in sizes.items()), sizes.total()) == (stats.nbytes, stats.calls) == (20_000, 4)
    assert bytes_by_file(plan) == {0: 20_000}


def test_of_what_ranks_read_together_each_receives_the_rest() -> None:
    job = VirtualJob(saved({"a": (6,), "b": (10,)}, states=("exp_avg",)), Topology(dp=2, zero_stage=0), LoadOptions())
    found = []
    for rank in range(2):
        local_state, plan = job.planned(rank)
        reads = reads_of(local_state, plan, ReadOptions(), on_accelerator=False)
        assert sum(bytes_by_file(plan.reads).values()) == reads.nbytes
        found.append((reads.nbytes, reads.nbytes_received))
    total = 4 * 2 * 16
    assert [a + b for a, b in found] == [total, total]
    assert sum(a for a, _ in found) == total


def test_copies_that_are_compared_are_counted_apart() -> None:
    job = VirtualJob(sharded(2), Topology(tp=1), LoadOptions(rules=RULES))
    local_state, plan = job.planned(0)
    reads = reads_of(local_state, plan, ReadOptions(), on_accelerator=False)
    # masters and two moments: of the norm two copies of 4 elements, and one is read
    assert reads.nbytes_compared == 3 * 2 * 4 * 4
    assert reads.nbytes == 3 * 4 * (20 * 4 + 16 * 4 + 4 * 16 + 4)
    assert reads.files == 2


# --- memory -----------------------------------------------------------------------------------------------------------

N = 1 << 12
BYTES = {"weights": 2, "gradients": 4, "masters": 4, "states": 8}


@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize(
    ("stage", "divided"),
    [(0, ()), (1, ("masters", "states")), (2, ("masters", "states", "gradients")), (3, tuple(BYTES))],
)
def test_18_bytes_for_each_parameter_before_zero_divides_them(stage: int, divided: tuple[str, ...], dp: int) -> None:
    metadata = saved({"a": (N // 2,), "b": (N // 4, 2)})
    job = VirtualJob(metadata, Topology(dp=dp, zero_stage=stage), LoadOptions())
    for rank in range(dp):
        memory = memory_of(*job.planned(rank), LiveRun())
        expected = {what: size * N // (dp if what in divided else 1) for what, size in BYTES.items()}
        found = {what: getattr(memory, what) for what in ("weights", "gradients", "masters")}
        assert found | {"states": sum(nbytes for *_, nbytes in memory.states)} == expected
        assert memory.states == (
            ("exp_avg", "float32", expected["states"] // 2),
            ("exp_avg_sq", "float32", expected["states"] // 2),
        )
        assert (memory.device, memory.host) == (sum(expected.values()), 0)
        moved = memory_of(*job.planned(rank), LiveRun(offload=True))
        assert moved.host == expected["masters"] + expected["states"]
        assert moved.device == expected["weights"] + expected["gradients"]


def test_precision_decides_about_weights_and_gradients() -> None:
    metadata = saved({"a": (N,)}, wholes={("mask", BUFFER): ((10,), "int64")})
    found = {}
    for stage, weights, gradients in (
        (0, "float32", "float32"),
        (0, "bfloat16", "bfloat16"),
        (1, "float32", "float16"),
    ):
        job = VirtualJob(metadata, Topology(zero_stage=stage), LoadOptions())
        memory = memory_of(*job.planned(0), LiveRun(weights, gradients))
        assert memory.others == 80
        found[stage, weights] = (memory.weights, memory.gradients)
    # without ZeRO, an fp32 optimizer steps on the weights themselves
    assert found == {(0, "float32"): (0, 4 * N), (0, "bfloat16"): (2 * N, 2 * N), (1, "float32"): (4 * N, 2 * N)}


def test_tensor_and_pipeline_parallelism_divide_the_weights() -> None:
    metadata = catalog_of("bloom-176b")
    job = VirtualJob(metadata, Topology(dp=8, tp=4, pp=12), LoadOptions.of(ElasticConfig(tp_preset="bloom")))
    memory = memory_of(*job.planned(100), LiveRun())
    h = 14336  # stage 3 has six layers: of each 12 h^2 and 7 h of the 13 h are cut over four ranks
    numel = 6 * (12 * h * h + 7 * h) // 4 + 6 * 6 * h
    assert (memory.weights, memory.gradients) == (2 * numel, 4 * numel)
    assert abs(memory.masters - 4 * numel / 8) < 64


# --- nodes and seconds ------------------------------------------------------------------------------------------------


def rank_forecast(rank: int, nbytes: int, compared: int = 0) -> RankForecast:
    return RankForecast(rank, Reads(nbytes, 1, nbytes, nbytes, 1, compared, 0), Memory(0, (), 0, 0, 0, False), {})


def test_the_slowest_node_counts() -> None:
    cluster = Cluster(ranks=7, nodes=3, bandwidth=50.0)
    ranks = [rank_forecast(rank, nbytes) for rank, nbytes in enumerate([10, 10, 10, 40, 40, 0, 70])]
    ranks[4] = rank_forecast(4, 40, compared=5)
    assert cluster.ranks_per_node == 3
    assert [cluster.ranks_of(node) for node in range(4)] == [3, 3, 1, 0]
    assert [(node.node, node.ranks, node.nbytes, node.is_complete) for node in nodes_of(ranks, cluster)] == [
        (0, 3, 30, True),
        (1, 3, 85, True),
        (2, 1, 70, True),
    ]
    time = reading_time(ranks, cluster)  # the rank that reads most is not on the node that reads most
    assert (time.node_nbytes, time.reading, time.is_estimate) == (85, 1.7, False)


def test_of_a_few_ranks_the_rest_is_estimated() -> None:
    cluster = Cluster(ranks=8, nodes=2, bandwidth=1.0)
    alone = reading_time([rank_forecast(5, 30)], cluster)
    assert (alone.node_nbytes, alone.is_estimate) == (4 * 30, True)
    node = reading_time([rank_forecast(rank, 10 * rank) for rank in range(4)], cluster)
    assert (node.node_nbytes, node.is_estimate) == (60, True)


def test_of_a_big_job_some_nodes_are_planned() -> None:
    assert Cluster(64, 8).some_ranks() == list(range(64))
    found = Cluster(384, 48).some_ranks()
    assert len(found) == 64
    assert found[:8] == list(range(8)) and found[-8:] == list(range(376, 384))
    assert Counter(rank // 8 for rank in found).most_common()[-1][1] == 8
    assert Cluster(300, 2).some_ranks() == list(range(300))  # the first node and the last
    assert Cluster(1000, 1).some_ranks() == list(range(1000))
    assert Cluster(100, 30).some_ranks()[-1] == 99


def test_a_survey_is_of_the_ranks_that_were_asked_for() -> None:
    job = VirtualJob(saved({"a": (40,), "b": (7,)}), Topology(dp=4), LoadOptions())
    cluster = Cluster(4, 2, 100.0)
    found = survey(job, range(4), cluster, LiveRun())
    assert [each.rank for each in found.ranks] == [0, 1, 2, 3]
    assert sum(each.reads.nbytes for each in found.ranks) == 3 * 4 * 47
    time, nodes = reading_time(found.ranks, cluster), nodes_of(found.ranks, cluster)
    assert time.node_nbytes == max(node.nbytes for node in nodes)
    part = survey(job, [2], cluster, LiveRun())
    assert part.ranks == (found.ranks[2],)
    assert part.last[0].model.coordinates.dp_rank == 2
    with pytest.raises(ValueError, match="no ranks"):
        survey(job, [], cluster, LiveRun())
    assert spread([3, 1, 8]) == {"least": 1, "mean": 4.0, "most": 8, "total": 12}


def test_forecasts_are_plain_data() -> None:
    job = VirtualJob(saved({"a": (40,)}), Topology(dp=2), LoadOptions())
    local_state, plan = job.planned(1)
    for offload, staged in ((False, True), (True, False)):
        each = forecast_rank(1, local_state, plan, LiveRun(offload=offload))
        assert each.memory.offloaded == offload
        assert json.loads(json.dumps(dataclasses.asdict(each)))["reads"]["nbytes"] == 3 * 4 * 20
        assert each.reads.calls == len(plan.reads.items) if staged else each.reads.calls <= len(plan.reads.items)

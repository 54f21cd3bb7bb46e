"""Forecasts: reads against the reader's own batching, memory against bytes a parameter, nodes and seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, RequantizeItem, TargetTensor
from elastic_ckpt.io.coalesce import ReadOptions, reads_into, sort_reads, staged_reads
from elastic_ckpt.io.reader import execute
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.virtual import Topology, VirtualJob, bytes_by_file, forecast
from tests.simulation import saved
from tests.tools.sharded_models import RULES, sharded

# --- reads ------------------------------------------------------------------------------------------------------------


@st.composite
def copies(draw: st.DrawFn) -> list[ReadItem]:
    """Copies into one target of floats, often neighbours in the file, some of them strided, some of another dtype."""
    found: list[ReadItem] = []
    file, offset = 0, 0
    for _ in range(draw(st.integers(1, 8))):
        gap = draw(st.sampled_from([0, 0, 0, 4, 8]))
        if draw(st.integers(0, 9)) == 0:
            file, offset = file + 1, 0
        numel = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]))
        rows = draw(st.sampled_from([1, 1, 2, 3, 7, 13])) if numel else 1
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
    st.sampled_from([0, 0, 4, 8, 100]),
)
def test_reads_are_those_of_the_reader(
    held: list[ReadItem], chunk_nbytes: int, staging_nbytes: int, gap_nbytes: int
) -> None:
    numel = max(2, *((copy.rows - 1) * copy.target_stride + copy.numel for copy in held))
    plan = ReadPlan((), (TargetTensor("fp32", 0, "", numel, "float32"),), tuple(held))
    options = ReadOptions(2, chunk_nbytes, staging_nbytes, gap_nbytes=gap_nbytes)
    direct, staged = sort_reads(plan, [torch.zeros(2 * numel)[::2]], options)  # which preadv cannot write into
    assert not direct
    reads = [read for batch in staged for read in reads_into(memoryview(bytearray(batch.nbytes)), batch, options)]
    assert staged_reads(plan, options) == (sum(nbytes for _, _, nbytes, _ in reads), len(reads))
    if gap_nbytes == 0:
        assert staged_reads(plan, options)[0] == sum(item.nbytes for item in held)


def test_means_are_read_in_chunks(tmp_path: Path) -> None:
    """Of a mean of two copies, both are read: 5,000 elements of bfloat16 each, in four chunks, and a read for each."""
    path = tmp_path / "file"
    path.write_bytes(torch.ones(12_000, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    pieces = tuple(ReadItem(0, start * 2, 0, 0, 5_000, "bfloat16") for start in (100, 6_000))
    targets = (TargetTensor("fp32", 0, "", 5_000, "float32"),)
    recode = RequantizeItem(0, 0, 5_000, None, -1, 0, pieces, 0.5)
    plan = ReadPlan((SourceFile(str(path), 24_000),), targets, (), (recode,))
    options = ReadOptions(threads=2, staging_nbytes=2 * 48 * 1_500)
    stats = execute(plan, [torch.zeros(5_000)], options)
    assert staged_reads(plan, options) == (stats.nbytes, stats.calls) == (20_000, 8)
    assert bytes_by_file(plan) == {0: 20_000}


def test_of_what_ranks_read_together_each_receives_the_rest() -> None:
    job = VirtualJob(saved({"a": (6,), "b": (10,)}, states=("exp_avg",)), Topology(dp=2, zero_stage=0), LoadOptions())
    found = []
    for rank in range(2):
        local_state, plan = job.planned(rank)
        reads = forecast(local_state, plan, ReadOptions())
        assert sum(reads["files"].values()) == reads["nbytes_read"]
        found.append((reads["nbytes_read"], reads["nbytes_received"]))
    total = 4 * 2 * 16
    assert [a + b for a, b in found] == [total, total]
    assert sum(a for a, _ in found) == total


def test_copies_that_are_compared_are_counted_apart() -> None:
    job = VirtualJob(sharded(2), Topology(tp=1), LoadOptions(rules=RULES))
    local_state, plan = job.planned(0)
    reads = forecast(local_state, plan, ReadOptions())
    # masters and two moments: of the norm two copies of 4 elements, and one is read
    assert reads["nbytes_compared"] == 3 * 2 * 4 * 4
    assert reads["nbytes_read"] == 3 * 4 * (20 * 4 + 16 * 4 + 4 * 16 + 4)
    assert len(bytes_by_file(plan.reads)) == 2


@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_and_states_fill_12_bytes_for_each_parameter_before_zero_divides_them(stage: int, dp: int) -> None:
    metadata = saved({"a": (1000,), "b": (56, 9)}, wholes={("mask", BUFFER): ((10,), "int64")})
    job = VirtualJob(metadata, Topology(dp=dp, zero_stage=stage), LoadOptions())
    numel, tensors = 1504 // (dp if stage else 1), 1 if stage else 2
    for rank in range(dp):
        found = forecast(*job.planned(rank), ReadOptions())
        states = [(key, "float32", tensors, numel, 0) for key in ("fp32", "exp_avg", "exp_avg_sq")]
        filled = {tuple(each.values()) for each in found["filled"]}
        assert filled == {*states, (BUFFER, "int64", 1, 10, 0)}
        assert found["memory"] == 12 * numel + 80

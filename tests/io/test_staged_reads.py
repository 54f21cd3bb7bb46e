"""Reads that pass through staging buffers: any plan against a naive reader, and every call of ``preadv`` counted."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.config import ElasticConfig, Reading
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, RequantizeItem, TargetTensor
from elastic_ckpt.io import reader
from elastic_ckpt.io.coalesce import MAX_BUFFERS, ReadOptions, read_options, staged_batches, staged_reads
from elastic_ckpt.io.reader import ReadSums, execute
from elastic_ckpt.io.staging import ReadStats, StagingBuffers
from tests.io.late_buffers import LateBuffers, needs_accelerator
from tests.reading import UNTOUCHED, plan_of, run, untouched, write

FILE_DTYPES = ["uint8", "int16", "bfloat16", "float32", "int64", "complex128"]


@dataclass(frozen=True)
class Case:
    """Items whose targets are of another dtype, and what is in their files."""

    items: list[ReadItem]
    files: list[bytearray]
    numels: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Items one behind the other in two files, at odd offsets and distances, some of them read twice; two targets."""
    items, files, numels = [], [bytearray(), bytearray()], [1, 1]
    for _ in range(draw(st.integers(1, 12))):
        dtype, numel, rows = draw(st.sampled_from(FILE_DTYPES)), draw(st.integers(1, 20)), draw(st.integers(1, 6))
        strides = [numel + draw(st.sampled_from([0, 0, 1, 5])) if rows > 1 else 0 for _ in range(2)]
        file, target = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        raw = files[file]
        raw += b"\xee" * draw(st.sampled_from([0, 0, 1, 2, 8, 30]))
        place = file, len(raw), target, numels[target] + draw(st.integers(0, 2))
        items.append(ReadItem(*place, numel, dtype, rows, *strides))
        for row in range(rows):
            values = torch.arange(row, row + numel).to(getattr(torch, dtype))
            raw += b"\xee" * ((strides[0] - numel) * ITEMSIZE[dtype] if row else 0)
            raw += values.view(torch.uint8).numpy().tobytes()
        numels[target] = items[-1].target_stop
        if draw(st.integers(0, 4)) == 0:
            items.append(replace(items[-1], target=1 - target, target_offset=numels[1 - target]))
            numels[1 - target] = items[-1].target_stop
    return Case(items, files, [numel + 1 for numel in numels])


def read_naively(case: Case, target: int) -> torch.Tensor:
    expected = torch.full((case.numels[target],), UNTOUCHED, dtype=torch.complex64)
    for item in case.items:
        for row in range(item.rows if item.target == target else 0):
            dtype, start = getattr(torch, item.dtype), item.target_offset + row * item.target_stride
            offset = item.byte_offset + row * item.file_stride * dtype.itemsize
            raw = case.files[item.file][offset : offset + item.numel * dtype.itemsize]  # a copy, which is aligned
            values = torch.frombuffer(raw, dtype=dtype)
            expected[start : start + item.numel] = values.to(torch.complex64)
    return expected


@st.composite
def ways(draw: st.DrawFn) -> ReadOptions:
    threads, gap_nbytes = draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 1, 8, 64, 1 << 20]))
    sizes = (draw(st.sampled_from([16, 40, 100, 333, 1 << 20])), draw(st.sampled_from([1, 100, 250, 1 << 20])))
    return ReadOptions(
        threads, *sizes, gap_nbytes=gap_nbytes, call_nbytes=draw(st.sampled_from([7, 64, 1 << 20, 1 << 20]))
    )


def check(folder: Path, case: Case, options: ReadOptions, tensors: Sequence[torch.Tensor]) -> ReadStats:
    """Execute a plan, whose reads are those that were foretold."""
    paths = [folder / str(number) for number in range(len(case.files))]
    for path, raw in zip(paths, case.files, strict=True):
        path.write_bytes(raw)
    plan = plan_of(paths, tensors, case.items)
    sizes, sums, preadv = [], ReadSums(plan.files), os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        assert len(buffers) <= MAX_BUFFERS
        return preadv(descriptor, buffers, offset)

    with mock.patch("os.preadv", counted):
        stats = execute(plan, tensors, options, sums)
    wanted_nbytes = sum(item.nbytes for item in case.items)
    assert staged_reads(plan, options) == (stats.nbytes, stats.calls)
    assert stats.nbytes == sum(sizes)
    if options.call_nbytes >= max(options.chunk_nbytes, 16):
        assert stats.calls == len(sizes)
    assert stats.staged_nbytes == sums.nbytes == wanted_nbytes
    assert stats.nbytes == wanted_nbytes if options.gap_nbytes == 0 else stats.nbytes >= wanted_nbytes
    assert max(sizes) <= min(max(options.chunk_nbytes, 16), options.call_nbytes)
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor.cpu().flatten(), read_naively(case, number)), number
    return stats


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), ways(), st.sampled_from(["contiguous", "with gaps", "transposed"]), st.booleans())
def test_any_plan_is_read_as_foretold_and_as_a_naive_reader_does(
    tmp_path: Path, case: Case, options: ReadOptions, kind: str, late: bool
) -> None:
    """Into tensors in hand, and into those of a device that copies later."""
    if kind == "transposed":
        case.numels[:] = [numel + numel % 2 for numel in case.numels]
    tensors = [torch.full((numel,), UNTOUCHED, dtype=torch.complex64) for numel in case.numels]
    if kind == "with gaps":
        tensors = [torch.stack([each, each], dim=1)[:, 0] for each in tensors]
    if kind == "transposed":
        tensors = [each.view(-1, 2).t() for each in tensors]
    nbytes = []

    class Noted(LateBuffers if late else StagingBuffers):  # type: ignore[misc]
        seconds = 0.0

        def __init__(self, buffer_nbytes: int, devices: Collection[torch.device], buffers: int) -> None:
            nbytes.append(buffer_nbytes * buffers)
            super().__init__(buffer_nbytes, devices, buffers)

    with mock.patch.object(reader, "StagingBuffers", Noted):
        check(tmp_path, case, options, tensors)
    least_nbytes = options.threads * options.staging_buffers * 16  # one element of any dtype
    assert sum(nbytes) <= max(options.staging_nbytes, least_nbytes)
    assert all(batch.nbytes <= options.staged_nbytes for batch in staged_batches(case.items, options))


@needs_accelerator
@pytest.mark.gpu
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), ways())
def test_any_plan_is_read_into_an_accelerator(tmp_path: Path, case: Case, options: ReadOptions) -> None:
    device = torch.accelerator.current_accelerator()
    tensors = [torch.full((numel,), UNTOUCHED, dtype=torch.complex64, device=device) for numel in case.numels]
    check(tmp_path, case, options, tensors)


@pytest.mark.parametrize(
    ("options", "between", "calls"),
    [
        (ReadOptions(), 4, 3000),
        (read_options(ElasticConfig(reading=Reading(storage="network"))), 4, 6),
        (ReadOptions(gap_nbytes=32, chunk_nbytes=100 * 64 - 32), 4, 30),
        (ReadOptions(gap_nbytes=31), 4, 3000),
        (ReadOptions(), 0, 1),
    ],
)
def test_rows_of_a_weight_are_a_few_reads(tmp_path: Path, options: ReadOptions, between: int, calls: int) -> None:
    """3,000 rows: of 512 of them, the rows and the gaps between are as many buffers as a call takes."""
    raw = bytearray(torch.arange(3000 * (4 + between)).view(torch.uint8).numpy().tobytes())
    case = Case([ReadItem(0, 0, 0, 0, 4, "int64", 3000, 4 + between, 5)], [raw], [3000 * 5])
    target = torch.full((3000 * 5,), UNTOUCHED, dtype=torch.complex64)
    assert check(tmp_path, case, options, [target]).calls == calls


def test_items_are_cut_where_a_buffer_ends_only_if_that_makes_no_more_reads(tmp_path: Path) -> None:
    """Neighbours fill their buffers to the brim; what begins another read anyway begins it in another buffer."""
    file = write(tmp_path / "a", torch.arange(400).bfloat16())
    options = ReadOptions(threads=1, staging_nbytes=200)
    touching = [ReadItem(0, 60 * number, 0, 30 * number, 30, "bfloat16") for number in range(10)]
    assert run([file], [untouched(300)], touching, options).calls == 6  # of 600 bytes, 100 at a time
    apart = [ReadItem(0, 62 * number, 0, 30 * number, 30, "bfloat16") for number in range(10)]
    assert run([file], [untouched(300)], apart, options).calls == 10


def test_small_reads_of_a_small_load_are_shared_by_all_threads() -> None:
    items = [ReadItem(0, 1000 * number, 0, 4 * number, 4, "bfloat16") for number in range(200)]
    options = ReadOptions(threads=4)
    rows = [ReadItem(0, 0, 0, 0, 4, "bfloat16", 200, 500, 4)]
    for held in (items, rows):
        calls = [batch.calls for batch in staged_batches(held, options)]
        assert sum(calls) == 200 and len(calls) >= 4 * options.threads and max(calls) <= 13


def test_a_part_of_a_requantize_item_is_a_read_for_each_source(tmp_path: Path) -> None:
    file = write(tmp_path / "a", torch.ones(3000))
    sources = tuple(ReadItem(0, 4000 * number, 0, 0, 1000, "float32") for number in range(3))
    plan = plan_of([file], [torch.zeros(1000)], [])
    targets = (TargetTensor("fp32", 0, "", 1000, "float32"),)
    plan = ReadPlan(plan.files, targets, (), (RequantizeItem(0, 0, 1000, None, -1, 0, sources, 1.0),))
    target = torch.zeros(1000)
    options = ReadOptions()
    stats = execute(plan, [target], options)
    assert target.tolist() == [3.0] * 1000
    assert staged_reads(plan, options) == (stats.nbytes, stats.calls) == (12_000, 3)

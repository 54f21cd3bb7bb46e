"""Sums of what a load reads, against the CRC32 of whole records."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, TargetTensor
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import ReadSums, Unwanted, execute
from elastic_ckpt.storage.local import first_bytes

RECORD, BEGIN = 5_000_000, 640


def source(folder: Path) -> tuple[SourceFile, bytes]:
    path, raw = folder / "file.pt", torch.randint(0, 256, (RECORD,), dtype=torch.uint8).numpy().tobytes()
    path.write_bytes(bytes(BEGIN) + raw + bytes(100))
    return SourceFile(str(path), BEGIN + RECORD + 100, records=Records.of([(BEGIN, RECORD, zlib.crc32(raw))])), raw


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, RECORD // 4), max_size=20),
    st.sampled_from([1, 4]),
    st.sampled_from([1 << 20, 16 << 20]),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_a_record_that_is_read_in_any_parts_has_its_checksum(
    tmp_path: Path, cuts: list[int], threads: int, chunk_nbytes: int, live: str
) -> None:
    """Straight into the target, or through bounce buffers to another dtype."""
    file, raw = source(tmp_path)
    bounds = sorted({0, RECORD // 4, *cuts})
    items = [ReadItem(0, BEGIN + 4 * start, 0, start, stop - start, "float32") for start, stop in pairwise(bounds)]
    plan = ReadPlan((file,), (TargetTensor("fp32", 0, "", RECORD // 4, live),), tuple(items))
    sums = ReadSums(plan.files)
    target = torch.empty(RECORD // 4, dtype=getattr(torch, live))
    execute(plan, [target], ReadOptions(threads=threads, chunk_nbytes=chunk_nbytes), sums)
    (found,) = sums.sums.values()
    assert found.tiles(RECORD) and found.crc32 == zlib.crc32(raw) and sums.nbytes == RECORD


@pytest.mark.parametrize("live", ["float32", "bfloat16"])
def test_bytes_between_two_reads_are_not_summed(tmp_path: Path, live: str) -> None:
    file, raw = source(tmp_path)
    items = (ReadItem(0, BEGIN, 0, 0, 10, "float32"), ReadItem(0, BEGIN + 80, 0, 10, 10, "float32"))
    plan = ReadPlan((file,), (TargetTensor("fp32", 0, "", 20, live),), items)
    sums = ReadSums(plan.files)
    stats = execute(plan, [torch.empty(20, dtype=getattr(torch, live))], ReadOptions(gap_nbytes=4096), sums)
    assert stats.calls == 1
    (found,) = sums.sums.values()
    assert found.nbytes == sums.nbytes == 80 and not found.tiles(RECORD)
    read = ReadSums(plan.files)
    read.add(0, BEGIN + 40, [memoryview(raw[40:80])])
    (rest,) = read.sums.values()
    assert (found | rest).tiles(120)
    assert isinstance(memoryview(Unwanted(3)).obj, Unwanted)


def test_bytes_of_no_record_are_counted(tmp_path: Path) -> None:
    file, _ = source(tmp_path)
    sums = ReadSums([file])
    sums.add(0, 0, [memoryview(bytes(100))])
    assert sums.sums == {} and sums.nbytes == 100


def test_buffers_are_cut_at_a_number_of_bytes() -> None:
    buffers = [memoryview(b"abc"), memoryview(b"defg"), memoryview(b"h")]
    assert [bytes(each) for each in first_bytes(buffers, 5)] == [b"abc", b"de"]
    assert [bytes(each) for each in first_bytes(buffers, 99)] == [b"abc", b"defg", b"h"]
    assert first_bytes(buffers, 0) == []

"""The verdict about what all ranks read; on real loads: ``tests/distributed/test_verified_loads.py``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFacts, SourceFile, TensorMetadata
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import ReadSums
from elastic_ckpt.load import verify_reads as verify_reads_module
from elastic_ckpt.load.verify_reads import ranges_read, read_evenly, verify_reads
from elastic_ckpt.report import Verified

DATA, BEGIN, PADDING = bytes(range(200)) * 20, 64, 40


def metadata(folder: Path, data: bytes = DATA) -> CheckpointMetadata:
    """A record of fp32 values whose last ``PADDING`` bytes are of no tensor."""
    (folder / "file.pt").write_bytes(bytes(BEGIN) + data)
    file = SourceFile(
        str(folder / "file.pt"), BEGIN + len(DATA), records=Records.of([(BEGIN, len(DATA), zlib.crc32(DATA))])
    )
    numel = (len(DATA) - PADDING) // 4
    tensor = TensorMetadata(
        "weight", "fp32", (numel,), "float32", chunks_of(StorageChunk(FlatRange(0, numel), 0, BEGIN))
    )
    facts = SourceFacts("native", str(folder), "step4", 1, 2, "0.19.8")
    return CheckpointMetadata(facts, (file,), {}, {("weight", "fp32"): tensor}, ())


Ranges = Sequence[tuple[int, int]]


class Job:
    """Ranks that each read some ranges of the record, of which this one tells the others'."""

    def __init__(self, checkpoint: CheckpointMetadata, data: bytes, *ranks: Ranges) -> None:
        self.checkpoint = checkpoint
        self.plans = [plan_of(checkpoint, ranges) for ranges in ranks]
        self.sums = []
        for ranges in ranks:
            sums = ReadSums(checkpoint.files)
            for start, stop in ranges:
                sums.add(0, BEGIN + start, [memoryview(data[start:stop])])
            self.sums.append((sums.sums, sums.nbytes))

    def verify(self, monkeypatch: pytest.MonkeyPatch) -> Verified:
        def all_gather(doing: str, work: Any) -> list[Any]:
            if doing != "list what was read":
                return [work()]
            keys = {key for sums, _ in self.sums for key in sums}
            return [ranges_read(plan, ReadOptions(), keys) for plan in self.plans]

        monkeypatch.setattr(verify_reads_module.distributed, "all_gather", all_gather)
        return verify_reads(self.checkpoint, self.sums, self.plans[0], ReadOptions())


def plan_of(checkpoint: CheckpointMetadata, ranges: Ranges) -> ReadPlan:
    items = [ReadItem(0, BEGIN + start, 0, 0, stop - start, "uint8") for start, stop in ranges]
    return ReadPlan(checkpoint.files, (), tuple(items))


WHOLE = len(DATA) - PADDING
#: What the ranks of a job read of the record.
JOBS: dict[str, list[Ranges]] = {
    "padding that nobody owns": [[(0, 1000)], [(1000, WHOLE)]],
    "a replicated parameter": [[(0, 400), (400, 440)], [(400, 440), (440, WHOLE)]],
    "of three ranks, with other cuts": [[(0, 500)], [(400, 800), (900, WHOLE)], [(300, 600), (700, 950)]],
    "one rank, twice": [[(0, 200), (100, WHOLE)]],
    "two shards of rows": [[(n * 400, n * 400 + 160) for n in range(9)], [(n * 400 + 160, n * 400 + 400) for n in range(9)]],
    "bytes whose positions have the power sums of all": [
        [(0, 1000), (2000, 2500), (2500, 3000), (3000, 3500)],
        [(500, 1000), (2500, 3500)],
    ],
    "a tied weight of another stage, unread": [[(1000, WHOLE)]],
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_what_was_not_read_once_is_read_again_to_complete_a_record(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = Job(metadata(tmp_path), DATA, *JOBS[name]).verify(monkeypatch)
    read = sum(stop - start for ranges in JOBS[name] for start, stop in ranges)
    assert (verified.nbytes, verified.without_checksum_nbytes, verified.incomplete_nbytes) == (read, 0, 0)
    assert str(verified).startswith("100 % of ")


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("position", [0, 420, 2000, WHOLE - 1, len(DATA) - 1])
def test_a_changed_byte_is_found_even_where_nobody_reads_it(
    name: str, position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(DATA)
    data[position] ^= 1
    checkpoint = metadata(tmp_path, bytes(data))
    with pytest.raises(DamagedError, match="checksum of a record differs") as caught:
        Job(checkpoint, bytes(data), *JOBS[name]).verify(monkeypatch)
    assert caught.value.parameter == "fp32 of weight" and caught.value.file == checkpoint.files[0].path
    assert f"{zlib.crc32(DATA):08x}" in str(caught.value.expected)
    assert str(caught.value.found) == f"{zlib.crc32(data):08x}"


def test_strided_rows_are_listed_one_by_one() -> None:
    rows = np.array([[0, 2, 10, 3], [4, 6, 0, 1]], np.int64)  # [0, 2) [10, 12) [20, 22), and [4, 10)
    assert read_evenly(rows, 0, 30).tolist() == [[2, 4], [12, 20], [22, 30]]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(9, 12), st.integers(1, 4)), min_size=1),
    st.sampled_from([1, 3, 1 << 18]),
)
def test_an_even_number_of_readers_is_told_from_an_odd_one(rows: list[tuple[int, ...]], at_once: int) -> None:
    readers = [0] * 120
    for offset, size, stride, count in rows:
        for start in range(offset, offset + count * stride, stride):
            for position in range(start, start + size):
                readers[position] += 1
    with mock.patch.object(verify_reads_module, "_EXPANDED_AT_ONCE", at_once):
        found = read_evenly(np.array(rows, np.int64), 0, len(readers)).tolist()
    evenly = [position for start, stop in found for position in range(start, stop)]
    assert evenly == [position for position, count in enumerate(readers) if count % 2 == 0]


def test_what_could_not_be_compared_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_reads_module, "_LEAST_NBYTES", PADDING)
    job = Job(metadata(tmp_path), DATA, [(0, WHOLE - 40)])  # a state that is not restored, say
    sums, nbytes = job.sums[0]
    job.sums[0] = sums, nbytes + 50
    verified = job.verify(monkeypatch)
    assert (verified.nbytes, verified.without_checksum_nbytes, verified.incomplete_nbytes) == (0, 50, WHOLE - 40)
    assert "0 % of" in str(verified) and "50.0B have no checksum" in str(verified)

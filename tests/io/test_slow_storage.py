"""Reads that lie nearly side by side, and storage on which reads wait, as on a network file system."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from elastic_ckpt.config import ElasticConfig, Reading
from elastic_ckpt.core.read_plan import ReadItem
from elastic_ckpt.io.coalesce import ReadOptions, read_options
from elastic_ckpt.io.staging import ReadStats
from tests.reading import run, untouched, write


@pytest.mark.parametrize("live", [torch.float32, torch.float64])
def test_reads_with_small_gaps_between_them_are_one_if_that_is_wanted(tmp_path: Path, live: torch.dtype) -> None:
    """Rows of 6 of every 10 floats, as a row-parallel weight has them at another degree."""
    values = torch.arange(100.0)
    file = write(tmp_path / "a", values)
    expected = values.view(10, 10)[:, :6].reshape(-1)
    for gap_nbytes, calls, nbytes in ((0, 10, 240), (15, 10, 240), (16, 1, 10 * 24 + 9 * 16), (1 << 20, 1, 384)):
        target = untouched(60, live)
        copy = ReadItem(0, 0, 0, 0, 6, "float32", 10, 10, 6)
        stats = run([file], [target], [copy], ReadOptions(gap_nbytes=gap_nbytes))
        assert torch.equal(target, expected.to(live))
        assert stats == ReadStats(nbytes, calls, 240 if live == torch.float64 else 0)


@pytest.mark.parametrize("live", [torch.float32, torch.float64])
def test_half_a_partition_of_many_parameters_is_a_few_reads_of_a_network_file_system(
    tmp_path: Path, live: torch.dtype
) -> None:
    """As a rank of 2N reads a checkpoint of N, where parameters are small; gaps of 64 KiB are as cheap as calls."""
    shares = [*range(10, 410), 1 << 14, (1 << 14) + 1, 7]
    values = torch.arange(2.0 * sum(shares))
    file, target, offset = write(tmp_path / "a", values), untouched(sum(shares), live), 0
    copies, expected = [], []
    for share in shares:
        copies.append(ReadItem(0, 8 * offset, 0, offset, share, "float32"))
        expected.append(values[2 * offset : 2 * offset + share])
        offset += share
    for storage, calls in (("local", len(shares)), ("network", 2)):
        target.fill_(-7)
        stats = run([file], [target], copies, read_options(ElasticConfig(reading=Reading(storage=storage))))
        assert torch.equal(target, torch.cat(expected).to(live)) and stats.calls == calls


@pytest.mark.parametrize("chunk", [24, 63, 64, 104, 4096])
def test_reads_that_were_joined_over_gaps_are_no_longer_than_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    values = torch.arange(100.0)
    file = write(tmp_path / "a", values)
    sizes = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    target = untouched(60)
    copy = ReadItem(0, 0, 0, 0, 6, "float32", 10, 10, 6)
    run([file], [target], [copy], ReadOptions(gap_nbytes=16, chunk_nbytes=chunk))
    assert torch.equal(target, values.view(10, 10)[:, :6].reshape(-1))
    rows = max((chunk + 16) // 40, 1)  # of 24 bytes, 16 apart
    assert max(sizes) == min(rows * 40 - 16, 384)
    assert len(sizes) == -(-10 // rows)


class SlowStorage:
    """In place of ``preadv``: as on a network file system the first reads wait, here until all of them are there.

    Args:
        together: how many reads wait for each other.
    """

    def __init__(self, together: int) -> None:
        self._preadv = os.preadv
        self._barrier = threading.Barrier(together)
        self._together = together
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        self.sizes: list[int] = []

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.sizes.append(sum(map(len, buffers)))
            waits = len(self.sizes) <= self._together
        if waits:
            self._barrier.wait(60)
        try:
            return self._preadv(descriptor, buffers, offset)
        finally:
            with self._lock:
                self._now -= 1


@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("staged", [False, True])
def test_reads_overlap_on_slow_storage_but_no_more_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, staged: bool
) -> None:
    slow = SlowStorage(threads)
    monkeypatch.setattr(os, "preadv", slow)
    numel = 24 << 20
    file = tmp_path / "a"
    with file.open("wb") as stream:
        stream.truncate(4 * numel)
    target = torch.ones(numel, dtype=torch.float32 if staged else torch.uint8)
    options = ReadOptions(threads=threads, chunk_nbytes=1 << 20)
    run([file], [target], [ReadItem(0, 0, 0, 0, numel, "uint8")], options)
    assert not target.any()
    assert slow.most == threads
    assert slow.sizes == [1 << 20] * 24


def test_many_small_reads_overlap_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowStorage(4)
    monkeypatch.setattr(os, "preadv", slow)
    values = torch.arange(4000.0)
    target = untouched(1000)
    run([write(tmp_path / "a", values)], [target], [ReadItem(0, 0, 0, 0, 1, "float32", 1000, 4, 1)])
    assert torch.equal(target, values[::4])
    assert (len(slow.sizes), slow.most) == (1000, 4)


def test_rows_on_their_way_through_a_buffer_travel_together(tmp_path: Path) -> None:
    """10 rows of 6 of every 10 values; of bfloat16, so that they have to be converted."""
    values = torch.arange(100).bfloat16()
    file = write(tmp_path / "a", values)
    for staging_nbytes in (16, 2 * 12, 2 * 24, 2 * 40, 1 << 20):
        target = untouched(60)
        copy = ReadItem(0, 0, 0, 0, 6, "bfloat16", 10, 10, 6)
        stats = run([file], [target], [copy], ReadOptions(threads=1, staging_nbytes=staging_nbytes))
        assert torch.equal(target, values.view(10, 10)[:, :6].reshape(-1).float())
        assert stats == ReadStats(120, 10, 120)

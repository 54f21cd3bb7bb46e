"""Mapping fresh memory: contents stay, pages come, and huge ones are given up at the first slow one."""

from __future__ import annotations

import ctypes
import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from elastic_ckpt.io import staging as module
from elastic_ckpt.io.staging import Prefault

linux = pytest.mark.skipif(sys.platform != "linux", reason="madvise and mincore as Linux has them")
MIB = 1 << 20


def resident_pages(region: mmap.mmap) -> int:
    """Pages of a private mapping that are there, by the kernel's own account."""
    found = (ctypes.c_ubyte * (len(region) // mmap.PAGESIZE))()
    view = torch.frombuffer(region, dtype=torch.uint8)
    assert module._libc().mincore(view.data_ptr(), len(region), ctypes.byref(found)) == 0
    return sum(page & 1 for page in found)


@linux
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 8 * MIB), (4096, 5 * MIB), (100, 3 * MIB + 77), (MIB, MIB + (1 << 18))]
)
def test_every_page_of_a_fresh_buffer_is_mapped(start: int, stop: int) -> None:
    region = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert resident_pages(region) == 0
    Prefault()([memoryview(region)[start:stop]])
    pages = -(-stop // mmap.PAGESIZE) - start // mmap.PAGESIZE
    assert resident_pages(region) >= pages


@linux
def test_contents_stay() -> None:
    region = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    written = (0, 5000, 3 * MIB, 8 * MIB - 1)  # not in the middle, where it looks
    for place in written:
        region[place] = 7
    Prefault()([memoryview(region)])
    assert [place for place in range(0, 8 * MIB) if region[place]] == list(written)


def advices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the kernel is told from here on, which does nothing about it."""
    told: list[int] = []
    libc = SimpleNamespace(
        madvise=lambda start, nbytes, advice: told.append(advice) or -1, mincore=module._libc().mincore
    )
    monkeypatch.setattr(module, "_libc", lambda: libc)
    return told


@linux
def test_small_and_mapped_buffers_cost_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    told = advices(monkeypatch)
    Prefault()([memoryview(bytearray(1000)), torch.ones(MIB, dtype=torch.uint8).numpy().data])
    assert told == []


@linux
@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_the_first_slow_huge_page_is_the_last(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock, told = iter(range(1000)), advices(monkeypatch)
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: next(clock) * seconds))
    Prefault()([memoryview(mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))])
    huge = told.count(module._MADV_HUGEPAGE)
    assert huge == 1 if seconds else huge >= 31


def test_other_systems_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    module._libc.cache_clear()
    buffer = memoryview(bytearray(b"\x01" * MIB))
    Prefault()([buffer])
    assert set(buffer) == {1}
    module._libc.cache_clear()

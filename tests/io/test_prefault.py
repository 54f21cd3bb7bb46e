"""Mapping fresh memory: contents stay, pages come, and huge ones are given up at the first slow one."""

from __future__ import annotations

import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from elastic_ckpt.io import prefault as module
from elastic_ckpt.io.prefault import Prefault

linux = pytest.mark.skipif(sys.platform != "linux", reason="madvise and mincore as Linux has them")
MIB = 1 << 20


def resident_pages(region: mmap.mmap) -> int:
    """Pages of a private mapping that are there, by the kernel's own account."""
    view = torch.frombuffer(region, dtype=torch.uint8)
    prefault = Prefault()
    return sum(prefault._is_mapped(view.data_ptr() + page) for page in range(0, len(region), mmap.PAGESIZE))


@linux
@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 8 * MIB), (4096, 5 * MIB), (100, 3 * MIB + 77), (MIB, MIB + (1 << 18))]
)
def test_every_page_of_a_fresh_buffer_is_mapped(huge: bool, start: int, stop: int) -> None:
    region = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert resident_pages(region) == 0
    Prefault(huge)([memoryview(region)[start:stop]])
    pages = -(-stop // mmap.PAGESIZE) - start // mmap.PAGESIZE
    assert resident_pages(region) >= pages
    if not huge:
        assert resident_pages(region) == pages


@linux
@pytest.mark.parametrize("huge", [False, True])
def test_contents_stay(huge: bool) -> None:
    region = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    written = (0, 5000, 3 * MIB, 8 * MIB - 1)  # not in the middle, where it looks
    for place in written:
        region[place] = 7
    Prefault(huge)([memoryview(region)])
    assert [place for place in range(0, 8 * MIB) if region[place]] == list(written)


@linux
def test_small_and_mapped_buffers_cost_no_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    prefault = Prefault()
    monkeypatch.setattr(prefault, "_advise", lambda *arguments: calls.append("madvise"))
    prefault([memoryview(bytearray(1000))])
    touched = torch.ones(MIB, dtype=torch.uint8)
    prefault([touched.numpy().data])
    assert calls == []


@linux
@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_the_first_slow_huge_page_is_the_last(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: next(clock) * seconds))
    advised: list[int] = []
    prefault = Prefault()
    monkeypatch.setattr(prefault, "_advise", lambda start, nbytes, advice: advised.append(advice))
    region = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefault([memoryview(region)])
    huge = advised.count(module._MADV_HUGEPAGE)
    assert huge == 1 if seconds else huge >= 31


def test_a_kernel_that_takes_no_advice_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*arguments: int) -> int:
        calls.append(arguments)
        return -1

    monkeypatch.setattr(module, "_libc", lambda: SimpleNamespace(madvise=refuse, mincore=lambda *_: 0))
    prefault = Prefault(huge=False)
    buffer = memoryview(bytearray(4 * MIB))
    for _ in range(3):
        prefault([buffer])
    assert len(calls) == 1


def test_other_systems_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    buffer = memoryview(bytearray(b"\x01" * MIB))
    Prefault()([buffer])
    assert set(buffer) == {1}

"""Bounce buffers, on the way into targets that take their time: a device that copies later, and one in hand if there is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic_ckpt.core.metadata import MASTER, SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, TargetTensor
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io import reader
from elastic_ckpt.io.coalesce import ReadOptions, StagedBatch
from elastic_ckpt.io.reader import execute
from elastic_ckpt.io.staging import ReadStats, StagingBuffers, joined
from tests.io.late_buffers import LateBuffers, needs_accelerator


class ForgetfulBuffers(LateBuffers):
    """Say that a buffer is free while it is not."""

    def start(
        self, raw: torch.Tensor, batch: StagedBatch, tensors: Sequence[torch.Tensor]
    ) -> list[Callable[[], object]]:
        super().start(raw, batch, tensors)
        return []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LateBuffers]:
    """The late staging buffers that are made."""
    made: list[LateBuffers] = []

    def make(nbytes: int, devices: Collection[torch.device], buffers: int) -> LateBuffers:
        made.append(LateBuffers(nbytes, devices, buffers))
        return made[-1]

    monkeypatch.setattr(reader, "StagingBuffers", make)
    return made


def plan_into(tensors: list[torch.Tensor], path: Path, dtype: str, numel: int) -> ReadPlan:
    targets = tuple(
        TargetTensor(MASTER, n, "", t.numel(), str(t.dtype).removeprefix("torch.")) for n, t in enumerate(tensors)
    )
    itemsize = getattr(torch, dtype).itemsize
    copies = tuple(ReadItem(0, n * numel * itemsize, n, 0, numel, dtype) for n in range(len(tensors)))
    return ReadPlan((SourceFile(str(path), path.stat().st_size),), targets, copies)


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """A file of 4,000 values of bfloat16."""
    values = torch.randn(4000, generator=torch.Generator().manual_seed(1)).bfloat16()
    path = tmp_path / "values"
    path.write_bytes(values.view(torch.uint8).numpy().tobytes())
    yield path, values


@pytest.mark.parametrize("threads", [1, 3])
def test_a_buffer_is_written_again_only_when_what_was_in_it_has_left(
    halves: tuple[Path, torch.Tensor], threads: int, made: list[LateBuffers]
) -> None:
    path, values = halves
    targets = [torch.full((2000,), -7.0) for _ in range(2)]
    options = ReadOptions(threads=threads, staging_nbytes=400 * threads)
    plan = plan_into(targets, path, "bfloat16", 2000)
    stats = execute(plan, targets, options)
    assert torch.equal(torch.cat(targets), values.float())
    assert stats == ReadStats(8000, 40, 8000)
    assert len(made) == threads
    # the next read was started while the last one was on its way, and never more than that
    assert max(buffers.most_waiting for buffers in made) == 2


def test_a_transfer_that_frees_its_buffer_too_early_is_noticed_by_these_tests(
    halves: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values = halves
    targets = [torch.full((2000,), -7.0) for _ in range(2)]
    options = ReadOptions(threads=1, staging_nbytes=400)
    plan = plan_into(targets, path, "bfloat16", 2000)
    monkeypatch.setattr(reader, "StagingBuffers", ForgetfulBuffers)
    execute(plan, targets, options)
    assert not torch.equal(torch.cat(targets), values.float())


@pytest.mark.parametrize("threads", [1, 3])
def test_no_transfer_is_under_way_any_more_when_a_failed_read_is_raised(
    halves: tuple[Path, torch.Tensor], threads: int, made: list[LateBuffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = halves
    targets = [torch.full((2000,), -7.0) for _ in range(2)]
    plan = plan_into(targets, path, "bfloat16", 2000)
    with path.open("r+b") as stream:
        stream.truncate(6000)  # the last reads fail, with those before them still on their way
    monkeypatch.setattr(LateBuffers, "seconds", 0.05)
    with pytest.raises(DamagedError):
        options = ReadOptions(threads=threads, staging_nbytes=1600 * threads)
        execute(plan, targets, options)
    raised = torch.cat(targets).clone()
    for buffers in made:
        buffers.finish()
    assert made and torch.equal(torch.cat(targets), raised)


def test_staging_buffers_share_no_buffer() -> None:
    buffers = [StagingBuffers(64, {torch.device("cpu")}).buffer(64) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number]) * 64
    assert [bytes(buffer) for buffer in buffers] == [bytes([number]) * 64 for number in range(3)]


def test_host_tensors_are_written_before_their_buffer_is_given_back() -> None:
    target = torch.zeros(4)
    values = torch.tensor([1.0, 2.0])
    batch = StagedBatch([[(ReadItem(0, 0, 0, 1, 2, "float32"), 0)]], 8)
    assert StagingBuffers(64, {target.device}).start(values.view(torch.uint8), batch, [target]) == []
    values.fill_(9.0)
    assert target.tolist() == [0, 1, 2, 0]


def test_parts_that_go_on_in_buffer_and_target_are_one_copy() -> None:
    """Halves of three parameters are apart in their file, and side by side where they go."""
    halves = [(ReadItem(0, 80 * n, 0, 10 * n, 10, "float32"), 40 * n) for n in range(3)]
    (one,) = joined(halves)
    assert one == (ReadItem(0, 0, 0, 0, 30, "float32"), 0)
    elsewhere = (replace(halves[2][0], target=1), 80)
    gap = (replace(halves[2][0], target_offset=21), 80)
    other_dtype = (replace(halves[2][0], dtype="int32"), 80)
    rows = (replace(halves[2][0], rows=2, file_stride=10, target_stride=20), 80)
    for last in (elsewhere, gap, other_dtype, rows, (halves[2][0], 88)):
        assert [*joined([*halves[:2], last])] == [(ReadItem(0, 0, 0, 0, 20, "float32"), 0), last]
    assert [*joined([])] == []


class OnAnotherDevice(torch.Tensor):
    """Says that it is on the fourth GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 3)


def test_threads_work_on_the_device_of_the_targets_and_not_on_the_first_of_the_machine(
    halves: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = halves
    targets = [torch.zeros(2000).as_subclass(OnAnotherDevice) for _ in range(2)]
    current: dict[str, torch.device] = {}

    class Noted(StagingBuffers):
        def __init__(self, buffer_nbytes: int, _: Collection[torch.device], buffers: int) -> None:
            super().__init__(buffer_nbytes, (), buffers)

        def buffer(self, nbytes: int) -> memoryview:
            used.append(current.get(threading.current_thread().name))
            return super().buffer(nbytes)

    used: list[torch.device | None] = []
    monkeypatch.setattr(reader, "StagingBuffers", Noted)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.update({threading.current_thread().name: device})
    )
    execute(plan_into(targets, path, "bfloat16", 2000), targets, ReadOptions(threads=3, staging_nbytes=1200))
    assert used and set(used) == {torch.device("cuda", 3)}


@needs_accelerator
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_an_accelerator_are_filled(halves: tuple[Path, torch.Tensor], dtype: str) -> None:
    path, values = halves
    device = torch.accelerator.current_accelerator()
    assert device is not None
    targets = [torch.full((2000,), -7.0, device=device) for _ in range(2)]
    if dtype == "float32":
        path.write_bytes(values.float().view(torch.uint8).numpy().tobytes())
    options = ReadOptions(threads=2, staging_nbytes=1600)
    execute(plan_into(targets, path, dtype, 2000), targets, options)
    assert torch.equal(torch.cat(targets).cpu(), values.float())


@needs_accelerator
@pytest.mark.gpu
def test_a_stream_waits_for_what_prepared_the_target() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    target = torch.zeros(1 << 22, device=device)
    for _ in range(50):  # keeps the stream of the computation busy: the zeros are still to come
        target.add_(1)
    target.zero_()
    transfer = StagingBuffers(64, {target.device})
    values = torch.ones(1 << 22).pin_memory()
    batch = StagedBatch([[(ReadItem(0, 0, 0, 0, 1 << 22, "float32"), 0)]], 1 << 24)
    transfer.start(values.view(torch.uint8), batch, [target])
    transfer.finish()
    assert torch.equal(target.cpu(), torch.ones(1 << 22))

"""Staging buffers whose copies are late, and what needs an accelerator."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence

import pytest
import torch

from elastic_ckpt.io.coalesce import StagedBatch
from elastic_ckpt.io.staging import StagingBuffers, write_parts

needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator, and torch sees none here"
)


class LateBuffers(StagingBuffers):
    """Does each copy some time after it was asked for, on a thread of its own, as a stream does."""

    seconds = 0.002

    def __init__(self, buffer_nbytes: int, devices: Collection[torch.device], buffers: int = 2) -> None:
        super().__init__(buffer_nbytes, devices, buffers)
        self._queue: queue.Queue[tuple[torch.Tensor, StagedBatch, Sequence[torch.Tensor], threading.Event]]
        self._queue = queue.Queue()
        self.most_waiting = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            raw, batch, tensors, done = self._queue.get()
            time.sleep(self.seconds)
            write_parts(raw, batch, tensors)
            done.set()
            self._queue.task_done()

    def start(
        self, raw: torch.Tensor, batch: StagedBatch, tensors: Sequence[torch.Tensor]
    ) -> list[Callable[[], object]]:
        done = threading.Event()
        self._queue.put((raw, batch, tensors, done))
        self.most_waiting = max(self.most_waiting, self._queue.unfinished_tasks)
        return [lambda: None if done.wait(30) else pytest.fail("the copy was never done")]

    def finish(self) -> None:
        self._queue.join()

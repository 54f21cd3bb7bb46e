"""Saves by DeepSpeed's other checkpoint writers, on machines without its ops for asynchronous I/O."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.io import fast_file_writer
from deepspeed.runtime.checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.model_checkpointing import writer_factory

import elastic_ckpt
from tests.distributed import jobs
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.jobs import SPOILS
from tests.distributed.model import build_engine, close, train

#: Of the block device below; what a file opened with ``O_DIRECT`` must be written in.
_ALIGNMENT = 4096


class Handle:
    """In place of the ``aio_handle`` of DeepSpeed's async_io op, which takes minutes to build: writes at once."""

    def __init__(self, **_: Any) -> None:
        self._done = 0

    def get_alignment(self) -> int:
        return _ALIGNMENT

    def async_pwrite(self, buffer: torch.Tensor, descriptor: int, offset: int) -> int:
        aligned = mmap.mmap(-1, max(buffer.numel(), 1))  # ``O_DIRECT`` takes whole pages only
        aligned.write(buffer.numpy().tobytes())
        written = os.pwrite(descriptor, aligned, offset)
        assert written == buffer.numel()
        self._done += 1
        return 0

    def wait(self) -> int:
        done, self._done = self._done, 0
        return done


@contextlib.contextmanager
def ops() -> Iterator[None]:
    """Let every writer run on the CPU, as if DeepSpeed's launcher had started one node."""
    # cast_to_byte_tensor is for a torch that hands its storages to the writer; there is no CPU build of the op
    asynchronous, utilities = SimpleNamespace(aio_handle=Handle), SimpleNamespace(cast_to_byte_tensor=None)
    start_method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(
        "fork", force=True
    )  # the process that writes decoupled saves has what follows, too
    with (
        mock.patch.dict(os.environ, CROSS_SIZE="1", CROSS_RANK="0"),
        mock.patch.object(writer_factory, "AsyncIOBuilder", lambda: SimpleNamespace(load=lambda: asynchronous)),
        mock.patch.object(fast_file_writer, "UtilsBuilder", lambda: SimpleNamespace(load=lambda: utilities)),
        # without an accelerator, torch has no memory to pin
        mock.patch.object(get_accelerator(), "is_pinned", lambda _: True),
    ):
        yield
    multiprocessing.set_start_method(start_method, force=True)


def in_turn(save: Callable[..., Any]) -> Callable[..., Any]:
    """One rank after the other, rank 0 last: in ZeRO-1 and 2 all ranks write the same model-states file."""

    def turn(*args: Any, **kwargs: Any) -> Any:
        for rank in reversed(range(dist.get_world_size())):
            if rank == dist.get_rank():
                save(*args, **kwargs)
            dist.barrier()

    return turn


def save_each(cases: list[dict[str, Any]]) -> None:
    """:func:`tests.distributed.jobs.save_each` with a writer.

    Decoupled saves are committed before training goes on: their writers read live tensors, and the next forward pass,
    which comes before the step that commits, changes buffers.
    """
    at_once, save_checkpoint = FastCheckpointEngine.save, DeepSpeedEngine.save_checkpoint

    def save_and_commit(engine: Any, *args: Any, **kwargs: Any) -> None:
        save_checkpoint(engine, *args, **kwargs)
        if engine.checkpoint_engine.is_decoupled():
            engine._commit_decoupled_checkpoint()

    with ops(), mock.patch.object(DeepSpeedEngine, "save_checkpoint", save_and_commit):
        for case in cases:
            writer = dict(case["setup"].config)["checkpoint"]["writer"]
            several = writer["type"] == "python" and not writer["decoupled"] and case["setup"].stage < 3
            with mock.patch.object(FastCheckpointEngine, "save", in_turn(at_once) if several else at_once):
                jobs.save_each([case])


def load_right_after_save(case: dict[str, Any]) -> list[Loaded]:
    """Load a decoupled save that no step has committed yet, into the engine that made it."""
    elastic_ckpt.install()
    with ops():
        engine = build_engine(case["setup"])
        train(engine, 0, 2)
        engine.save_checkpoint(case["folder"])
        train(engine, 2, 4)  # commits it
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        engine.save_checkpoint(case["folder"])
        engine.load_checkpoint(case["folder"])
        truth = jobs.spoiled(truth) if SPOILS else truth
        found = Loaded(case, case["name"], engine.elastic_report, oracle.differences(engine, truth))
        close(engine)
    return [found]


def load_after_writer_died(case: dict[str, Any]) -> list[Refused]:
    """End the process that writes rank 1's decoupled save, then load."""
    elastic_ckpt.install()
    with ops():
        engine = build_engine(case["setup"])
        train(engine, 0, 2)
        engine.save_checkpoint(case["folder"])
        if dist.get_rank() == 1 and not SPOILS:
            engine.checkpoint_engine.ckpt_process.kill()
            engine.checkpoint_engine.ckpt_process.join()
        dist.barrier()
        refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"]))
        engine.checkpoint_engine.commit_info = None  # nothing is left to commit
        close(engine)
    return [refused]


def save_twice(case: dict[str, Any]) -> list[Refused]:
    """Save twice under one tag with the ``fast`` writer, then load."""
    elastic_ckpt.install()
    with ops():
        engine = build_engine(case["setup"])
        for step in (0,) if SPOILS else (0, 1):
            train(engine, step, step + 1)
            engine.save_checkpoint(case["folder"], tag="best")
        refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"]))
        close(engine)
    return [refused]

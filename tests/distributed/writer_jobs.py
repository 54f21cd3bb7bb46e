"""Saves by DeepSpeed's other checkpoint writers, on machines without its ops for asynchronous I/O."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


def provide_ops() -> None:
    """Let every writer run on the CPU, as if DeepSpeed's launcher had started one node."""
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")
    writer_factory.AsyncIOBuilder = lambda: SimpleNamespace(load=lambda: SimpleNamespace(aio_handle=Handle))
    # cast_to_byte_tensor is for a torch that hands its storages to the writer; there is no CPU build of the op
    fast_file_writer.UtilsBuilder = lambda: SimpleNamespace(load=lambda: SimpleNamespace(cast_to_byte_tensor=None))
    get_accelerator().is_pinned = lambda _: True  # without an accelerator, torch has no memory to pin
    multiprocessing.set_start_method("fork", force=True)  # the process that writes decoupled saves has the above, too


def in_turn(save: Callable[..., Any]) -> Callable[..., Any]:
    """One rank after the other, rank 0 last: in ZeRO-1 and 2 all ranks write the same model-states file."""

    def turn(*args: Any, **kwargs: Any) -> Any:
        for rank in reversed(range(dist.get_world_size())):
            if rank == dist.get_rank():
                save(*args, **kwargs)
            dist.barrier()

    return turn


def save(arguments: dict[str, Any]) -> None:
    """:func:`tests.distributed.jobs.save` for each of ``cells``, below ``folder/<name of the cell>``.

    Decoupled saves are committed before training goes on: their writers read live tensors, and the next forward pass,
    which comes before the step that commits, changes buffers.
    """
    provide_ops()
    at_once, save_checkpoint = FastCheckpointEngine.save, DeepSpeedEngine.save_checkpoint

    def save_and_commit(engine: Any, *args: Any, **kwargs: Any) -> None:
        save_checkpoint(engine, *args, **kwargs)
        if engine.checkpoint_engine.is_decoupled():
            engine._commit_decoupled_checkpoint()

    DeepSpeedEngine.save_checkpoint = save_and_commit
    for name, setup in arguments["cells"].items():
        several = setup.stage < 3 and name.startswith("python")
        FastCheckpointEngine.save = in_turn(at_once) if several else at_once
        jobs.save({"folder": os.path.join(arguments["folder"], name), "setups": [setup]})
    FastCheckpointEngine.save, DeepSpeedEngine.save_checkpoint = at_once, save_checkpoint


def load_right_after_save(arguments: dict[str, Any]) -> list[Loaded]:
    """Load a decoupled save that no step has committed yet, into the engine that made it."""
    provide_ops()
    elastic_ckpt.install()
    facts = []
    for name, setup in arguments["cells"].items():
        folder = os.path.join(arguments["folder"], name)
        engine = build_engine(setup)
        train(engine, 0, 2)
        engine.save_checkpoint(folder)
        train(engine, 2, 4)  # commits it
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        facts.append(Loaded(name, name, engine.elastic_report, oracle.differences(engine, truth)))
        close(engine)
    return facts


def load_after_writer_died(arguments: dict[str, Any]) -> list[Refused]:
    """End the process that writes rank 1's decoupled save, then load."""
    provide_ops()
    elastic_ckpt.install()
    engine = build_engine(arguments["setup"])
    train(engine, 0, 2)
    engine.save_checkpoint(arguments["folder"])
    if dist.get_rank() == 1:
        engine.checkpoint_engine.ckpt_process.kill()
        engine.checkpoint_engine.ckpt_process.join()
    dist.barrier()
    refused = attempt(None, engine, lambda: engine.load_checkpoint(arguments["folder"]))
    engine.checkpoint_engine.commit_info = None  # nothing is left to commit
    close(engine)
    return [refused]


def save_twice(arguments: dict[str, Any]) -> list[Refused]:
    """Save twice under one tag with the ``fast`` writer, then load."""
    provide_ops()
    elastic_ckpt.install()
    engine = build_engine(arguments["setup"])
    for step in (0, 1):
        train(engine, step, step + 1)
        engine.save_checkpoint(arguments["folder"], tag="best")
    refused = attempt(None, engine, lambda: engine.load_checkpoint(arguments["folder"]))
    close(engine)
    return [refused]

"""Jobs about folders of several saves, of which some are damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, log_lines
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, client_differences, client_state_of, truth_of, where
from tests.distributed.kept import close_kept
from tests.distributed.model import build_engine, close, train


def save_thrice(case: dict[str, Any]) -> None:
    """Save at steps 2, 3 and 4, with a truth of the first."""
    engine = build_engine(case["setup"])
    for step in (2, 3, SAVE_AT):
        train(engine, engine.global_steps, step)
        client = {**client_state_of(dist.get_rank()), "note": f"hello of step {step}"}
        engine.save_checkpoint(case["folder"], client_state=client)
        if step == 2:
            oracle.relink(engine)
            truth = oracle.gather(engine, oracle.state_keys(engine))
    truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(case["folder"], "truth.pt"))
    close(engine)


def fall_back(case: dict[str, Any]) -> list[Loaded]:
    """Load a damaged ``folder`` into a trained engine; what differs from the oldest save.

    ``sick``: reading this tag fails on the last rank alone.
    """
    elastic_ckpt.install()
    engine = build_engine(case["setup"])
    train(engine, 50, 52)
    with log_lines() as lines, unreadable(case.get("sick")):
        path, client_state = engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
    differences = oracle.differences(engine, truth_of(case["folder"]))
    if os.path.basename(os.path.dirname(path)) != "global_step2" or not os.path.isfile(path):
        differences["path"] = path
    differences |= client_differences({**client_state, "note": "hello"}, engine.elastic_report, case["setup"])
    if client_state["note"] != "hello of step 2":
        differences["note"] = client_state["note"]
    close(engine)
    return [Loaded(case, where(case), engine.elastic_report, differences, 0.0, client_state, tuple(lines))]


@contextlib.contextmanager
def unreadable(tag: str | None) -> Iterator[None]:
    """Files of a tag cannot be read on the last rank."""
    real = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if tag in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    os.preadv = failing if tag is not None and dist.get_rank() == dist.get_world_size() - 1 else real
    try:
        yield
    finally:
        os.preadv = real


def arrive_late(case: dict[str, Any]) -> list[Loaded]:
    """Files of a checkpoint that grow and appear while it is loaded: what differs from the truth, and what was logged."""
    close_kept()
    elastic_ckpt.install()
    engine = build_engine(case["setup"])
    whole, late = Path(case["folder"], "step4"), Path(case["scratch"], "step4")

    def write() -> None:
        for number, source in enumerate(sorted(whole.iterdir())):
            time.sleep(0.3)
            raw = source.read_bytes()
            with open(late / source.name, "wb") as stream:  # the first half, and later the rest
                stream.write(raw[: len(raw) // 2])
                stream.flush()
                time.sleep(0.3 if number % 2 else 0)
                stream.write(raw[len(raw) // 2 :])
            shutil.copystat(source, late / source.name)

    if dist.get_rank() == 0:
        late.mkdir(parents=True)
        shutil.copy(whole.parent / "latest", late.parent)
    dist.barrier()
    writer = threading.Thread(target=write)
    if dist.get_rank() == dist.get_world_size() - 1:
        writer.start()
    with log_lines() as lines:
        engine.load_checkpoint(case["scratch"])
    differences = oracle.differences(engine, truth_of(case["folder"]))
    if writer.ident is not None:
        writer.join()
    close(engine)
    return [Loaded(case, where(case), engine.elastic_report, differences, lines=tuple(lines))]

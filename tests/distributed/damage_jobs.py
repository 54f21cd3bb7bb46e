"""Jobs about folders of several saves, of which some are damaged."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import parallel_models
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt, log_lines, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, client_differences, client_state_of, truth_of, where
from tests.distributed.model import build_engine, close, train


def save_thrice(arguments: dict[str, Any]) -> None:
    """Save each setup at steps 2, 3 and 4, with a truth of the first."""
    for setup in arguments["setups"]:
        folder = os.path.join(arguments["folder"], setup.name)
        engine = build_engine(setup)
        for step in (2, 3, SAVE_AT):
            train(engine, engine.global_steps, step)
            client = {**client_state_of(dist.get_rank()), "note": f"hello of step {step}"}
            engine.save_checkpoint(folder, client_state=client)
            if step == 2:
                oracle.relink(engine)
                truth = oracle.gather(engine, oracle.state_keys(engine))
        truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        close(engine)
        dist.barrier()


def fall_back(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Load each case's damaged ``folder`` into a trained engine; what differs from the oldest save.

    ``sick``: reading this tag fails on the last rank alone.
    """
    elastic_ckpt.install()
    facts = []
    for case in cases:
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
        gap = loss_gap(train(engine, 2, 5), {"losses": case["losses"]}) if "losses" in case else 0.0
        facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap, client_state, tuple(lines)))
        close(engine)
    return facts


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


def give_up(cases: list[dict[str, Any]]) -> list[Refused] | None:
    """Loads for which there is no other checkpoint."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        engine = build_engine(case["setup"])
        train(engine, 50, 52)
        load = functools.partial(engine.load_checkpoint, case["folder"], **case.get("arguments", {}))
        facts.append(attempt(case, engine, load))
        close(engine)
    return facts if dist.get_rank() == 0 else None


def arrive_late(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """Files of a checkpoint that grow and appear while it is loaded: what differs from the truth, and how long it took."""
    elastic_ckpt.install()
    engine = build_engine(arguments["setup"])
    folder, whole = arguments["folder"], arguments["whole"]

    def write() -> None:
        for number, name in enumerate(sorted(os.listdir(whole))):
            time.sleep(0.3)
            source, target = os.path.join(whole, name), os.path.join(folder, "step4", name)
            with open(source, "rb") as stream:
                raw = stream.read()
            with open(target, "wb") as stream:  # the first half, and later the rest
                stream.write(raw[: len(raw) // 2])
                stream.flush()
                time.sleep(0.3 if number % 2 else 0)
                stream.write(raw[len(raw) // 2 :])
            shutil.copystat(source, target)

    writer = threading.Thread(target=write)
    if dist.get_rank() == dist.get_world_size() - 1:
        writer.start()
    started = time.monotonic()
    engine.load_checkpoint(folder, tag=arguments.get("tag"))
    seconds = time.monotonic() - started
    differences = oracle.differences(engine, truth_of(folder))
    if writer.ident is not None:
        writer.join()
    return [SimpleNamespace(seconds=seconds, differences=differences)]


def refuse_pipeline(cases: list[dict[str, Any]]) -> list[Refused] | None:
    """Try to load the ``folder`` of each case into one pipeline engine of the first one's ``setup``."""
    elastic_ckpt.install()
    engine = parallel_models.build(cases[0]["setup"], seed=8)
    parallel_models.train(engine, cases[0]["setup"], 0, 1)
    facts = [attempt(case, engine, functools.partial(engine.load_checkpoint, case["folder"])) for case in cases]
    close(engine)
    return facts if dist.get_rank() == 0 else None

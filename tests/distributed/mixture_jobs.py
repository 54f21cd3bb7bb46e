"""Jobs that save one tag after the other, a step apart, and load a tag while it is saved over."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import DamagedError, NotFoundError, PartialLoadError, SavedOverError
from tests.distributed import parallel_models
from tests.distributed import truth as oracle
from tests.distributed.count_jobs import train_beside
from tests.distributed.jobs import SPOILS, take_over
from tests.distributed.model import Setup, build_engine, close, train
from tests.distributed.parallel_models import Parallel


@dataclass(frozen=True)
class Pair:
    """Two saves of one run.

    Attributes:
        setup: of the run.
        at: the step of the first save.
        step: what the step between them is: ``normal``; ``still``: its learning rate is 0; ``skipped``: it overflows;
            ``beside``: all but the first are the optimizer's alone, so that the counters stand still.
    """

    setup: Setup | Parallel
    at: int = 2
    step: str = "normal"

    @property
    def name(self) -> str:
        return f"{self.setup.name}-at{self.at}-{self.step}"


def save_pair(case: dict[str, Any]) -> None:
    """Save the pair that is the case's ``setup`` under the tags ``a`` and ``b``."""
    pair, folder = case["setup"], case["folder"]
    is_parallel = isinstance(pair.setup, Parallel)
    engine = parallel_models.build(pair.setup) if is_parallel else build_engine(pair.setup)

    def go(first: int, last: int) -> None:
        if is_parallel:
            parallel_models.train(engine, pair.setup, first, last)
        elif pair.step == "beside":
            for step in range(first, last):
                train_beside(engine, step) if step else train(engine, 0, 1)
        else:
            train(engine, first, last)

    if pair.step == "beside":
        elastic_ckpt.install()
    go(0, pair.at)
    engine.save_checkpoint(folder, tag="a", client_state={"epoch": pair.at})
    if pair.step == "still":
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
    if pair.step == "skipped":
        engine.optimizer.loss_scaler.cur_scale = 2.0**40
    go(pair.at, pair.at + 1)
    assert engine.skipped_steps == (pair.step == "skipped")
    engine.save_checkpoint(folder, tag="b", client_state={"epoch": pair.at + 1})
    assert pair.step != "beside" or engine.global_steps == 1
    close(engine)


def save_tag(case: dict[str, Any]) -> None:
    """Save a ``setup`` after two steps, and one more for each rank, under a ``tag``; over that of ``source``, if any."""
    take_over(case)
    engine = build_engine(case["setup"])
    train(engine, 0, 2 + dist.get_world_size())
    engine.save_checkpoint(case["folder"], tag=case["tag"])
    close(engine)


def load_beside_leftovers(case: dict[str, Any]) -> list[dict[str, Any]]:
    """What DeepSpeed's own loader and elastic_ckpt's restore into a ``setup`` from its folder, and the latter's notes."""
    elastic_ckpt.install()
    found: dict[str, Any] = {}
    for mode in ("off", "require"):
        engine = build_engine(replace(case["setup"], config=(("elastic_checkpoint", {"mode": mode}),)))
        engine.load_checkpoint(case["folder"])
        found[mode] = (engine.global_steps, oracle.fingerprint(engine))
        found["notes"] = [] if mode == "off" else list(engine.elastic_report.notes)
        close(engine)
    if SPOILS:
        found["off"] = (found["off"][0], {**found["off"][1], "masters": "of another run"})
    return [found]


def hop(case: dict[str, Any]) -> list[list[str]]:
    """Train a step in each of ``setups``, each going on from the last one's save, with ``arguments`` of the first loads.

    Returns the notes of each load that speak of steps.
    """
    elastic_ckpt.install()
    notes, arguments = [], iter(case["arguments"])
    for number, setup in enumerate(case["setups"]):
        engine = build_engine(setup)
        if number:
            engine.load_checkpoint(case["folder"], **next(arguments, {}))
            notes.append([note for note in engine.elastic_report.notes if "step" in note])
        train(engine, number, number + 1)
        engine.save_checkpoint(case["folder"], tag=f"step{number}")
        close(engine)
    if SPOILS:
        notes[-1].append("the steps are those of another run")
    return notes


# --- a tag that is saved over while it is loaded ----------------------------------------------------------------------


def by_rename(source: str, target: str) -> None:
    """As who writes beside a file and renames."""
    shutil.copyfile(source, target + ".new")
    os.replace(target + ".new", target)


def in_place(source: str, target: str) -> None:
    """Without cutting the file first, in pieces."""
    with open(source, "rb") as old, open(target, "r+b") as new:
        while piece := old.read(1 << 12):
            new.write(piece)
        new.truncate()


def exchange_folders(source: str, target: str) -> None:
    """The folders of two saves change places; what comes back is the very same file."""
    one, other = os.path.dirname(source), os.path.dirname(target)
    if os.path.basename(source) == sorted(os.listdir(one))[0]:
        os.rename(other, other + ".old")
        os.rename(one, other)
        os.rename(other + ".old", one)


#: ``shutil.copyfile`` is what ``torch.save`` does: the file is cut, and grows.
WAYS: dict[str, Callable[[str, str], Any]] = {
    "rename": by_rename,
    "cut": shutil.copyfile,
    "in place": in_place,
    "folders": exchange_folders,
}


@contextmanager
def saved_over(folder: str, way: str, seed: int) -> Iterator[None]:
    """The tag ``last`` is saved over by ``a`` and ``b`` in turn, on rank 0, with pauses of up to some milliseconds."""
    done, draw = threading.Event(), random.Random(seed)
    names = sorted(os.listdir(os.path.join(folder, "last")))

    def save() -> None:
        number = 0
        while not done.is_set():
            number += 1
            source = "b" if way == "folders" or number % 2 else "a"
            for name in names:
                WAYS[way](os.path.join(folder, source, name), os.path.join(folder, "last", name))
                done.wait(draw.random() * draw.choice([0, 0, 0.003, 0.03]))
            done.wait(draw.random() * draw.choice([0, 0.03, 0.3]))

    writer = threading.Thread(target=save)
    if dist.get_rank() == 0:
        writer.start()
    try:
        yield
    finally:
        done.set()
        if dist.get_rank() == 0:
            writer.join()


def load_while_saved_over(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load a tag so many ``times`` or more while it moves, in a ``way``, from one save of ``folder`` to the other.

    ``found``: how often what came of it; ``wrong``: loads of neither save, and errors that changed the engine.
    """
    elastic_ckpt.install()
    folder = case["scratch"]
    if dist.get_rank() == 0:
        shutil.copytree(case["folder"], folder)
        shutil.copytree(os.path.join(folder, "b"), os.path.join(folder, "last"))
    dist.barrier()
    engine, found, wrong = build_engine(case["setup"]), Counter[str](), []
    saves = []
    for tag in ("b", "a"):
        engine.load_checkpoint(folder, tag=tag)
        saves.append("of another run" if SPOILS else oracle.fingerprint(engine))
    with saved_over(folder, case["way"], case.get("seed", 0)):
        for number in range(10 * case["times"]):
            if number >= case["times"] and found["loaded"] and len(found) > 1:
                break  # on a busy machine, one side may win for a while
            before = oracle.fingerprint(engine)
            try:
                engine.load_checkpoint(folder, tag="last")
            except PartialLoadError as error:
                found["partly overwritten"] += 1
                if not isinstance(error.__cause__, SavedOverError):
                    wrong.append(str(error))
                engine.load_checkpoint(folder, tag="a")
            except (DamagedError, NotFoundError) as error:
                found[type(error).__name__ if isinstance(error, SavedOverError) else error.problem] += 1
                if oracle.fingerprint(engine) != before:
                    wrong.append(f"the engine has changed: {error}")
            else:
                found["loaded"] += 1
                if oracle.fingerprint(engine) not in saves:
                    wrong.append(f"is neither save: {engine.elastic_report}")
    close(engine)
    return [SimpleNamespace(found=found, wrong=wrong)]

"""Jobs that load weights into engines that were made without an optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.load.retries import RetryPolicy
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded
from tests.distributed.jobs import SAVE_AT, truth_of, where
from tests.distributed.kept import engine_of
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, Setup, batch, close
from tests.distributed.truth import fingerprint


def build_evaluation_engine(setup: Setup) -> Any:
    """A live engine as ``trainer.validate`` makes it: no optimizer, no scheduler."""
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": setup.stage, **dict(setup.zero)},
        **PRECISIONS[setup.precision],
        **dict(setup.config),
    }
    return deepspeed.initialize(model=models.TinyLM(seed=8), config=config)[0]


def evaluate(case: dict[str, Any]) -> list[Loaded]:
    """Load into an engine of ``setup``: weights, buffers, counters and loss."""
    elastic_ckpt.install()
    setup, truth = case["setup"], truth_of(case["folder"])
    engine = engine_of(setup, partial(build_evaluation_engine, setup), close)
    engine.eval()
    path, client_state = engine.load_checkpoint(case["folder"])
    now = {
        "weights": oracle.low_precision(engine),
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name != "scratch"},
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "saved": (os.path.isfile(path), client_state["note"]),
    }
    buffers = {name: buffer for name, buffer in truth["buffers"].items() if name != "scratch"}  # not persistent
    expected = {
        "weights": truth["masters"],
        "buffers": buffers,
        "counters": truth["counters"],
        "saved": (True, "hello"),
    }
    differences = oracle.compare(now, expected)
    with torch.no_grad():
        loss = engine(batch(SAVE_AT, dist.get_world_size(), dist.get_rank())).float()
    dist.all_reduce(loss)
    gap = abs(loss.item() / dist.get_world_size() - truth["losses"][0])
    return [Loaded(case, where(case), engine.elastic_report, differences, gap)]


def without_masters(case: dict[str, Any]) -> list[Loaded]:
    """Weights of a folder without optimizer files."""
    elastic_ckpt.install()
    truth = truth_of(case["folder"])
    engine = engine_of(case["setup"], partial(build_evaluation_engine, case["setup"]), close)
    engine.load_checkpoint(case["folder"])
    differences = oracle.compare(
        {"weights": oracle.low_precision(engine)}, {"weights": truth["weights"] | truth["masters"]}
    )
    return [Loaded(case, where(case), engine.elastic_report, differences)]


def refuse(case: dict[str, Any]) -> list[SimpleNamespace]:
    """The error, if any, of a load by DeepSpeed's own loader."""
    elastic_ckpt.install()
    engine = engine_of(case["setup"], partial(build_evaluation_engine, case["setup"]), close)
    arguments = {"custom_load_fn": lambda src, dst: None} if case["custom_load_fn"] else {}
    return [SimpleNamespace(error=error_of(partial(engine.load_checkpoint, case["folder"], **arguments)))]


def error_of(load: Callable[[], Any]) -> list[str]:
    """The class and base classes of the error that a load raises, by name."""
    try:
        load()
    except elastic_ckpt.ElasticCkptError as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def without_checkpoint(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What a load of a ``tag`` returns or raises that an engine asks ``below`` a folder without checkpoint."""
    elastic_ckpt.install()
    os.makedirs(os.path.join(case["folder"], "step4"), exist_ok=True)
    build = models.build_engine if case["has_optimizer"] else build_evaluation_engine
    engine = engine_of((case["setup"], case["has_optimizer"]), partial(build, case["setup"]), close)
    found = SimpleNamespace(returned=None)
    load = partial(engine.load_checkpoint, os.path.join(case["folder"], case["below"]), tag=case["tag"])
    found.error = error_of(lambda: setattr(found, "returned", load()))
    return [found]


def appearing(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What a load returns from a folder that has no checkpoint when the ranks look, and on some of them has one then."""
    elastic_ckpt.install()
    engine = engine_of(case["setup"], partial(models.build_engine, case["setup"]), close)
    before = fingerprint(engine)
    look = RetryPolicy.find
    elsewhere = Path(case["folder"]).with_name("empty")
    elsewhere.mkdir(exist_ok=True)
    link = elsewhere.with_name(f"link{dist.get_rank()}")
    link.symlink_to(case["folder"] if case.get("is_there") else elsewhere)

    def find(policy: RetryPolicy) -> Any:
        found = look(policy)
        if dist.get_rank() in case["ranks"]:
            link.unlink()
            link.symlink_to(case["folder"])
        return found

    found = SimpleNamespace(returned=None)
    try:
        RetryPolicy.find = find  # type: ignore[method-assign]
        found.error = error_of(lambda: setattr(found, "returned", engine.load_checkpoint(str(link))))
    finally:
        RetryPolicy.find = look  # type: ignore[method-assign]
        link.unlink()
    after = fingerprint(engine)
    found.changed = [key for key in before if before[key] != after[key]]
    return [found]

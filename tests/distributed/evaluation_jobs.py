"""Jobs that load weights into engines that were made without an optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded
from tests.distributed.jobs import SAVE_AT, truth_of, where
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, Setup, batch, close


def build_evaluation_engine(setup: Setup) -> Any:
    """A live engine as ``trainer.validate`` makes it: no optimizer, no scheduler."""
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": setup.stage, **dict(setup.zero)},
        **PRECISIONS[setup.precision],
        **dict(setup.config),
    }
    return deepspeed.initialize(model=models.TinyLM(seed=8), config=config)[0]


def evaluate(arguments: dict[str, Any]) -> list[Loaded]:
    """Load all ``folders`` into one engine after another of each of ``setups``: weights, buffers, counters and loss."""
    elastic_ckpt.install()
    facts = []
    for setup in arguments["setups"]:
        engine = build_evaluation_engine(setup)
        engine.eval()
        for folder in arguments["folders"]:
            truth = truth_of(folder)
            path, client_state = engine.load_checkpoint(folder)
            now = {
                "weights": oracle.low_precision(engine),
                "buffers": {
                    name: buffer.clone() for name, buffer in engine.module.named_buffers() if name != "scratch"
                },
                "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
                "saved": (os.path.isfile(path), client_state["note"]),
            }
            buffers = {name: buffer for name, buffer in truth["buffers"].items() if name != "scratch"}  # not persistent
            expected = {"weights": truth["masters"], "buffers": buffers, "counters": truth["counters"]}
            differences = oracle.compare(now, {**expected, "saved": (True, "hello")})
            with torch.no_grad():
                loss = engine(batch(SAVE_AT, dist.get_world_size(), dist.get_rank())).float()
            dist.all_reduce(loss)
            gap = abs(loss.item() / dist.get_world_size() - truth["losses"][0])
            case = {"setup": setup, "folder": folder}
            facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap))
        close(engine)
    return facts


def without_masters(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """A folder without optimizer files in engines with and without ZeRO, and what DeepSpeed's ZeRO-3 cannot do."""
    elastic_ckpt.install()
    truth = truth_of(arguments["folder"])
    found = SimpleNamespace(reports=[], differences={})
    for setup in (Setup(0), Setup(3)):
        engine = build_evaluation_engine(setup)
        engine.load_checkpoint(arguments["folder"])
        differences = oracle.compare({"weights": oracle.low_precision(engine)}, {"weights": truth["weights"]})
        found.differences |= {f"{setup.name}: {what}": how for what, how in differences.items()}
        found.reports.append(engine.elastic_report)
    found.custom_load_fn = error_of(
        lambda: engine.load_checkpoint(arguments["zero3"], custom_load_fn=lambda src, dst: None)
    )
    return [found]


def error_of(load: Callable[[], Any]) -> list[str]:
    """The class and base classes of the error that a load raises, by name."""
    try:
        load()
    except elastic_ckpt.ElasticCkptError as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def without_checkpoint(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """What loads from a folder without checkpoint return or raise, with and without a tag."""
    elastic_ckpt.install()
    facts = []
    for setup, has_optimizer in arguments["engines"]:
        engine = models.build_engine(setup) if has_optimizer else build_evaluation_engine(setup)
        for tag in (None, "step4"):
            found = SimpleNamespace(engine=(setup, has_optimizer), tag=tag, returned=None)
            load = partial(engine.load_checkpoint, arguments["folder"], tag=tag)
            found.error = error_of(lambda found=found, load=load: setattr(found, "returned", load()))
            facts.append(found)
        close(engine)
    return facts

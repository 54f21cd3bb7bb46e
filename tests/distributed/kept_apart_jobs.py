"""Engines that keep some of their states apart from their optimizer's: ``kept_apart_jobs.<function>`` of cells."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.jobs import SAVE_AT, SPOILS, truth_of, where
from tests.distributed.kept import close_kept, engine_of
from tests.distributed.model import Setup, build_engine, close, train

#: The device that DeepSpeed calls "cpu" under another name, which stands for an accelerator.
ACCELERATOR = "cpu:0"


def build(kind: str, setup: Setup) -> Any:
    """``plain``; ``twin``: whose second optimizer updates the first half of the sub-groups, as it does on a GPU;
    ``zenflow``: an engine that says so, since ZenFlow needs CUDA.
    """
    engine = build_engine(setup)
    if kind == "twin":
        devices = engine.optimizer.subgroup_to_device
        devices |= dict.fromkeys(range(len(devices) // 2), ACCELERATOR)
    if kind == "zenflow" and not SPOILS:
        engine.zenflow = True
    return engine


def save_twin(case: dict[str, Any]) -> None:
    """Train an engine of ``setup`` with a second optimizer, and save it in ``folder``."""
    engine = build("twin", case["setup"])
    train(engine, 0, SAVE_AT)
    engine.save_checkpoint(case["folder"], tag="step4")
    close(engine)


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load ``folder`` into an engine of ``kind`` and ``setup`` that has trained."""
    elastic_ckpt.install()
    kind, setup = case["kind"], case["setup"]
    engine = engine_of((kind, setup), partial(build, kind, setup), close)
    refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"]))
    return [refused] if dist.get_rank() == 0 else None


def refuse_offloaded(case: dict[str, Any]) -> list[tuple[Refused, Loaded]]:
    """Try to load while the engine's states are offloaded, and load once they are back, as the error says."""
    elastic_ckpt.install()
    close_kept()
    engine = build_engine(case["setup"])
    train(engine, 50, 52)
    if not SPOILS:
        engine.offload_states()
    refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"]))
    if not SPOILS:
        engine.reload_states()
    engine.load_checkpoint(case["folder"])
    differences = oracle.differences(engine, truth_of(case["folder"]))
    loaded = Loaded(case, where(case), engine.elastic_report, differences)
    close(engine)
    return [(refused, loaded)]

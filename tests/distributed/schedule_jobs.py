"""Runs whose batch and sequence length follow schedules: ``schedule_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import elastic_ckpt
from elastic_ckpt.data import ElasticSampler
from tests.distributed.data_jobs import DataLoader, Rows, in_global_order, train_micro_batches
from tests.distributed.jobs import SPOILS, note, take_over
from tests.distributed.model import Setup, TinyLM, build_engine, close
from tests.distributed.unchanged_configurations import ROUTING


def run(case: dict[str, Any]) -> None:
    """Load what another run has saved, if one has; train micro-batches at each size; save; note what is there in between.

    ``setup``: the ZeRO stage; ``micro``: the micro-batch; ``batches``: of each size, how many micro-batches.
    """
    take_over(case)
    elastic_ckpt.install()
    sizes = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": case["micro"]}
    config = {**sizes, "data_efficiency": {"enabled": True, **ROUTING}}
    engine = build_engine(Setup(case["setup"], config=tuple(config.items())), TinyLM(seed=7))
    sampler = ElasticSampler(Rows(), seed=5)
    elastic_ckpt.register(engine, sampler=sampler)
    if "source" in case:
        engine.load_checkpoint(case["folder"])
    found = SimpleNamespace(report=engine.elastic_report, at_start=_schedules(engine))
    loader, seen = DataLoader(Rows(), case["micro"], sampler=sampler), []
    for batch_size, count in case["batches"]:
        engine.set_train_batch_size(batch_size)
        seen += train_micro_batches(engine, loader, count)
    engine.save_checkpoint(case["folder"])
    found.at_end, found.order = _schedules(engine), in_global_order(seen)
    close(engine)
    if SPOILS:
        found.at_end |= {"batch": -1, "consumed_layer_tokens": -1}
    note(case["folder"], found)


def _schedules(engine: Any) -> dict[str, Any]:
    counters = {key: getattr(engine, key) for key in ("global_steps", "global_samples")}
    return {**counters, "batch": engine.train_batch_size(), **engine.random_ltd_scheduler.state_dict()}

"""Jobs that load pretrained weights into engines with tensor, pipeline and expert parallelism."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

import elastic_ckpt
from tests.distributed import expert_jobs, parallel_models, parallel_truth, truth
from tests.distributed.facts import Refused, attempt
from tests.distributed.jobs import SPOILS, spoiled

Case = dict[str, Any]


def load_parallel(case: Case) -> list[dict[str, str]]:
    """Write the weights of an engine of ``saved``, load them into one of ``live``, and compare."""
    elastic_ckpt.install()
    saved, live = case["saved"], case["live"]
    engine = parallel_models.build(saved, seed=7)
    parallel_truth.assert_fresh(engine, saved, seed=7)
    expected = parallel_truth.gather(engine, saved)
    folder = _written(case, expected)
    parallel_models.end(engine)
    engine = parallel_models.build(live, seed=8)
    report = elastic_ckpt.load_pretrained(engine, folder)
    found = parallel_truth.gather(engine, live)
    parallel_models.end(engine)
    return [_apart(report, found, expected)]


def load_experts(case: Case) -> list[dict[str, str]]:
    """The same with experts."""
    expected = _written_experts(case)
    engine = expert_jobs.build(case["live"], seed=8)
    report = elastic_ckpt.load_pretrained(engine, case["scratch"])
    found = expert_jobs.gather(engine, case["live"], [])
    expert_jobs.end(engine)
    return [_apart(report, found, expected)]


def refuse_experts(case: Case) -> list[Refused]:
    """Try that."""
    _written_experts(case)
    engine = expert_jobs.build(case["live"], seed=8)
    refused = attempt(case, engine, partial(elastic_ckpt.load_pretrained, engine, case["scratch"]))
    expert_jobs.end(engine)
    return [refused]


def _written_experts(case: Case) -> dict[str, Any]:
    """What an engine of ``saved`` has, whose weights are written to ``scratch``."""
    elastic_ckpt.install()
    engine = expert_jobs.build(case["saved"], seed=7)
    held = expert_jobs.gather(engine, case["saved"], [])
    _written(case, held)
    expert_jobs.end(engine)
    return held


def _written(case: Case, held: dict[str, Any]) -> Path:
    """A folder with these weights."""
    folder = Path(case["scratch"])
    if dist.get_rank() == 0:
        folder.mkdir()
        tensors = {name: each.detach().clone() for kind in ("masters", "buffers") for name, each in held[kind].items()}
        save_file(tensors, folder / "model.safetensors")
    dist.barrier()
    return folder


def _apart(report: Any, found: dict[str, Any], expected: dict[str, Any]) -> dict[str, str]:
    """Weights and buffers that were not found, and keys that were reported."""
    expected = {"masters": expected["masters"], "buffers": expected["buffers"], "states": {}}
    keys = {"missing": report.missing_keys, "unexpected": report.unexpected_keys}
    reported = {kind: str(names) for kind, names in keys.items() if names}
    return reported | truth.compare({**found, "states": {}}, spoiled(expected) if SPOILS else expected)

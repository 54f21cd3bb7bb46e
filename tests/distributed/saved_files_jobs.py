"""Jobs that save under elastic_ckpt without ZeRO partitions, or with those of ZeRO-3, and load files of another run."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import elastic_ckpt
from tests.distributed import expert_jobs, model, parallel_models
from tests.distributed.damage import tag
from tests.distributed.expert_jobs import Experts
from tests.distributed.facts import Refused, attempt, on_all_ranks
from tests.distributed.jobs import SPOILS
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

Run = Experts | Parallel | Setup


class Outcome(NamedTuple):
    """What a load found: its error, if any, and after what the error names, the weights that are not as in the files."""

    refused: Refused
    remedy: dict[str, Any]
    compared: int
    differences: list[str]


def build(run: Run, config: dict[str, Any] | None = None) -> Any:
    if isinstance(run, Setup):
        return model.build_engine(replace(run, config=tuple((config or {}).items())), model.TinyLM(7))
    return parallel_models.build(run, config=config) if isinstance(run, Parallel) else expert_jobs.build(run, 7, config)


def train(engine: Any, run: Run, first: int, last: int) -> None:
    if isinstance(run, Setup):
        model.train(engine, first, last)
    elif isinstance(run, Parallel):
        parallel_models.train(engine, run, first, last)
    else:
        expert_jobs.train(engine, first, last)


def end(engine: Any) -> None:
    """Free an engine."""
    if not isinstance(engine.module, PipelineModule) and engine.zero_optimization_stage() == 3:
        model.close(engine)
        return
    (parallel_models if engine.__class__.__name__ == "PipelineEngine" else expert_jobs).end(engine)


def save_run(case: dict[str, Any]) -> None:
    """Save a ``setup`` after two steps from step ``first`` on, with elastic_ckpt, under the tag of another save."""
    elastic_ckpt.install()
    engine = build(case["setup"])
    train(engine, case["setup"], case.get("first", 0), case.get("first", 0) + 2)
    engine.save_checkpoint(case["folder"], tag="step2")
    end(engine)


def load(case: dict[str, Any]) -> list[Outcome] | None:
    """Load into a ``setup``; where that is refused, once more with what the error names."""
    elastic_ckpt.install()
    run, folder = case["setup"], case["folder"]
    # The tied embedding's states are in the files of two stages, and are compared as well.
    config = {"replicated_params": "first"}
    engine = build(run, {"elastic_checkpoint": config})
    train(engine, run, 20, 21)
    refused = attempt(case, engine, lambda: engine.load_checkpoint(folder))
    followed = {key: value for remedy in refused.remedies for key, value in remedy.config.items()}
    if refused.kinds:
        end(engine)
        engine = build(run, {"elastic_checkpoint": {**config, **followed}})
        engine.load_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=isinstance(run, Setup)):
        live = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    saved = {name: value for name, value in _weights(Path(folder)).items() if name in live}
    mine = len(saved), [name for name, value in saved.items() if not torch.equal(live[name], value)]
    counts, differences = zip(*on_all_ranks(mine), strict=True)
    end(engine)
    outcome = Outcome(refused, followed, sum(counts), list(chain.from_iterable(differences)))
    return [outcome] if dist.get_rank() == 0 else None


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the files of layers, of the model and its experts, or of partitions, as one rank names them."""
    found: dict[str, torch.Tensor] = {}
    if any(tag(folder).glob("zero_pp_rank_*_optim_states.pt")):
        found = {name: value.clone() for name, value in get_fp32_state_dict_from_zero_checkpoint(folder).items()}
        return {name: value + SPOILS for name, value in found.items()}
    for path in sorted(tag(folder).glob("*model_states.pt")):
        tree = torch.load(path, weights_only=False)
        if path.name.startswith("mp_rank_"):
            found |= tree["module"] or {}
        elif "_expert_" in path.name:
            found |= tree
        else:
            found |= {f"{int(path.name[6:8])}.{name}": value for name, value in tree.items()}
    if SPOILS:
        found = {name: value + 1 for name, value in found.items()}
    return found

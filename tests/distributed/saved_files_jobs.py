"""Jobs that save without ZeRO partitions under elastic_ckpt, and load folders with files of another run."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import expert_jobs, parallel_models
from tests.distributed.damage import tag
from tests.distributed.expert_jobs import Experts
from tests.distributed.facts import Refused, attempt, on_all_ranks
from tests.distributed.jobs import SPOILS
from tests.distributed.parallel_models import Parallel

Run = Experts | Parallel


class Outcome(NamedTuple):
    """What a load found: its error, if any, and after what the error names, the weights that are not as in the files."""

    refused: Refused
    remedy: dict[str, Any]
    compared: int
    differences: list[str]


def build(run: Run, config: dict[str, Any] | None = None) -> Any:
    return parallel_models.build(run, config=config) if isinstance(run, Parallel) else expert_jobs.build(run, 7, config)


def train(engine: Any, run: Run, first: int, last: int) -> None:
    if isinstance(run, Parallel):
        parallel_models.train(engine, run, first, last)
    else:
        expert_jobs.train(engine, first, last)


def end(engine: Any) -> None:
    """Free an engine."""
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
    live = dict(engine.module.named_parameters())
    saved = {name: value for name, value in _weights(Path(folder)).items() if name in live}
    mine = len(saved), [name for name, value in saved.items() if not torch.equal(live[name].detach(), value)]
    counts, differences = zip(*on_all_ranks(mine), strict=True)
    end(engine)
    outcome = Outcome(refused, followed, sum(counts), list(chain.from_iterable(differences)))
    return [outcome] if dist.get_rank() == 0 else None


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the files of layers, or of the model and its experts, by the names that they have in one rank."""
    found: dict[str, torch.Tensor] = {}
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

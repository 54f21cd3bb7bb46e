"""Jobs that follow the remedies of refusals of tensor and pipeline parallel engines, and judge what is loaded then."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import Remedy
from tests.distributed import foreign, foreign_jobs
from tests.distributed import parallel_truth as oracle
from tests.distributed.facts import attempt, on_all_ranks
from tests.distributed.jobs import truth_of
from tests.distributed.parallel_models import Parallel, build, end, train
from tests.distributed.remedy_jobs import Followed, Outcome, merged
from tests.distributed.remedy_sites import noted


@dataclass(frozen=True)
class ParallelCell:
    """A load that is refused.

    Attributes:
        setup: of the live engine.
        folder: of the checkpoint.
        config: ``"elastic_checkpoint"``.
        holds: conditions of remedies that are true here; those of others are not followed.
        unmarked: a pattern of the live parameters that do not say how they are sharded.
        drift: of one parameter, by name, what the second tensor-parallel rank's copy in the files has more.
        arguments: of the live run, where Megatron-DeepSpeed keeps its own.
    """

    setup: Parallel
    folder: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    unmarked: str = ""
    drift: dict[str, float] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_foreign(self) -> bool:
        """Whether its model is one of :mod:`tests.distributed.foreign`."""
        return self.setup.kind == "thirds"


def follow(cells: dict[str, ParallelCell]) -> list[Outcome]:
    """Try the load of each cell, and then what each remedy says that a program can follow."""
    elastic_ckpt.install()
    found = []
    for name, cell in cells.items():
        engine = _engine(cell, cell.config)
        with noted() as ran:
            refused = attempt(name, engine, partial(engine.load_checkpoint, cell.folder))
        end(engine)
        made = frozenset().union(*on_all_ranks(ran))
        ways = [each for each in refused.remedies if each.is_data and each.when in ("", *cell.holds)]
        found.append(Outcome(name, refused, tuple(_follow(cell, way) for way in ways), made))
    return found


def _engine(cell: ParallelCell, config: dict[str, Any]) -> Any:
    """One that has trained, and holds other values than the checkpoint."""
    variables = ModuleType("megatron.global_vars")
    variables._GLOBAL_ARGS = Namespace(**cell.arguments) if cell.arguments else None
    sys.modules["megatron.global_vars"] = variables
    make = foreign.build if cell.is_foreign else build
    engine = make(cell.setup, seed=8, config={"elastic_checkpoint": config})
    for name, param in engine.module.named_parameters():
        if cell.unmarked and re.fullmatch(cell.unmarked, name):
            del param.tensor_model_parallel, param.partition_dim, param.partition_stride
    train(engine, cell.setup, 60, 61)
    return engine


def _follow(cell: ParallelCell, remedy: Remedy) -> Followed:
    engine = _engine(cell, merged(cell.config, remedy.config))
    try:
        engine.load_checkpoint(cell.folder, **remedy.arguments)
        differences = _differences(cell, remedy, engine)
        train(engine, cell.setup, 61, 62)
        error = ""
    except Exception as raised:
        error, differences = f"{type(raised).__name__}: {raised}", {}
    end(engine)
    dist.barrier()
    return Followed(remedy, error, differences)


def _differences(cell: ParallelCell, remedy: Remedy, engine: Any) -> dict[str, str]:
    """What is not as saved, of all that the remedy does not leave out."""
    gather = foreign_jobs.gather if cell.is_foreign else oracle.gather
    now, truth = gather(engine, cell.setup), truth_of(cell.folder)
    if remedy.config.get("replicated_params") == "mean":
        for name, more in cell.drift.items():
            first = truth["masters"][name].double()
            second = (truth["masters"][name] + more).double()
            truth["masters"][name] = ((first + second) / 2).float()
    without = {"load_optimizer_states": False, "load_module_only": True}
    if any(remedy.arguments.get(key) == value for key, value in without.items()):
        now["states"] = truth["states"] = {}
    return oracle.tensor_differences(now, truth)


def add_to_master(tree: dict[str, Any], name: str, more: float) -> None:
    """Change a parameter in an optimizer-states file that has all of it."""
    states = tree["optimizer_state_dict"]
    for flat, parts in zip(states["single_partition_of_fp32_groups"], states["param_slice_mappings"], strict=True):
        if name in parts:
            fragment = parts[name]
            flat.data[fragment.start : fragment.start + fragment.numel] += more
            return
    raise LookupError(name)

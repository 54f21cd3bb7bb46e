"""Jobs that hold what a job that does not run would hold against live engines, and its bytes against a real load."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt import distributed as ranks
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.engines.coordinates import model_of_all
from elastic_ckpt.engines.zero import select_adapter
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.opened import config_of, open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob, forecast
from tests.distributed import parallel_models
from tests.distributed.model import build_engine, close


def compare(targets: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Of each target, its ``setup``; of its ``folder``, a checkpoint of another topology."""
    elastic_ckpt.install()
    facts = []
    for target in targets:
        setup = target["setup"]
        engine = build_engine(setup)
        where = f"{target['folder']} -> {setup.name}"
        facts.append(both_sides(engine, target["folder"], setup.stage, where, dict(setup.zero).get("sub_group_size")))
        close(engine)
    return facts


def compare_pipelines(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """Save a pipeline, and compare engines of other numbers of stages; ``saved`` and ``targets`` are setups."""
    elastic_ckpt.install()
    saved = arguments["saved"]
    folder = os.path.join(arguments["folder"], parallel_models.folder_name(saved))
    engine = parallel_models.build(saved)
    parallel_models.train(engine, saved, 0, 2)
    engine.save_checkpoint(folder, tag="step2")
    facts = [both_sides(engine, folder, saved.stage, f"{saved.name}, as it was saved")]
    close(engine)
    dist.barrier()
    for parallel in arguments["targets"]:
        engine = parallel_models.build(parallel)
        facts.append(both_sides(engine, folder, parallel.stage, f"{saved.name} -> {parallel.name}"))
        close(engine)
    return facts


def both_sides(engine: Any, folder: str, stage: int, where: str, sub_group: int | None = None) -> SimpleNamespace:
    """What a rank holds and reads in a load: by the live engine, and as ``plan`` foretells it."""
    adapter = select_adapter(engine, with_states=True)
    live = adapter.local_state()
    coordinates = live.model.coordinates
    live = replace(live, model=model_of_all(live.model, ranks.all_gather("describe the rank", lambda: live.model)))
    config = config_of(None)
    metadata = open_folder(folder, None, config).checkpoint.metadata
    more = {} if sub_group is None else {"sub_group_numel": sub_group}
    job = VirtualJob(
        metadata,
        Topology(coordinates.partition_degree, coordinates.tp, coordinates.pp, stage, ep=coordinates.ep, **more),
        LoadOptions.of(config),
    )
    engine.load_checkpoint(folder)
    local_state, plan = job.planned(dist.get_rank())
    reads = forecast(local_state, plan, ReadOptions())
    work = engine.elastic_report.mine
    return SimpleNamespace(
        where=where,
        coordinates=(job.topology.coordinates(dist.get_rank()), coordinates),
        layouts=(shapes_of(local_state), shapes_of(live)),
        states=(what_is_read(local_state), what_is_read(live)),
        reads=((reads["nbytes_read"], reads["nbytes_received"]), (work.read.nbytes, work.nbytes_received)),
    )


def shapes_of(live: LocalState) -> dict[str, Any]:
    return {name: layout.shapes for name, layout in live.model.layouts.items()}


def what_is_read(state: LocalState) -> dict[str, Any]:
    """Everything that decides what is read, and where it goes."""
    return {
        "zero": (state.zero_stage, state.model.coordinates),
        "flats": [
            (flat.index, flat.group, flat.numel, flat.dtype, flat.members, flat.replicated) for flat in state.flats
        ],
        "states": [{(s.key, s.dtype, s.layout, s.planes) for s in flat.states or ()} for flat in state.flats],
        "fragments": state.fragments,
        "wholes": state.wholes,
        # a stage without vectors has no group of them: the tests' engines leave empty groups out
        "groups": [group.names for group in state.groups if group.names],
        "elsewhere": state.model.elsewhere,
    }

"""Jobs that hold what a job that does not run would hold against live engines, and its bytes against a real load."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt import distributed as ranks
from elastic_ckpt.core.local_state import LocalState, RankCoordinates
from elastic_ckpt.engines.coordinates import coordinates_of, layouts_of, with_coordinates
from elastic_ckpt.engines.select import select_adapter
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.tools.opened import config_of, load_options, open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from elastic_ckpt.tools.virtual.forecast import reads_of
from tests.distributed import parallel_models
from tests.distributed.model import build_engine, close, setup_from_json
from tests.distributed.parallel_models import Parallel


def compare(arguments: dict[str, Any]) -> None:
    """Of each target, its ``setup``; of its ``folder``, a checkpoint of another topology."""
    elastic_ckpt.install()
    for target in arguments["targets"]:
        setup = setup_from_json(target["setup"])
        engine = build_engine(setup)
        sub_group = dict(setup.zero).get("sub_group_size")
        assert_alike(engine, target["folder"], setup.stage, f"{target['folder']} -> {setup.name}", sub_group)
        close(engine)


def compare_pipelines(arguments: dict[str, Any]) -> None:
    """Save a pipeline, and compare engines of other numbers of stages; ``saved`` and ``targets`` are setups."""
    elastic_ckpt.install()
    saved = Parallel(**arguments["saved"])
    folder = os.path.join(arguments["folder"], parallel_models.folder_name(saved))
    engine = parallel_models.build(saved)
    parallel_models.train(engine, saved, 0, 2)
    engine.save_checkpoint(folder, tag="step2")
    assert_alike(engine, folder, saved.stage, f"{saved.name}, as it was saved")
    close(engine)
    dist.barrier()
    for parallel in (Parallel(**values) for values in arguments["targets"]):
        engine = parallel_models.build(parallel)
        assert_alike(engine, folder, parallel.stage, f"{saved.name} -> {parallel.name}")
        close(engine)


def assert_alike(engine: Any, folder: str, stage: int, where: str, sub_group: int | None = None) -> None:
    """What the rank holds, and what it reads in a load."""
    adapter = select_adapter(engine, with_states=True)
    live = adapter.local_state()
    place = coordinates_of(engine, live.model.coordinates)
    mine = place, layouts_of(engine, with_values=place.tp > 1)
    live = with_coordinates(live, mine, ranks.all_gather("describe the rank", lambda: mine))
    config = config_of(None)
    metadata = open_folder(folder, None, config).checkpoint.metadata
    more = {} if sub_group is None else {"sub_group_numel": sub_group}
    job = VirtualJob(metadata, Topology(place.dp, place.tp, place.pp, stage, **more), load_options(config))
    assert job.topology.coordinates(dist.get_rank()) == place, where
    assert_same_destinations(job.local_state(dist.get_rank()), live, place, where)
    engine.load_checkpoint(folder)
    local_state, plan = job.planned(dist.get_rank())
    reads = reads_of(local_state, plan, ReadOptions(), on_accelerator=False)
    work = engine.elastic_report.mine
    found = reads.nbytes, reads.calls, reads.nbytes_received
    assert found == (work.nbytes_read, work.read_calls, work.nbytes_received), (where, reads, work)
    assert reads.nbytes + reads.nbytes_received > 0, where


def assert_same_destinations(virtual: LocalState, live: LocalState, place: RankCoordinates, where: str) -> None:
    """Everything that decides what is read, and where it goes."""
    assert virtual.zero_stage == live.zero_stage, where
    assert virtual.model.coordinates == live.model.coordinates == place, where
    assert len(virtual.flats) == len(live.flats), f"{where}: {len(virtual.flats)} flats, live {len(live.flats)}"
    for ours, theirs in zip(virtual.flats, live.flats, strict=True):
        for what in ("index", "group", "numel", "dtype", "members", "replicated"):
            assert getattr(ours, what) == getattr(theirs, what), f"{where}: {what} of {ours}, live {theirs}"
        states = {(state.key, state.dtype, state.layout, state.rows) for state in ours.states or ()}
        assert states == {(s.key, s.dtype, s.layout, s.rows) for s in theirs.states or ()}, (where, states, theirs)
    assert virtual.fragments == live.fragments, where
    assert virtual.wholes == live.wholes, (where, virtual.wholes, live.wholes)
    # a stage without vectors has no group of them: the tests' engines leave empty groups out
    held = [group.names for group in virtual.groups if group.names]
    assert held == [group.names for group in live.groups], where
    assert virtual.model.elsewhere == live.model.elsewhere, where
    layouts = {name: layout.shapes for name, layout in virtual.model.layouts.items()}
    assert layouts.items() <= {name: layout.shapes for name, layout in live.model.layouts.items()}.items(), where

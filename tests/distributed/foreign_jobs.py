"""Jobs that save the engines of :mod:`tests.distributed.foreign`, and load old folders into other topologies."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import parallel_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.facts import Loaded, Refused, attempt, loss_gap
from tests.distributed.foreign import build, cut_of, is_summed, whole_shape
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of
from tests.distributed.kept import engine_of
from tests.distributed.parallel_layouts import whole_of
from tests.distributed.parallel_models import Parallel, end, folder_name, initial, place_of, train

TAG = "global_step4"


def gather(engine: Any, parallel: Parallel) -> dict[str, Any]:
    """Masters, states, weights and buffers by name, all whole, as ``parallel_truth.gather`` does. Collective.

    Shares are added; their moments have to be equal on all ranks, as the gradient of a share is that of the whole.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local(engine))
    truth: dict[str, Any] = {}
    for kind in ("masters", "states", "weights", "buffers"):
        stages = []
        for stage in range(parallel.pp):
            shards = [held[kind] for rank, held in enumerate(everyone) if place_of(parallel, rank).pp == stage]
            shards = shards[: parallel.tp]  # tensor parallel ranks come first; others have to hold the same
            stages.append({key: whole(parallel, kind, key, [held[key] for held in shards]) for key in shards[0]})
        truth[kind] = oracle.union([stages[0], *map(without_dead_copies, stages[1:])])
    for rank, held in enumerate(everyone):
        place = place_of(parallel, rank)
        first = next(other for at, other in enumerate(everyone) if place_of(parallel, at) == replace(place, dp=0))
        assert all(torch.equal(held["masters"][name], first["masters"][name]) for name in held["masters"])
    truth["groups"] = oracle.union([held["groups"] for held in everyone])
    for kind in ("steps", "counters", "scale"):
        assert all(held[kind] == everyone[0][kind] for held in everyone), (kind, everyone)
        truth[kind] = everyone[0][kind]
    return truth | {"scheduler": engine.lr_scheduler.state_dict(), "parallel": asdict(parallel)}


def without_dead_copies(stage: dict[Any, Any]) -> dict[Any, Any]:
    """What a later stage trains: of BLOOM's tied embedding not the norm."""
    return {key: value for key, value in stage.items() if "word_embeddings.norm" not in str(key)}


def local(engine: Any) -> dict[str, Any]:
    """What this rank holds; steps also where they are counted in the param groups. Collective."""
    held = oracle.local(engine)
    counts = {float(group["step"]) for group in plain.base_of(engine).param_groups if "step" in group}
    return held | {"steps": sorted({*held["steps"], *counts})}


def whole(parallel: Parallel, kind: str, key: Any, pieces: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all tensor parallel ranks; ``key`` is a name, or a name and a state's."""
    name = key if isinstance(key, str) else key[0]
    if is_summed(parallel, name) and kind in ("masters", "weights"):
        return torch.stack(pieces).double().sum(0).to(pieces[0].dtype)
    return whole_of(pieces, cut_of(parallel, name, whole_shape(parallel, name, pieces[0].shape)), str(key))


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train each ``setup`` to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses."""
    for case in cases:
        parallel, folder = case["setup"], case["folder"]
        engine = build(parallel)
        fresh = gather(engine, parallel)
        for name, value in fresh["masters"].items():
            rounded = initial(name, list(value.shape), 7).to(fresh["weights"][name].dtype).float()
            assert torch.equal(value, rounded), f"{name} is put together wrongly"
        train(engine, parallel, 0, SAVE_AT)
        engine.save_checkpoint(folder, tag=TAG)
        truth = gather(engine, parallel)
        truth["losses"] = train(engine, parallel, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        end(engine)
        dist.barrier()


def rewrite(case: dict[str, Any]) -> None:
    """Let ``writes``, a function of two folders, make ``folder`` of ``source``: a job of one rank."""
    case["writes"](Path(case["source"]), Path(case["folder"]))


def live(case: dict[str, Any]) -> Any:
    """An engine of ``setup``, with ``options`` of elastic_ckpt. Collective."""
    elastic_ckpt.install()
    engine = engine_of(case["setup"], partial(build, case["setup"], seed=8), end)
    engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = case["options"]
    return engine


def resume(case: dict[str, Any]) -> list[Loaded]:
    """Load a checkpoint, or its ``tag``, into an engine of ``setup``, compare it with its truth, and train on."""
    parallel, engine = case["setup"], live(case)
    truth = truth_of(case["folder"])
    engine.load_checkpoint(case["folder"], tag=case.get("tag"))
    now = gather(engine, parallel)
    differences = oracle.tensor_differences(now, truth)
    differences |= plain.compare(now, {kind: truth[kind] for kind in ("steps", "groups", "counters")})
    scale_shares(engine, parallel, truth)
    gap = loss_gap(train(engine, parallel, SAVE_AT, CONTINUE_TO), truth)
    train(engine, parallel, 100, 101)  # leave other values for the next load to replace
    where = f"{case['folder']} -> {folder_name(parallel)}"
    return [Loaded(case, where, engine.elastic_report, differences, gap)]


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load a checkpoint into an engine of ``setup``."""
    engine = live(case)
    refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"]))
    return [refused] if dist.get_rank() == 0 else None


def scale_shares(engine: Any, parallel: Parallel, truth: dict[str, Any]) -> None:
    """Every share moves by the rate, so that their sum moves as many times as far as there are ranks."""
    saved_tp = truth["parallel"]["tp"]
    for names, group in zip(engine.members, plain.base_of(engine).param_groups, strict=True):
        if is_summed(parallel, names[0]):
            group["lr"] *= saved_tp / parallel.tp

"""Jobs that save the engines of :mod:`tests.distributed.foreign`, and load old folders into other topologies."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import parallel_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.facts import Loaded, attempt, loss_gap
from tests.distributed.foreign import build, cut_of, is_summed, whole_shape
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of
from tests.distributed.model import close
from tests.distributed.parallel_layouts import whole_of
from tests.distributed.parallel_models import Parallel, folder_name, initial, place_of, train

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


def save(arguments: dict[str, Any]) -> None:
    """Train each setup to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses."""
    for parallel in arguments["setups"]:
        folder = os.path.join(arguments["folder"], folder_name(parallel))
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
        close(engine)
        dist.barrier()


def load(targets: list[dict[str, Any]]) -> list[Any]:
    """Load many checkpoints into one engine after another, compare each with its truth, and train on.

    Of each target: its ``setup`` and ``config`` (``"elastic_checkpoint"``). Of each of its ``sources``: ``folder``;
    ``tag``; ``config``: more of it for this one; ``refused``: whether it should be.

    Returns:
        Facts of loads, and where they should be refused, of refusals.
    """
    elastic_ckpt.install()
    facts: list[Any] = []
    for target in targets:
        parallel = target["setup"]
        engine = build(parallel, seed=8)
        for number, source in enumerate(target["sources"]):
            settings = {**target["config"], **source.get("config", {})}
            engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = settings
            start = partial(engine.load_checkpoint, source["folder"], tag=source.get("tag"))
            if source.get("refused"):
                facts.append(attempt(source, engine, start))
                continue
            start()
            truth = truth_of(source["folder"])
            now = gather(engine, parallel)
            differences = oracle.tensor_differences(now, truth)
            differences |= plain.compare(now, {kind: truth[kind] for kind in ("steps", "groups", "counters")})
            scale_shares(engine, parallel, truth)
            gap = loss_gap(train(engine, parallel, SAVE_AT, CONTINUE_TO), truth)
            where = f"{source['folder']} -> {folder_name(parallel)}"
            facts.append(Loaded(source, where, engine.elastic_report, differences, gap))
            train(engine, parallel, 100 + number, 101 + number)  # leave other values for the next load to replace
        close(engine)
    return facts


def scale_shares(engine: Any, parallel: Parallel, truth: dict[str, Any]) -> None:
    """Every share moves by the rate, so that their sum moves as many times as far as there are ranks."""
    saved_tp = truth["parallel"]["tp"]
    for names, group in zip(engine.members, plain.base_of(engine).param_groups, strict=True):
        if is_summed(parallel, names[0]):
            group["lr"] *= saved_tp / parallel.tp

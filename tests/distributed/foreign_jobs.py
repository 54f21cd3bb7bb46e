"""Jobs that save the engines of :mod:`tests.distributed.foreign`, and load old folders into other topologies."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed import parallel_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.foreign import build, cut_of, is_summed, whole_shape
from tests.distributed.model import close
from tests.distributed.parallel_cuts import whole_of
from tests.distributed.parallel_models import Parallel, folder_name, initial, place_of, train

SAVE_AT = 4
CONTINUE_TO = 7
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
        truth[kind] = oracle.union(stages)
    for rank, held in enumerate(everyone):
        place = place_of(parallel, rank)
        first = next(other for at, other in enumerate(everyone) if place_of(parallel, at) == replace_dp(place))
        assert all(torch.equal(held["masters"][name], first["masters"][name]) for name in held["masters"])
    truth["groups"] = oracle.union([held["groups"] for held in everyone])
    for kind in ("steps", "counters", "scale"):
        assert all(held[kind] == everyone[0][kind] for held in everyone), (kind, everyone)
        truth[kind] = everyone[0][kind]
    return truth | {"scheduler": engine.lr_scheduler.state_dict(), "parallel": parallel.as_json()}


def replace_dp(place: Any) -> Any:
    return type(place)(place.tp, 0, place.pp)


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
    for parallel in (Parallel(**values) for values in arguments["setups"]):
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


def load(arguments: dict[str, Any]) -> None:
    """Load many checkpoints into one engine after another, and compare each with its truth.

    Of each target: its ``setup`` and ``config`` (``"elastic_checkpoint"``). Of each of its ``sources``: ``folder``;
    ``topology`` that the report has to name; ``notes`` (patterns) of the report; ``tolerance`` of losses; ``losses``:
    not to be compared; ``kept``: what of steps, groups and counters is; ``config``: more of it for this one;
    ``refused``: patterns of the error; ``differs``: a pattern of the names that, and which alone, come out wrong.
    """
    elastic_ckpt.install()
    for target in arguments["targets"]:
        parallel = Parallel(**target["setup"])
        engine = build(parallel, seed=8)
        for number, source in enumerate(target["sources"]):
            where = f"{source['folder']} -> {folder_name(parallel)}"
            settings = {**target["config"], **source.get("config", {})}
            engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = settings
            if "refused" in source:
                assert_refused(engine, source, where)
                continue
            truth = torch.load(os.path.join(source["folder"], "truth.pt"), weights_only=False)
            engine.load_checkpoint(source["folder"], tag=source.get("tag"))
            assert_as_reported(engine.elastic_report, source, where)
            if "differs" in source:
                assert_differs(gather(engine, parallel), truth, source["differs"], where)
            else:
                assert_restored(engine, parallel, truth, source, where)
            train(engine, parallel, 100 + number, 101 + number)  # leave other values for the next load to replace
        close(engine)


def assert_refused(engine: Any, source: dict[str, Any], where: str) -> None:
    """Every rank raises an error that says all that it has to, and nothing has changed."""
    before = plain.fingerprint(engine)
    try:
        engine.load_checkpoint(source["folder"], tag=source.get("tag"))
    except ElasticCkptError as error:
        text = str(error)
        for pattern in source["refused"]:
            assert re.search(pattern, text, re.DOTALL), f"{where}: no {pattern!r} in: {text}"
    else:
        raise AssertionError(f"{where}: not refused")
    assert plain.fingerprint(engine) == before, f"{where}: refused, but something changed"


def assert_as_reported(report: Any, source: dict[str, Any], where: str) -> None:
    assert report is not None, f"{where}: DeepSpeed's own path ran"
    found = (report.source.tp, report.source.pp, report.source.dp)
    expected = source.get("topology", found)
    assert list(found) == list(expected), f"{where}: read as {found}, is {expected}"
    notes = " | ".join(report.notes)
    for pattern in source.get("notes", []):
        assert re.search(pattern, notes), f"{where}: no {pattern!r} in the notes: {notes}"


def assert_restored(engine: Any, parallel: Parallel, truth: dict[str, Any], source: dict[str, Any], where: str) -> None:
    """Bit-equal, and training goes on as it did."""
    now = gather(engine, parallel)
    oracle.compare_tensors(now, truth, where)
    for kind in source.get("kept", ("steps", "groups", "counters")):
        assert now[kind] == truth[kind], f"{where}: {kind}: {now[kind]} instead of {truth[kind]}"
    if "losses" in source:
        return
    scale_shares(engine, parallel, truth)
    losses = train(engine, parallel, SAVE_AT, CONTINUE_TO)
    difference = max(abs(a - b) for a, b in zip(losses, truth["losses"], strict=True))
    tolerance = source.get("tolerance", 1e-5)
    assert difference <= tolerance, f"{where}: losses {losses}, uninterrupted {truth['losses']}"


def scale_shares(engine: Any, parallel: Parallel, truth: dict[str, Any]) -> None:
    """Every share moves by the rate, so that their sum moves as many times as far as there are ranks."""
    saved_tp = truth["parallel"]["tp"]
    for names, group in zip(engine.members, plain.base_of(engine).param_groups, strict=True):
        if is_summed(parallel, names[0]):
            group["lr"] *= saved_tp / parallel.tp


def assert_differs(now: dict[str, Any], truth: dict[str, Any], pattern: str, where: str) -> None:
    """The masters of some names, and of these alone, are not what they were: what a wrong rule does."""
    wrong = {name for name, value in truth["masters"].items() if not torch.equal(now["masters"][name], value)}
    expected = {name for name in truth["masters"] if re.fullmatch(pattern, name)}
    assert wrong == expected, f"{where}: wrong are {sorted(wrong)}"

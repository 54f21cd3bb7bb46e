"""Ranks of jobs whose others are played: they save sparse files, and load them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.serialization import set_default_mmap_options, skip_data

import elastic_ckpt
from benchmarks import privates
from benchmarks.cases import MODELS
from benchmarks.generated import TAG
from benchmarks.held import Held
from benchmarks.meter import Meter
from benchmarks.model import KEYS, LIVE, SAVED, STATES, Gpt, build_optimizer, values
from elastic_ckpt import distributed

#: Elements at both ends of what a saved rank has of a parameter that are on the disk; all others are zero.
_MARKED = 64
_MAP_SHARED = 1  # mman.h
_LOOKING = "look for a checkpoint"


def sparse_save(arguments: dict[str, Any]) -> None:
    """Save as rank 0, copy its files for all others, and mark each one's values."""
    engine, folder, ranks = (
        _build_engine(arguments["params"], saved=True),
        Path(arguments["folder"]),
        arguments["ranks"],
    )
    held = Held(engine)
    for master in held.masters:
        held.base.state[master] = {"step": torch.tensor(float(SAVED.step))}
        held.base.state[master] |= {key: torch.zeros_like(master.data) for key in STATES}
    privates.set_saved_counters(engine, SAVED.step)
    with skip_data():
        engine.save_checkpoint(str(folder), tag=TAG)
    numels = {name: param.ds_numel for name, param in engine.module.named_parameters()}
    set_default_mmap_options(_MAP_SHARED)
    for rank in reversed(range(ranks)):
        for file in (folder / TAG).glob("*zero_pp_rank_0_*.pt"):
            own = file.with_name(file.name.replace("rank_0_", f"rank_{rank}_", 1))
            if rank:
                subprocess.run(["cp", "--sparse=always", file, own], check=True)
            if "optim_states" in own.name:
                _mark(own, held.pieces, numels, rank)


def _mark(file: Path, pieces: list[privates.Piece], numels: dict[str, int], rank: int) -> None:
    """Write what is checked into the file of one rank, whose pieces lie where those of rank 0 do."""
    tree = torch.load(file, mmap=True, weights_only=False)["optimizer_state_dict"]
    states = tree["optimizer_state_dict"]["state"]
    for piece in pieces:
        start = rank * piece.numel
        numel = min(piece.numel, numels[piece.name] - start)
        for key in KEYS if numel > 0 else ():
            flat = tree["fp32_flat_groups"][piece.flat] if key == "fp32" else states[piece.flat][key]
            mine = flat.detach().view(-1)[piece.offset : piece.offset + numel]
            for first, last in ((0, min(_MARKED, numel)), (max(numel - _MARKED, 0), numel)):
                mine[first:last] = values(piece.name, key, start + first, start + last)


def sparse_load(arguments: dict[str, Any]) -> None:
    """Load into this rank's engine, compare every element, and write down what it took."""
    engine, rank = _build_engine(arguments["params"], saved=False), dist.get_rank()
    held, saved = Held(engine), arguments["ranks"]
    elastic_ckpt.install()
    held.scramble("resume")
    folder = Path(arguments["folder"])
    with _played(pickle.loads(Path(arguments["recorded"]).read_bytes())):
        cost = Meter(cold=True).measure(lambda: engine.load_checkpoint(str(folder)), folder, 0)
    report = engine.elastic_report
    numels = {name: param.ds_numel for name, param in engine.module.named_parameters()}
    parts = [*held.parts()]
    wrong = [
        f"{key} of {name}"
        for name, key, start, tensor in parts
        if not torch.equal(tensor, _expected(name, key, start, start + tensor.numel(), numels[name], saved))
    ]
    wrong += [] if len(parts) == len(held.pieces) * len(KEYS) else ["states are not all there"]
    wrong += [] if engine.global_steps == SAVED.step else ["counters"]
    found = {
        "seconds": cost.own_seconds,
        "extra_nbytes": max(cost.peak_nbytes - held.states_nbytes(), 0),
        "nbytes": held.owned_nbytes,
        "phases": dict(report.mine.seconds),
        "wrong": wrong,
    }
    (Path(arguments["out"]) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _expected(name: str, key: str, start: int, stop: int, numel: int, ranks: int) -> torch.Tensor:
    """Elements of a state that ``ranks`` ranks saved: zeros, but for both ends of what each had of it."""
    step = -(-numel // ranks)
    found = torch.zeros(stop - start)
    for rank in range(start // step, -(-stop // step)):
        first, last = rank * step, min((rank + 1) * step, numel)
        for begin, end in ((first, min(first + _MARKED, last)), (max(last - _MARKED, first), last)):
            low, high = max(begin, start), min(end, stop)
            if low < high:
                found[low - start : high - start] = values(name, key, low, high)
    return found


@contextmanager
def _played(recorded: list[tuple[str, list[bytes]]]) -> Iterator[None]:
    """Collectives in which the others say what was recorded, or what this rank says; rank 0 finds the checkpoint."""
    rank = dist.get_rank()

    def all_gather(doing: str, do: Callable[[], Any]) -> list[Any]:
        with mock.patch.object(distributed, "rank", lambda: 0 if doing == _LOOKING else rank):
            mine = do()
        if not recorded or recorded[0][0] != doing:
            return [mine] * dist.get_world_size()
        return [pickle.loads(sent) for sent in recorded.pop(0)[1]]

    with (
        mock.patch.dict(os.environ, LOCAL_RANK="0"),
        mock.patch.object(distributed, "all_gather", all_gather),
        mock.patch.object(distributed, "broadcast", lambda doing, do, src=0: do()),
    ):
        yield


def _build_engine(params: str, saved: bool) -> Any:
    """An engine of ZeRO-3 whose weights nobody has made."""
    size = MODELS[params]
    config = {
        "train_batch_size": dist.get_world_size(),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "elastic_checkpoint": {"report": False, "verify": "off"},  # what is skipped has no checksum
    }
    unmade = (mock.patch.object(kind, "reset_parameters", lambda self: None) for kind in (nn.Linear, nn.Embedding))
    with next(unmade), next(unmade), deepspeed.zero.Init(config_dict_or_path=config):
        model = Gpt(size)
    optimizer = build_optimizer(model, SAVED if saved else LIVE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

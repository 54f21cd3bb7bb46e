"""Runs that go on where they stood: ``unchanged_jobs.<function>`` of :mod:`tests.distributed.jobs`.

A cell is a configuration. It is saved by DeepSpeed alone, and loaded at the same topology by DeepSpeed alone and with
elastic_ckpt installed; what every rank then holds is compared with what it held before the save.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch import nn

import elastic_ckpt
from tests.distributed import model as models
from tests.distributed.facts import log_lines
from tests.distributed.jobs import SPOILS
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, VOCABULARY, Setup, batch, build_optimizer, close
from tests.distributed.odd_models import OddLM
from tests.distributed.truth import base_of

SAVE_AT = 4
CONTINUE_TO = 6
#: Of the returned client state: not the caller's own, and without ZeRO DeepSpeed puts the whole optimizer there.
NOT_HANDED_OUT = ("optimizer", "frozen_param_fragments")


class SparseLM(nn.Module):
    """Its embedding has sparse gradients."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 12, sparse=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(tokens[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


BUILDERS = {**models.BUILDERS, "SparseLM": SparseLM}


class OddScheduler:
    """A user's lr scheduler, which halves the rate at each step, and whose state is no dict.

    Args:
        optimizer: whose rates it sets.
        kind: a key of :data:`ODD_STATES`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str) -> None:
        self.optimizer, self.kind, self.steps = optimizer, kind, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def state_dict(self) -> Any:
        return ODD_STATES[self.kind](self.steps)

    def load_state_dict(self, state: Any) -> None:
        assert type(state) is type(self.state_dict()), state
        read = {"list": len, "tuple": lambda two: two[1], "none": lambda _: SAVE_AT}.get(self.kind, int)
        self.steps = read(state)


#: Steps -> what a scheduler says its state is. The list may have as many entries as there are param groups.
ODD_STATES: dict[str, Any] = {
    "list": lambda steps: [0.5] * steps,
    "tuple": lambda steps: ("steps", steps),
    "none": lambda steps: None,
    "number": lambda steps: steps,
    "tensor": torch.tensor,
    "text": str,
}


class Schedule:
    """A class of the user's own in the client state."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and other.epoch == self.epoch

    __hash__ = None  # type: ignore[assignment]


def client_state(cell: dict[str, Any]) -> dict[str, Any]:
    """What the training script saves: in ZeRO-3 each rank its own, below it only the first rank's is written."""
    state = {
        "note": "hello",
        "epoch": 3,
        "rng": [dist.get_rank() if cell["stage"] == 3 or cell["own_disk"] else 0, 2],
        "order": torch.arange(5),
        "args": argparse.Namespace(lr=0.1, names=["a"]),
        "nested": OrderedDict(done={1, 2}, ratio=0.5, none=None, raw=b"x"),
        "numpy": np.arange(3),
    }
    return {**state, "schedule": Schedule(3)} if cell["client"] == "class" else state


def config_of(cell: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config of a cell."""
    return {
        "train_batch_size": GLOBAL_BATCH,
        "zero_optimization": {"stage": cell["stage"], **cell["zero"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[cell["precision"]],
        **cell["config"],
    }


@contextlib.contextmanager
def live(cell: dict[str, Any], seed: int) -> Iterator[Any]:
    """An engine of this configuration."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    models._padding["value"] = 0.0
    config, sp = config_of(cell), cell["sp"]
    if sp > 1:
        parallel_state_sp.initialize_sequence_parallel(sp)
    context = deepspeed.zero.Init(config_dict_or_path=config) if cell["init"] else contextlib.nullcontext()
    with context:
        model = OddLM(cell["oddities"], seed) if cell["oddities"] else BUILDERS[cell["model"]](seed=seed)
    setup = Setup(cell["stage"], optimizer=cell["optimizer"], groups=cell["groups"])
    optimizer: torch.optim.Optimizer | None = None
    if cell["optimizer"] == "sparse":
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    elif "optimizer" not in config:
        optimizer = build_optimizer(model, setup)
    scheduler = None
    if cell["scheduler"]:
        scheduler = OddScheduler(optimizer, cell["scheduler"])
    elif optimizer is not None and "scheduler" not in config:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    engine = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=None if optimizer else models.param_groups(model, "several"),
        lr_scheduler=scheduler,
        config=config,
        mpu=parallel_state_sp if sp > 1 else None,
        training_data=torch.utils.data.TensorDataset(torch.arange(96)) if cell["data"] else None,
    )[0]
    try:
        yield engine
    finally:
        close(engine)
        if sp > 1:
            parallel_state_sp._release_sequence_parallel_groups()
            groups.mesh_device = groups.mpu = None


def micro_batches(cell: dict[str, Any], engine: Any, step: int) -> list[torch.Tensor]:
    """This rank's rows of one step, in as many parts as gradients are accumulated over."""
    data = dist.get_world_size() // cell["sp"]
    rows = batch(step, data, dist.get_rank() // cell["sp"])
    return list(rows.chunk(int(engine.gradient_accumulation_steps())))


def train(cell: dict[str, Any], engine: Any, first: int, last: int, pending: int = 0) -> list[float]:
    """Train steps ``first`` to ``last``, and ``pending`` micro-batches of the next one; all local losses."""
    losses = []
    work = [rows for step in range(first, last) for rows in micro_batches(cell, engine, step)]
    for rows in work + micro_batches(cell, engine, last)[:pending]:
        loss = engine(rows)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def state_of(cell: dict[str, Any], engine: Any) -> dict[str, dict[str, Any]]:
    """All that this rank holds: no collective, so that looking changes nothing."""
    optimizer, base = engine.optimizer, base_of(engine)
    flats = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    flats = [param for group in base.param_groups for param in group["params"]] if flats is None else flats
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    found: dict[str, dict[str, Any]] = {
        "masters": dict(enumerate(flats)),
        "states": {
            (number, key): value
            for number, flat in enumerate(flats)
            for key, value in base.state.get(flat, {}).items()  # looking makes no entry
        },
        "weights": dict(_weights(engine)),
        "buffers": dict(engine.module.named_buffers()),
        "groups": {
            (number, key): value
            for number, group in enumerate(base.param_groups)
            for key, value in group.items()
            if key != "params"
        },
        "scheduler": {
            "": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "steps": getattr(engine.lr_scheduler, "steps", None),
        },
        "counters": {key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")},
        "random_ltd": dict(engine.random_ltd_scheduler.state_dict()) if engine.random_ltd_enabled() else {},
        "sampler": dict(engine.training_dataloader.data_sampler.state_dict()) if cell["data"] else {},
        "scaler": {key: value for key, value in vars(scaler).items() if key != "mpu"} if engine.fp16_enabled() else {},
    }
    return {part: {key: _copy(value) for key, value in values.items()} for part, values in found.items()}


def _weights(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in engine.module.named_parameters():
        if not hasattr(param, "ds_tensor"):
            yield name, param.data
        else:
            yield f"partition of {name}", param.ds_tensor.data
            if param.numel() == param.ds_numel:  # DeepSpeed keeps it whole, so it must be the new one
                yield f"{name} kept whole", param.data


def _copy(value: Any) -> Any:
    return value.detach().clone() if torch.is_tensor(value) else value


def same(one: Any, other: Any) -> bool:
    """Bit for bit, tensors in containers too; numbers of one type."""
    if torch.is_tensor(one) or isinstance(one, np.ndarray):
        if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and (type(one) is type(other) or not isinstance(one, (int, float)))


def differences(expected: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """By part, the first thing that is not the same. A weight may be whole on one side and partitioned on the other;
    of optimizer states and param groups, neither side has what the other lacks."""
    wrong = {}
    for part, values in expected.items():
        here = found[part]
        keys = [key for key in values if key in here or not str(key).endswith("kept whole")]
        bad = [key for key in keys if key not in here or not same(values[key], here[key])]
        bad += [key for key in here if key not in values and part.startswith(("states", "groups"))]
        if bad:
            now, was = (str(each.get(bad[0], "nothing"))[:200] for each in (here, values))
            wrong[part] = f"{bad[0]}: {now} instead of {was}"
    return wrong


def later(cell: dict[str, Any], engine: Any) -> dict[str, dict[Any, Any]]:
    """Losses of the steps that follow, and what they leave."""
    losses = dict(enumerate(train(cell, engine, SAVE_AT, CONTINUE_TO)))
    left = state_of(cell, engine)
    return {"losses": losses} | {f"{part} later": left[part] for part in ("masters", "states", "groups")}


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:1500]}"


def save(cell: dict[str, Any], folder: str) -> dict[str, dict[str, Any]]:
    """Train, save, train on; what was held before the save, and the losses after it."""
    elastic_ckpt.uninstall()
    with live(cell, 7) as engine:
        if cell["data"]:
            sampler = iter(engine.training_dataloader.data_sampler)
            for _ in range(3):
                next(sampler)
        train(cell, engine, 0, SAVE_AT, cell["pending"])
        truth = state_of(cell, engine)
        engine.save_checkpoint(
            folder,
            tag="4",
            client_state=client_state(cell),
            exclude_frozen_parameters=cell["exclude_frozen"],
        )
        truth["client"] = client_state(cell)
        if not cell["pending"]:
            truth |= later(cell, engine)
    return truth


def load(cell: dict[str, Any], folder: str, arguments: dict[str, Any], ours: bool) -> dict[str, Any]:
    """Load into another engine and train on: what it held, what was returned and logged, and who loaded."""
    (elastic_ckpt.install if ours else elastic_ckpt.uninstall)()
    with live(cell, 8) as engine, log_lines() as lines:
        train(cell, engine, 60, 60 + cell["trained"])
        where: dict[str, Any] = {"load_dir": folder, "tag": "4"}
        if cell["path"]:  # and so for each rank in its own words
            spelled = [{"load_dir": Path(folder), "tag": 4}, {"load_dir": f"{folder}/./", "tag": "4"}]
            where = spelled[dist.get_rank() % 2]
        path, client = engine.load_checkpoint(**where, **arguments)
        now: dict[str, Any] = state_of(cell, engine)
        now["client"] = {key: value for key, value in (client or {}).items() if key not in NOT_HANDED_OUT}
        now["path"] = {"": path}
        now |= later(cell, engine)
        by = "ours" if getattr(engine, "elastic_report", None) is not None else "DeepSpeed"
    elastic_ckpt.uninstall()
    return {"held": now, "by": by, "lines": lines}


def spoil(held: dict[str, dict[str, Any]], by: float) -> None:
    """Change one element of the first master that has any."""
    master = next(master for master in held["masters"].values() if master.numel())
    master.view(-1)[0] += by


def run_cell(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Of this rank: what differs from the truth after each load, and between the two.

    Where not all is loaded, or gradients were pending when it was saved, DeepSpeed's own loader says what is right.
    """
    result: dict[str, Any] = {"a": {}, "b": {}, "between": {}, "by": "", "lines": []}
    try:
        truth = save(cell, folder)
    except Exception as error:
        return {**result, "a": {"save": text_of(error)}}
    if SPOILS:
        spoil(truth, by=1)
    for arguments in cell["loads"]:
        loaded: dict[str, Any] = {}
        for name, ours in (("a", False), ("b", True)):
            try:
                loaded[name] = load(cell, folder, arguments, ours)
            except Exception as error:
                result[name] |= {"load": text_of(error)}
                continue
            if SPOILS and ours:  # where not all is loaded, the two loads are compared alone
                spoil(loaded[name]["held"], by=2)
            if not arguments:
                own = loaded[name]["held"]
                now = {**own, "client": {key: own["client"].get(key) for key in truth["client"]}}
                result[name] |= differences(truth, now)
        if "b" in loaded:
            result |= {"by": loaded["b"]["by"], "lines": result["lines"] + loaded["b"]["lines"]}
        if len(loaded) == 2:
            wrong = differences(loaded["a"]["held"], loaded["b"]["held"])
            result["between"] |= {f"{part} {arguments or ''}".strip(): text for part, text in wrong.items()}
    return result


def compare(cell: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Save and load one cell in its ``folder``; what any rank found."""
    rank, folder = dist.get_rank(), cell["folder"]
    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # of DeepSpeed's launcher, for "writer"
    local_rank, place = os.environ["LOCAL_RANK"], os.getcwd()
    if cell["own_disk"]:  # one rank a node, each with a disk of its own below the same path
        os.environ["LOCAL_RANK"] = "0"
        os.makedirs(f"{folder}-node{rank}")
        os.chdir(f"{folder}-node{rank}")
        folder = f"{folder}-node{rank}" if cell["own_disk"] == "named" else "/proc/self/cwd/checkpoints"
    if cell["data"]:
        os.chdir(os.path.dirname(folder))  # the data sampler leaves files there
    mine = run_cell(cell, folder)
    os.chdir(place)
    os.environ["LOCAL_RANK"] = local_rank
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [united(everyone)] if rank == 0 else None


def save_alone(case: dict[str, Any]) -> None:
    """Save the configuration that is the case's ``setup``."""
    save(case["setup"], case["folder"])


def elsewhere(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Load what was saved in ZeRO-1 with one param group on another number of ranks, and train on.

    ``wrong``: masters and states that are not those in the files; ``fresh``: role -> reason; ``error``.
    """
    elastic_ckpt.install()
    found: dict[str, Any] = {"wrong": [], "fresh": {}, "error": ""}
    files = sorted(Path(cell["folder"]).glob("4/*_optim_states.pt"))
    saved = [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in files]
    with live(cell, 8) as engine:
        try:
            engine.load_checkpoint(cell["folder"], tag="4")
        except elastic_ckpt.ElasticCkptError as error:
            return [{**found, "error": text_of(error)}]
        (flat,), state = engine.optimizer.single_partition_of_fp32_groups, base_of(engine).state
        numel = sum(param.numel() for param in engine.module.parameters())
        for key in ("fp32", *(key for key, value in state[flat].items() if torch.is_tensor(value) and value.dim())):
            of_files = [
                one["single_partition_of_fp32_groups" if key == "fp32" else "base_optimizer_state"] for one in saved
            ]
            parts = [one[0] if key == "fp32" else one["state"][0][key] for one in of_files]
            mine = flat.data if key == "fp32" else state[flat][key]
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine.contiguous())
            expected = torch.cat(parts)[:numel].to(mine.dtype) + SPOILS
            if not torch.equal(torch.cat(every)[:numel], expected):
                found["wrong"].append(key)
        outcomes = engine.elastic_report.outcomes
        found["fresh"] = {each.role: each.reason for each in outcomes if each.what == "fresh"}
        train(cell, engine, SAVE_AT, CONTINUE_TO)
    return [found]


def united(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks': the lowest rank's words count."""
    parts = {
        name: {
            part: f"rank {rank}: {text}"
            for rank, one in reversed(list(enumerate(everyone)))
            for part, text in one[name].items()
        }
        for name in ("a", "b", "between")
    }
    return {
        **parts,
        "by": everyone[0]["by"],
        "lines": everyone[0]["lines"],
        "others": [one["lines"] for one in everyone[1:]],
    }

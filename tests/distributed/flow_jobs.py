"""Flows: each is saved by DeepSpeed alone, and loaded by DeepSpeed alone and with elastic_ckpt at the same topology."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.load.resume_sheet import write_sheet
from tests.distributed.facts import log_lines
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, close, param_groups
from tests.distributed.unchanged_jobs import NOT_HANDED_OUT, SAVE_AT, state_of, text_of, train
from tests.flows import parts
from tests.flows.draw import EngineFlow, Flow, TrainerFlow
from tests.flows.models import MODELS

_CELL = {"sp": 1, "data": False}
_MORE_STEPS = 3
#: Where DeepSpeed's optimizers keep the parameters of each flat partition: ZeRO-1 and 2, bf16 and ZeRO-3.
_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
#: What happened: DeepSpeed alone does not complete it; all is right; refused as docs/compatibility.md says.
VOID, RIGHT, REFUSED = "void", "right", "refused"


@contextlib.contextmanager
def live(flow: EngineFlow, seed: int) -> Iterator[Any]:
    """An engine of this flow."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16, torch.bfloat16]
    model = MODELS[flow.model](seed=seed)
    optimizer = parts.build_optimizer(flow.optimizer, param_groups(model, flow.groups))
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "zero_optimization": {"stage": flow.stage, **parts.ZERO[flow.zero][1]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[flow.precision],
        **parts.CONFIG[flow.config],
    }
    scheduler = None if "scheduler" in config else parts.SCHEDULERS[flow.scheduler](optimizer)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
    try:
        yield engine
    finally:
        close(engine)
        gc.collect()


def state_without_padding(cell: dict[str, Any], engine: Any) -> dict[str, dict[Any, Any]]:
    """What ``state_of`` finds, with zeros where no parameter is: some optimizers step padding away from zero, which no
    load restores and no weight sees. What it does to norms and scales is seen in what steps make of them."""
    held, optimizer = state_of(cell, engine), engine.optimizer
    groups = next((found for name in _GROUPS if (found := getattr(optimizer, name, None)) is not None), ())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number, params in enumerate(groups):
        if not all(hasattr(param, "ds_numel") or hasattr(param, "_hp_mapping") for param in params):
            continue  # without ZeRO, nothing is padded
        flat = held["masters"][number]
        real, start = torch.zeros(flat.numel(), dtype=torch.bool), 0
        for param in params:
            if hasattr(param, "ds_numel"):
                step = math.ceil(param.ds_numel / ranks)
                real[start : start + min(step, max(0, param.ds_numel - rank * step))] = True
                start += step
            elif param._hp_mapping is not None:
                address = param._hp_mapping.get_hp_fragment_address()
                real[address.start : address.start + address.numel] = True
        of_flat = [flat, *(value for (at, _), value in held["states"].items() if at == number)]
        for value in of_flat:
            if torch.is_tensor(value) and value.dim() and value.shape[-1] == real.numel():
                value[..., ~real] = 0
    for name, param in engine.module.named_parameters():
        if (shard := held["weights"].get(f"partition of {name}")) is not None:
            shard[max(0, param.ds_numel - rank * shard.numel()) :] = 0
    return held


def _save(flow: EngineFlow, folder: str) -> dict[str, dict[Any, Any]]:
    with live(flow, 7) as engine:
        torch.manual_seed(1)  # some optimizers draw numbers
        train(_CELL, engine, 0, SAVE_AT, flow.pending)
        truth = state_without_padding(_CELL, engine)
        truth["client"] = parts.CLIENTS[flow.client]()
        engine.save_checkpoint(folder, tag="4", client_state=truth["client"])
        write_sheet(engine, {"save_dir": folder, "tag": "4"})
        if not flow.pending:
            return truth | _three_steps_later(engine)
    with live(flow, 7) as engine:  # whose gradients are not those of a run that goes on
        torch.manual_seed(1)
        train(_CELL, engine, 0, SAVE_AT)
        return truth | _three_steps_later(engine)


def _three_steps_later(engine: Any) -> dict[str, dict[Any, Any]]:
    torch.manual_seed(2)
    losses = {"losses": dict(enumerate(train(_CELL, engine, SAVE_AT, SAVE_AT + _MORE_STEPS)))}
    return losses | {
        f"{part} {_MORE_STEPS} steps later": values for part, values in state_without_padding(_CELL, engine).items()
    }


def _load(flow: EngineFlow, folder: str) -> dict[str, dict[Any, Any]]:
    """Load, and train on: all that this rank holds, what was returned, and the state three steps later."""
    with live(flow, 8) as engine:
        train(_CELL, engine, 60, 60 + flow.trained)
        path, client = engine.load_checkpoint(folder, **parts.LOADS[flow.loads])
        held = state_without_padding(_CELL, engine)
        held["client"] = {key: value for key, value in (client or {}).items() if key not in NOT_HANDED_OUT}
        held["path"] = {"": path}
        # the load of a run that is the same is not said to be of another
        held["resume sheet"] = {"differs": getattr(getattr(engine, "elastic_report", None), "differs", ())}
        return held | _three_steps_later(engine)


def run(flow: Flow, folder: str, mark: Callable[[str], None]) -> tuple[str, str]:
    """What happened (:data:`VOID`, :data:`RIGHT`, :data:`REFUSED` or what is wrong), and more words. Collective."""
    found: list[Any] = []
    save, load = _jobs_of(flow)
    with log_lines() as lines:
        for what, job in (("save", save), ("DeepSpeed", load), ("elastic_ckpt", load)):
            mark(what)
            (elastic_ckpt.install if what == "elastic_ckpt" else elastic_ckpt.uninstall)()
            error: BaseException | None = None
            try:
                found.append(job(flow, folder))
            except Exception as caught:
                error = caught
            finally:
                elastic_ckpt.uninstall()
            texts = _of_all(None if error is None else text_of(error))
            if any(texts):
                words = next(text for text in texts if text)
                if what != "elastic_ckpt":
                    return VOID, f"{what}: {words}"
                if all(_of_all(isinstance(error, ElasticCkptError) and parts.may_refuse(flow, str(error)))):
                    return REFUSED, words
                return f"does not load: {words}", ""
    truth, alone, ours = found
    wrong = next(filter(None, _of_all(_first_difference(truth, alone, ours))), None)
    return (wrong or RIGHT), "\n".join(line for line in lines if "elastic_ckpt" in line)


def _jobs_of(flow: Flow) -> tuple[Callable[[Any, str], Any], Callable[[Any, str], Any]]:
    if isinstance(flow, TrainerFlow):
        trainer = importlib.import_module("tests.distributed.trainer_flow_jobs")  # imports Transformers
        return trainer.save, trainer.load
    return _save, _load


def _of_all(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _first_difference(truth: dict[str, Any], alone: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """What is neither as DeepSpeed alone restores it nor, where that is wrong, as it was saved."""
    for part, values in alone.items():
        for key in values.keys() | ours[part].keys():
            one, other = values.get(key, "nothing"), ours[part].get(key, "nothing")
            saved = truth.get(part, {}).get(key, "nothing")
            if not same(one, other, {}) and not (not same(saved, one, {}) and same(saved, other, {})):
                return f"{part}, {key}: {str(other)[:300]} in place of {str(one)[:300]}, saved {str(saved)[:300]}"
    return None


def same(one: Any, other: Any, seen: dict[int, int]) -> bool:
    """Bit for bit, by type and value, in containers too; what is one object here is one object there."""
    if id(one) in seen or type(one) is not type(other):
        return seen.get(id(one)) == id(other)
    if isinstance(one, (torch.Tensor, np.ndarray, dict, list, deque)):
        seen[id(one)] = id(other)
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return _same_arrays(one, other)
    if isinstance(one, dict):
        extra = not isinstance(one, defaultdict) or one.default_factory is other.default_factory
        kinds = [type(key) for key in one] == [type(key) for key in other]
        return extra and kinds and list(one) == list(other) and all(same(one[k], other[k], seen) for k in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(a, b, seen) for a, b in zip(one, other, strict=True))
    if isinstance(one, functools.partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.layout is torch.strided and tensor.numel() and not tensor.is_quantized
    kind = (tensor.shape, tensor.dtype, tensor.layout, tensor.device.type, type(tensor), tensor.requires_grad)
    return (*kind, tensor.is_conj(), tensor.is_quantized and str(tensor.qscheme()), tensor.stride() if plain else ())


def _same_arrays(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if _facts(one) != _facts(other) or one.is_meta:
        return _facts(one) == _facts(other)
    if one.is_quantized:
        return torch.equal(one.int_repr(), other.int_repr())
    one, other = (tensor.detach().to_dense() for tensor in (one, other))
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def all_of(arguments: dict[str, Any]) -> list[str]:
    """Run flows one after another; rank 0 writes a line for each step, so that it is known where a job was ended."""
    log = Path(arguments["log"])
    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # of DeepSpeed's launcher, for "writer"
    for number, flow in enumerate(arguments["flows"]):
        folder = os.path.join(arguments["folder"], str(number))

        def write(*words: object, number: int = number) -> None:
            if dist.get_rank() == 0:
                with log.open("a") as stream:
                    stream.write(json.dumps([number, *words]) + "\n")

        write("done", *run(flow, folder, lambda what, write=write: write("begin", what)))  # type: ignore[misc]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return ["done"]

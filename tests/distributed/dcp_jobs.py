"""Jobs that train with FSDP2 and save with ``torch.distributed.checkpoint``, and engines that load what they saved."""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import elastic_ckpt
from tests.distributed import model as models
from tests.distributed import parallel_models
from tests.distributed import parallel_truth as parallel_oracle
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of, where, without_states
from tests.distributed.model import Setup, batch, build_engine, build_optimizer, close, train

SETUP = Setup(3)


def build_fsdp(model: str = "UntiedLM", seed: int = 7) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that FSDP2 shards over all ranks, and its optimizer."""
    module = models.BUILDERS[model](seed=seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(module.hidden, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = build_optimizer(module, SETUP)
    for group in optimizer.param_groups:  # as a scheduler notes it, which engines of these tests have
        group["initial_lr"] = group["lr"]
    return module, optimizer


def train_fsdp(module: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """As :func:`tests.distributed.model.train`, without DeepSpeed."""
    losses = []
    for step in range(first, last):
        loss = module(batch(step, dist.get_world_size(), dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def full(value: Any) -> Any:
    """A tensor of any mesh, whole. Collective."""
    return value.full_tensor().detach().clone() if hasattr(value, "full_tensor") else value.detach().clone()


def truth_of_fsdp(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As :func:`tests.distributed.truth.gather`, of an FSDP2 model. Collective."""
    named = {param: name for name, param in module.named_parameters()}
    masters = {name: full(param) for param, name in named.items()}
    states = {
        (named[param], key): full(value)
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if key != "step"
    }
    groups = [
        {key: group[key] for key in ("lr", "weight_decay", "betas", "eps", "initial_lr", "name") if key in group}
        for group in optimizer.param_groups
    ]
    steps = sorted({float(state["step"]) for state in optimizer.state.values()})
    buffers = {name: full(buffer) for name, buffer in module.named_buffers()}
    return {
        "masters": masters,
        "states": states,
        "weights": masters,
        "buffers": buffers,
        "steps": steps,
        "groups": groups,
    }


def save_fsdp(case: dict[str, Any]) -> None:
    """Train to step ``SAVE_AT``, save with the writer's layout, ``setup``, write down the truth, and train on."""
    module, optimizer = build_fsdp()
    train_fsdp(module, optimizer, 0, SAVE_AT)
    flat = case["setup"] == "torchtitan"
    weights, states = get_state_dict(module, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    extra = {"train_state": {"step": SAVE_AT, "seen": [1, 2, 3]}, "rng": torch.get_rng_state()}
    layouts = {
        "plain": {"model": weights, "optim": states, **extra},
        "app": {"app": {"model": weights, "optim": states}, **extra},
        "torchtitan": {**weights, "optimizer": states, "train_state": extra["train_state"]},
        "weights": {"model": weights},
        "slow": {"model": weights, "optim": states, "slow": {"state": states.get("state", {})}},
        "ungrouped": {"model": weights, "optim": {"state": states.get("state", {})}},
        "averaged": {
            "net": {f"_orig_mod.{name}": value for name, value in weights.items()},
            "ema": weights,
            "optim": states,
        },
    }
    dcp.save(layouts[case["setup"]], checkpoint_id=case["folder"])
    truth = truth_of_fsdp(module, optimizer)
    truth["losses"] = train_fsdp(module, optimizer, SAVE_AT, CONTINUE_TO)
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(case["folder"], "truth.pt"))
    dist.barrier()


#: How a mesh of two by two ranks cuts parameters that are not named here along the first dimension, both ways.
PLACEMENTS = {
    "embedding.weight": (Shard(1), Shard(0)),
    "hidden.weight": (Shard(0), Shard(1)),
    "head.weight": (Shard(1), Replicate()),
    "back.weight": (Shard(1), Shard(1)),
    "never_used": (Replicate(), Shard(1)),
}


def save_dtensors(case: dict[str, Any]) -> None:
    """Save a model and Adam states that a mesh cuts along several dimensions, unevenly; write down the truth."""
    mesh = init_device_mesh("cpu", (2, 2))
    module = models.BUILDERS["UntiedLM"]()
    optimizer = build_optimizer(module, SETUP)
    named = {param: name for name, param in module.named_parameters()}
    masters = {name: param.detach() for param, name in named.items()}
    generator = torch.Generator().manual_seed(5)
    states = {
        (name, key): torch.rand(value.shape, generator=generator)
        for name, value in masters.items()
        for key in ("exp_avg", "exp_avg_sq")
    }

    def cut(name: str, value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, mesh, PLACEMENTS.get(name, (Shard(0), Shard(0))))

    by_name: dict[str, dict[str, Any]] = {name: {"step": torch.tensor(float(SAVE_AT))} for name in masters}
    for (name, key), value in states.items():
        by_name[name][key] = cut(name, value)
    groups = [{**group, "initial_lr": group["lr"]} for group in optimizer.param_groups]
    saved = [{**group, "params": [named[param] for param in group["params"]]} for group in groups]
    buffers = dict(module.named_buffers())
    persistent = {name: buffer for name, buffer in buffers.items() if name in module.state_dict()}
    weights = {name: cut(name, value) for name, value in masters.items()}
    tree = {"model": {**weights, **persistent}, "optim": {"state": by_name, "param_groups": saved}}
    dcp.save(tree, checkpoint_id=case["folder"])
    kept = ("lr", "weight_decay", "betas", "eps", "initial_lr", "name")
    truth = {"masters": masters, "states": states, "weights": masters, "buffers": buffers, "steps": [float(SAVE_AT)]}
    truth["groups"] = [{key: group[key] for key in kept if key in group} for group in groups]
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(case["folder"], "truth.pt"))


def load_into_fsdp(case: dict[str, Any]) -> list[Loaded]:
    """``dcp.load`` a converted checkpoint into an FSDP2 ``model``, compare with the truth, and train on."""
    module, optimizer = build_fsdp(case["model"], seed=8)
    weights, states = get_state_dict(module, optimizer)
    loaded = {"model": weights, "optim": states}
    dcp.load(loaded, checkpoint_id=os.path.join(case["folder"], "dcp"))
    set_state_dict(module, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    truth, now = truth_of(case["folder"]), truth_of_fsdp(module, optimizer)
    kept = ("masters", "states", "buffers", "steps", "groups")
    differences = oracle.compare(now, {kind: truth[kind] for kind in kept})
    gap = loss_gap(train_fsdp(module, optimizer, SAVE_AT, CONTINUE_TO), truth)
    return [Loaded(case, f"rank {dist.get_rank()}: {case['name']}", None, differences, gap)]


def resume(case: dict[str, Any]) -> list[Loaded]:
    """Load a DCP folder into an engine of ``setup`` with ``arguments``, compare with the truth, and train on.

    ``states``: whether it has optimizer states that are restored.
    """
    elastic_ckpt.install()
    engine = build_engine(case["setup"], models.BUILDERS["UntiedLM"](seed=8))
    _, client_state = engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
    has_states = case.get("states", True)
    truth = truth_of(case["folder"], *([] if has_states else [without_states]))
    counters = (SAVE_AT, SAVE_AT * models.GLOBAL_BATCH, 0) if has_states else (0, 0, 0)
    truth |= {"counters": counters, "scheduler": engine.lr_scheduler.state_dict()}
    differences = oracle.differences(engine, truth)
    gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth) if "losses" in truth else 0.0
    found = Loaded(case, where(case), engine.elastic_report, differences, gap, client_state)
    close(engine)
    return [found]


def refuse(case: dict[str, Any]) -> list[Refused]:
    """Try to load a DCP folder into an engine of ``setup``."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"], models.BUILDERS["UntiedLM"](seed=8))
    refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"]))
    close(engine)
    return [refused]


def save_megatron(case: dict[str, Any]) -> None:
    """Train Megatron Core's GPTModel, and save it with its own ``dist_checkpointing``, as its training script does."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.optimizer import FP32Optimizer

    torch.cuda.synchronize = lambda *_: None
    parallel, folder = case["setup"], case["folder"]
    engine = parallel_models.build(parallel)
    parallel_models.train(engine, parallel, 0, SAVE_AT)
    optimizer = FP32Optimizer.__new__(FP32Optimizer)  # whose constructor wants CUDA
    optimizer.optimizer, optimizer.is_stub_optimizer, optimizer.config = engine.optimizer, False, None
    weights = engine.module.sharded_state_dict()
    states = optimizer.sharded_state_dict(engine.module.sharded_state_dict())
    os.makedirs(folder, exist_ok=True)
    dist.barrier()
    saved = {"model": weights, "optimizer": states, "iteration": SAVE_AT, "args": Namespace(seed=5)}
    dist_checkpointing.save(saved, folder)
    truth = parallel_oracle.gather(engine, parallel)
    truth["losses"] = parallel_models.train(engine, parallel, SAVE_AT, CONTINUE_TO)
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(folder, "truth.pt"))
    close(engine)


def resume_megatron(case: dict[str, Any]) -> list[Loaded]:
    """Load what :func:`save_megatron` saved into an engine of ``setup`` with ``options`` of elastic_ckpt, and train on.

    The job sets the learning rates, as its scheduler would.
    """
    elastic_ckpt.install()
    parallel, folder = case["setup"], case["folder"]
    engine = parallel_models.build(parallel, seed=8, config={"elastic_checkpoint": case["options"]})
    _, client_state = engine.load_checkpoint(folder)
    truth = truth_of(folder)
    now = parallel_oracle.gather(engine, parallel)
    differences = parallel_oracle.tensor_differences(now, truth) | oracle.compare(now, {"steps": truth["steps"]})
    for names, group in zip(engine.members, engine.optimizer.param_groups, strict=True):
        group.update(truth["groups"][names[0]])
    gap = loss_gap(parallel_models.train(engine, parallel, SAVE_AT, CONTINUE_TO), truth)
    found = Loaded(case, where(case), engine.elastic_report, differences, gap, client_state)
    close(engine)
    return [found]

"""Runs with sequence parallelism: ``sequence_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, attempt
from tests.distributed.jobs import SAVE_AT, truth_of
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, Setup, TinyLM, batch, build_optimizer, close


@contextmanager
def live(setup: Setup, kind: str, sp: int, seed: int = 7) -> Iterator[Any]:
    """An engine whose sequence-parallel groups have ``sp`` ranks.

    Args:
        setup: stage and precision.
        kind: ``mpu``: DeepSpeed's own state of sequence parallelism; ``mesh``: a device mesh, from the config.
        sp: sequence-parallel degree.
        seed: of the model.
    """
    data = dist.get_world_size() // sp
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // data,
        "zero_optimization": {"stage": setup.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[setup.precision],
    }
    if kind == "mesh":
        config |= {"sequence_parallel_size": sp, "data_parallel_size": data}
    elif sp > 1:
        parallel_state_sp.initialize_sequence_parallel(sp)
    model = TinyLM(seed)
    optimizer = build_optimizer(model, setup)
    engine = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        config=config,
        mpu=parallel_state_sp if kind == "mpu" and sp > 1 else None,
    )[0]
    try:
        yield engine
    finally:
        close(engine)
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mesh_device = groups.mpu = None


def train(engine: Any, sp: int, first: int, last: int, same_data: bool = False) -> None:
    """Steps of which each sequence-parallel rank sees its part of the sequence, or with ``same_data`` all of it."""
    rank, data = dist.get_rank(), dist.get_world_size() // sp
    for step in range(first, last):
        tokens = batch(step, data, rank // sp)
        width = (tokens.shape[1] - 1) // sp
        start = 0 if same_data else rank % sp * width
        engine.backward(engine(tokens if same_data else tokens[:, start : start + width + 1]))
        engine.step()


def save(arguments: dict[str, Any]) -> None:
    """Train and save each case, and write down what the engine held."""
    for case in arguments["cases"]:
        kind, sp, folder = case["kind"], case["sp"], os.path.join(arguments["folder"], case["name"])
        with live(case["setup"], kind, sp) as engine:
            mesh = kind == "mesh"
            train(engine, sp, 0, SAVE_AT, same_data=mesh)  # a mesh reduces no gradients over sequence-parallel ranks
            rank = dist.get_rank()
            if mesh and rank % sp and engine.zero_optimization_stage() < 3:
                engine.checkpoint_engine.save = lambda *_, **__: None  # both write the same files at the same time
            client_state = {"note": "hello", "rng": [rank // sp, rank % sp]}
            engine.save_checkpoint(folder, tag="step4", client_state=client_state)
            oracle.relink(engine)
            truth = oracle.gather(engine, oracle.state_keys(engine))
            if rank == 0:
                torch.save(truth, os.path.join(folder, "truth.pt"))


def load(arguments: dict[str, Any]) -> list[Loaded]:
    """Load all ``sources`` into one engine of the case, and compare each with its truth."""
    elastic_ckpt.install()
    case, facts = arguments["case"], []
    with live(case["setup"], case["kind"], case["sp"], seed=8) as engine:
        for source in arguments["sources"]:
            truth = truth_of(source["truth"])
            engine._config.load_universal_checkpoint = source["format"] == "universal"
            _, client_state = engine.load_checkpoint(os.path.join(arguments["folder"], source["name"]))
            differences = oracle.differences(engine, truth)
            where = f"rank {dist.get_rank()}: {source['name']} -> {case['name']}"
            facts.append(Loaded(source, where, engine.elastic_report, differences, 0.0, client_state))
            train(engine, case["sp"], SAVE_AT, SAVE_AT + 1, same_data=case["kind"] == "mesh")
    return facts


def same_as_deepspeed(arguments: dict[str, Any]) -> list[dict[str, dict[str, str]]]:
    """At the saved topology, by case: what differs from the truth after loads without and with elastic loading."""
    found: dict[str, dict[str, str]] = {}
    for case in arguments["cases"]:
        folder = os.path.join(arguments["folder"], case["name"])
        truth = truth_of(folder)
        for install in (elastic_ckpt.uninstall, elastic_ckpt.install):
            install()
            with live(case["setup"], case["kind"], case["sp"], seed=8) as engine:
                engine.load_checkpoint(folder)
                found[f"{case['name']} {install.__name__}"] = oracle.differences(engine, truth)
    return [found]


def incomplete(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """ZeRO-3 of a device mesh: how others refuse what it saves."""
    elastic_ckpt.install()
    folder, sp = os.path.join(arguments["folder"], "lost"), 2
    with live(Setup(3, "bf16"), "mesh", sp) as engine:
        train(engine, sp, 0, SAVE_AT, same_data=True)
        if dist.get_rank() % sp:  # all write the same files; one of them is enough, and no file is torn
            engine.checkpoint_engine.save = lambda *_, **__: None
        engine.save_checkpoint(folder, tag="step4")
    refusals = []
    for kind, degree in (("mesh", 2), ("mpu", 1), ("mpu", 2)):
        with live(Setup(3, "bf16"), kind, degree, seed=8) as engine:
            train(engine, degree, 20, 21, same_data=True)
            refusals.append(attempt((kind, degree), engine, lambda: engine.load_checkpoint(folder)))
    return [SimpleNamespace(refusals=refusals)]

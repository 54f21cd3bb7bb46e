"""Runs with sequence parallelism: ``sequence_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.jobs import SAVE_AT, truth_of
from tests.distributed.kept import close_kept, engine_of
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, Setup, TinyLM, batch, build_optimizer, close


@dataclass(frozen=True)
class Run:
    """Ranks in sequence-parallel groups; the others are data-parallel.

    Attributes:
        world: how many ranks.
        kind: ``mpu``: DeepSpeed's own state of sequence parallelism; ``mesh``: a device mesh, from the config.
        sp: sequence-parallel degree.
        stage: of ZeRO.
    """

    world: int
    kind: str
    sp: int
    stage: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.sp}-z{self.stage}-n{self.world}"

    @property
    def data(self) -> int:
        """Data-parallel degree."""
        return self.world // self.sp


def build(run: Run, seed: int = 7) -> Any:
    """A live engine. Collective."""
    setup = Setup(run.stage, "bf16")
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // run.data,
        "zero_optimization": {"stage": run.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[setup.precision],
    }
    if run.kind == "mesh":
        config |= {"sequence_parallel_size": run.sp, "data_parallel_size": run.data}
    elif run.sp > 1:
        parallel_state_sp.initialize_sequence_parallel(run.sp)
    model = TinyLM(seed)
    optimizer = build_optimizer(model, setup)
    return deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        config=config,
        mpu=parallel_state_sp if run.kind == "mpu" and run.sp > 1 else None,
    )[0]


def end(engine: Any) -> None:
    """Free an engine, and the groups that DeepSpeed keeps of it."""
    close(engine)
    parallel_state_sp._release_sequence_parallel_groups()
    groups.mesh_device = groups.mpu = None


def live(run: Run) -> Any:
    """An engine that the next case may get too. Collective."""
    return engine_of(run, partial(build, run, seed=8), end)


def train(engine: Any, run: Run, first: int, last: int, same_data: bool | None = None) -> None:
    """Steps of which each sequence-parallel rank sees its part of the sequence, or with ``same_data`` all of it.

    A mesh reduces no gradients over sequence-parallel ranks, which see the same unless they are told otherwise.
    """
    same_data = run.kind == "mesh" if same_data is None else same_data
    for step in range(first, last):
        tokens = batch(step, run.data, dist.get_rank() // run.sp)
        width = (tokens.shape[1] - 1) // run.sp
        start = 0 if same_data else dist.get_rank() % run.sp * width
        engine.backward(engine(tokens if same_data else tokens[:, start : start + width + 1]))
        engine.step()


def save_alone(engine: Any, run: Run, folder: str) -> None:
    """Save; where all sequence-parallel ranks of a mesh would write the same files at once, one of them does."""
    rank = dist.get_rank()
    if run.kind == "mesh" and rank % run.sp:
        engine.checkpoint_engine.save = lambda *_, **__: None
    client_state = {"note": "hello", "rng": [rank // run.sp, rank % run.sp]}
    engine.save_checkpoint(folder, tag="step4", client_state=client_state)


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train and save each ``setup``, and write down what the engine held."""
    for case in cases:
        engine = build(case["setup"])
        train(engine, case["setup"], 0, SAVE_AT)
        save_alone(engine, case["setup"], case["folder"])
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(case["folder"], "truth.pt"))
        end(engine)


def save_incomplete(case: dict[str, Any]) -> None:
    """Save ZeRO-3 of a device mesh, whose sequence-parallel ranks write the same files, and write down no truth."""
    engine = build(case["setup"])
    train(engine, case["setup"], 0, SAVE_AT)
    save_alone(engine, case["setup"], case["folder"])
    end(engine)


def resume(case: dict[str, Any]) -> list[Loaded]:
    """Load a checkpoint of some ``format`` into an engine of ``run``, and compare it with its truth."""
    elastic_ckpt.install()
    run, engine, truth = case["run"], live(case["run"]), truth_of(case["folder"])
    engine._config.load_universal_checkpoint = case["format"] == "universal"
    _, client_state = engine.load_checkpoint(case["folder"])
    differences = oracle.differences(engine, truth)
    train(engine, run, SAVE_AT, SAVE_AT + 1)  # leave other values for the next load to replace
    where = f"rank {dist.get_rank()}: {case['name']}"
    return [Loaded(case, where, engine.elastic_report, differences, 0.0, client_state)]


def same_as_deepspeed(case: dict[str, Any]) -> list[dict[str, dict[str, str]]]:
    """At the saved topology: what differs from the truth after loads without and with elastic loading."""
    found: dict[str, dict[str, str]] = {}
    close_kept()
    for install in (elastic_ckpt.uninstall, elastic_ckpt.install):
        install()
        engine = build(case["run"], seed=8)
        engine.load_checkpoint(case["folder"])
        found[install.__name__] = oracle.differences(engine, truth_of(case["folder"]))
        end(engine)
    return [found]


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load a checkpoint into an engine of ``run`` that has trained."""
    elastic_ckpt.install()
    engine = live(case["run"])
    train(engine, case["run"], 20, 21, same_data=True)
    refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"]))
    return [refused] if dist.get_rank() == 0 else None

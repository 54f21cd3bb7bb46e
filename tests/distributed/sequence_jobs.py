"""Runs with sequence parallelism: ``sequence_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

import elastic_ckpt
from elastic_ckpt.errors import DamagedError
from tests.distributed import truth as oracle
from tests.distributed.model import (
    GLOBAL_BATCH,
    PRECISIONS,
    Setup,
    TinyLM,
    batch,
    build_optimizer,
    close,
    setup_from_json,
)

SAVE_AT = 4


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
        with live(setup_from_json(case["setup"]), kind, sp) as engine:
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


def load(arguments: dict[str, Any]) -> None:
    """Load each case's sources into one engine, and compare with the truth; who gets whose random state, too."""
    elastic_ckpt.install()
    rank = dist.get_rank()
    for case in arguments["cases"]:
        sp, data = case["sp"], dist.get_world_size() // case["sp"]
        with live(setup_from_json(case["setup"]), case["kind"], sp, seed=8) as engine:
            for source in case["sources"]:
                where = f"{source['name']} -> {case}"
                folder = os.path.join(arguments["folder"], source["name"])
                truth = torch.load(os.path.join(source["truth"], "truth.pt"), weights_only=False)
                engine._config.load_universal_checkpoint = source["format"] == "universal"
                _, client_state = engine.load_checkpoint(folder)
                report = engine.elastic_report
                assert report is not None and report.source.format == source["format"], f"{where}: not ours"
                oracle.assert_equal(engine, truth, where)
                assert (report.sequence.degree, report.source.sequence.degree) == (sp, source["sp"]), where
                assert report.sequence.data_degree(report.dp) == data, where
                assert report.source.sequence.data_degree(report.source.dp) == source["data"], where
                changes = [note for note in report.notes if "batch" in note]
                assert not changes, f"{where}: {changes}"
                per_rank = source["format"] == "native" and source["stage"] == 3 and data == source["data"]
                own = [rank // sp, rank % sp if sp == source["sp"] else 0]
                assert client_state["rng"] == (own if per_rank else [0, 0]), (where, client_state["rng"])
                train(engine, sp, SAVE_AT, SAVE_AT + 1, same_data=case["kind"] == "mesh")


def same_as_deepspeed(arguments: dict[str, Any]) -> None:
    """At the saved topology every engine loads with elastic loading what it loads without it."""
    for case in arguments["cases"]:
        folder = os.path.join(arguments["folder"], case["name"])
        truth = torch.load(os.path.join(folder, "truth.pt"), weights_only=False)
        for install in (elastic_ckpt.uninstall, elastic_ckpt.install):
            install()
            with live(setup_from_json(case["setup"]), case["kind"], case["sp"], seed=8) as engine:
                engine.load_checkpoint(folder)
                oracle.assert_equal(engine, truth, f"{case} {install.__name__}")


def incomplete(arguments: dict[str, Any]) -> None:
    """ZeRO-3 of a device mesh: a warning when the engine is made, and a refusal that says what is lost, everywhere."""
    elastic_ckpt.install()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastic_ckpt").addHandler(handler)
    folder, sp, world = os.path.join(arguments["folder"], "lost"), 2, dist.get_world_size()
    with live(Setup(3, "bf16"), "mesh", sp) as engine:
        warned = [text for text in records if f"into {world} partitions and saves {world // sp}" in text]
        assert len(warned) == (dist.get_rank() == 0), records
        train(engine, sp, 0, SAVE_AT, same_data=True)
        engine.save_checkpoint(folder, tag="step4")
    del records[:]
    for kind, degree in (("mesh", 2), ("mpu", 1), ("mpu", 2)):
        with live(Setup(3, "bf16"), kind, degree, seed=8) as engine:
            train(engine, degree, 20, 21, same_data=True)
            before = oracle.fingerprint(engine)
            with pytest.raises(DamagedError, match=rf"saved {world // sp} of {world} ZeRO-3 partitions") as caught:
                engine.load_checkpoint(folder)
            assert "nothing can bring it back" in str(caught.value) and "parallel_state_sp" in str(caught.value.remedy)
            assert oracle.fingerprint(engine) == before
            oracle.agree(str(caught.value.problem))
    with live(Setup(1, "bf16"), "mesh", sp):
        assert any("may be damaged" in text for text in records) == (dist.get_rank() == 0), records
    with live(Setup(3, "bf16"), "mpu", sp):
        assert not any("mpu" not in text for text in records if "incomplete" in text and "partitions" not in text)

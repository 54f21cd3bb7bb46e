"""Jobs that load weights into engines that were made without an optimizer."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import DamagedError, UnsupportedError
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.jobs import SAVE_AT
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, Setup, batch, close, setup_from_json


def build_evaluation_engine(setup: Setup) -> Any:
    """A live engine as ``trainer.validate`` makes it: no optimizer, no scheduler."""
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": setup.stage, **dict(setup.zero)},
        **PRECISIONS[setup.precision],
        **dict(setup.config),
    }
    return deepspeed.initialize(model=models.TinyLM(seed=8), config=config)[0]


def evaluate(arguments: dict[str, Any]) -> None:
    """Load many checkpoints into one engine after another; weights, buffers and loss are those of the save."""
    elastic_ckpt.install()
    for target in arguments["targets"]:
        setup = setup_from_json(target["setup"])
        engine = build_evaluation_engine(setup)
        engine.eval()
        for folder in target["folders"]:
            where = f"{folder} -> {setup.name}-dp{dist.get_world_size()} without an optimizer"
            truth = torch.load(os.path.join(folder, "truth.pt"), weights_only=False)
            path, client_state = engine.load_checkpoint(folder, **target.get("arguments", {}))
            assert os.path.isfile(path) and client_state["note"] == "hello", where
            report = engine.elastic_report
            assert report is not None, f"{where}: DeepSpeed's own path ran"
            held = oracle.low_precision(engine)
            assert held.keys() == truth["weights"].keys(), where
            for name, weight in held.items():
                assert torch.equal(weight, truth["masters"][name].to(weight.dtype)), f"{where}: {name}"
            for name, buffer in truth["buffers"].items():
                if name != "scratch":  # which no checkpoint holds
                    assert torch.equal(dict(engine.module.named_buffers())[name], buffer), f"{where}: {name}"
            assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == truth["counters"], where
            with torch.no_grad():
                loss = engine(batch(SAVE_AT, dist.get_world_size(), dist.get_rank())).float()
            dist.all_reduce(loss)
            exact = setup.precision == "fp32" and not setup.config and "fp32" in os.path.basename(folder)
            bound = 1e-5 if exact else 5e-3
            assert abs(loss.item() / dist.get_world_size() - truth["losses"][0]) <= bound, where
        close(engine)


def without_masters(arguments: dict[str, Any]) -> None:
    """A folder of which somebody removed the optimizer files: DeepSpeed itself loads the weights, if it can."""
    elastic_ckpt.install()
    truth = torch.load(os.path.join(arguments["folder"], "truth.pt"), weights_only=False)
    whole, partitioned = build_evaluation_engine(Setup(0)), build_evaluation_engine(Setup(3))
    whole.load_checkpoint(arguments["folder"])
    assert whole.elastic_report is None
    for name, weight in oracle.low_precision(whole).items():
        assert torch.equal(weight, truth["weights"][name]), name
    with contextlib.suppress(DamagedError):
        partitioned.load_checkpoint(arguments["folder"])
        raise AssertionError("a ZeRO-3 engine took weights that are not there")
    with contextlib.suppress(UnsupportedError):  # and not DeepSpeed's AttributeError, even at the saved topology
        partitioned.load_checkpoint(arguments["zero3"], custom_load_fn=lambda src, dst: None)
        raise AssertionError("a ZeRO-3 engine without an optimizer was left to DeepSpeed")

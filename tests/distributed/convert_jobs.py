"""Jobs that load converted checkpoints with DeepSpeed's own loader, elastic_ckpt out of the way."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import parallel_truth
from tests.distributed import truth as oracle
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT
from tests.distributed.model import TinyLM, build_engine, close, setup_from_json, train
from tests.distributed.parallel_models import Parallel, build, folder_name


def deepspeed_loads(arguments: dict[str, Any]) -> None:
    """Load each pair of folders (ours, DeepSpeed's own conversion) with DeepSpeed: equal values, equal losses on."""
    elastic_ckpt.uninstall()
    for target in arguments["targets"]:
        setup = setup_from_json(target["setup"])
        truth = torch.load(os.path.join(target["ours"], "truth.pt"), weights_only=False)
        losses = []
        for folder in (target["ours"], target["theirs"]):
            where = f"{folder} -> {setup.name}-dp{dist.get_world_size()}"
            engine = build_engine(setup, TinyLM(seed=8))
            engine._config.load_universal_checkpoint = True
            path, client_state = engine.load_checkpoint(folder)
            assert path is not None and client_state["epoch"] == 3, where
            assert not hasattr(engine, "elastic_report"), where
            oracle.relink(engine)
            now = oracle.gather(engine, sorted({key for _, key in truth["states"]}))
            for kind in ("masters", "states"):
                for key, expected in truth[kind].items():
                    assert torch.equal(now[kind][key], expected), f"{where}: {kind} {key}"
            assert now["steps"] == truth["steps"], where
            assert now["counters"] == truth["counters"], where
            losses.append(train(engine, SAVE_AT, CONTINUE_TO))
            close(engine)
        assert losses[0] == losses[1], f"{target['ours']}: {losses}"


def deepspeed_loads_parallel(arguments: dict[str, Any]) -> None:
    """Load folders into tensor and pipeline parallel engines with DeepSpeed: masters and states are the truth.

    Of each target: ``setup``, and ``folder``, which has a ``truth.pt``.
    """
    elastic_ckpt.uninstall()
    for target in arguments["targets"]:
        parallel = Parallel(**target["setup"])
        where = f"{target['folder']} -> {folder_name(parallel)}"
        truth = torch.load(os.path.join(target["folder"], "truth.pt"), weights_only=False)
        engine = build(parallel, seed=8)
        engine._config.load_universal_checkpoint = True
        path, _ = engine.load_checkpoint(target["folder"])
        assert path is not None and not hasattr(engine, "elastic_report"), where
        now = parallel_truth.gather(engine, parallel)
        for kind in ("masters", "states"):
            assert now[kind].keys() == truth[kind].keys(), f"{where}: {kind}"
            for key, expected in truth[kind].items():
                assert torch.equal(now[kind][key], expected), f"{where}: {kind} {key}"
        close(engine)

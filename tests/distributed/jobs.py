"""What test processes run: ``python -m tests.distributed.jobs NAME JSON`` on every rank of a gloo job."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.model import build_engine, close, setup_from_json, train

SAVE_AT = 4
CONTINUE_TO = 7


def save(arguments: dict[str, Any]) -> None:
    """Train each setup to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses."""
    for setup in map(setup_from_json, arguments["setups"]):
        folder = os.path.join(arguments["folder"], f"{setup.name}-dp{dist.get_world_size()}")
        engine = build_engine(setup)
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(folder, tag="step4", client_state={"note": "hello", "epoch": 3, "rng": [1, 2, 3]})
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        close(engine)
        dist.barrier()


def load(arguments: dict[str, Any]) -> None:
    """Load many checkpoints into one engine after another, and compare each with its truth."""
    elastic_ckpt.install()
    for target in arguments["targets"]:
        setup = setup_from_json(target["setup"])
        engine = build_engine(setup)
        for number, source in enumerate(target["sources"]):
            where = f"{source['folder']} ({source['format']}) -> {setup.name}-dp{dist.get_world_size()}"
            truth = torch.load(os.path.join(source["folder"], "truth.pt"), weights_only=False)
            engine._config.load_universal_checkpoint = source["format"] == "universal"
            path, client_state = engine.load_checkpoint(source["folder"])
            assert engine.elastic_report is not None, f"{where}: DeepSpeed's own path ran"
            assert engine.elastic_report.source.format == source["format"], where
            assert os.path.isfile(path), where
            assert client_state["note"] == "hello" and client_state["epoch"] == 3, where
            oracle.assert_equal(engine, truth, where)
            if number in target.get("continue", [0]):
                losses = train(engine, SAVE_AT, CONTINUE_TO)
                bound = 5e-3 if setup.bf16 else 1e-5
                differences = [abs(a - b) for a, b in zip(losses, truth["losses"], strict=True)]
                assert max(differences) <= bound, f"{where}: losses {losses}, uninterrupted {truth['losses']}"
            else:
                train(engine, 100 + number, 101 + number)  # leave other values for the next load to replace
        close(engine)


def main() -> None:
    torch.set_num_threads(1)
    random.seed(0)
    deepspeed.init_distributed(dist_backend="gloo")
    globals()[sys.argv[1]](json.loads(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

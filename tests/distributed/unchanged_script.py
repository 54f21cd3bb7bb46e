"""A training script that has never heard of elastic_ckpt: what a user starts through a launcher."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from tests.distributed.launch import end_with_parent
from tests.distributed.model import Setup, build_engine, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--resume-from", required=True)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    end_with_parent()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build_engine(Setup(1))
    engine.load_checkpoint(arguments.resume_from)
    losses = train(engine, engine.global_steps, 7)
    if dist.get_rank() == 0:
        result = {"losses": losses, "world": dist.get_world_size(), "report": str(engine.elastic_report)}
        result["variable"] = os.environ.get("ELASTIC_CKPT")
        Path(arguments.output).write_text(json.dumps(result))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # All went well. Threads of gloo now and then abort the interpreter's teardown ("terminate called without an
    # active exception"), in jobs without elastic_ckpt too: leave before it.
    os._exit(0)


if __name__ == "__main__":
    main()

"""A training script with elastic_ckpt's two lines in it, and DeepSpeed's own flags: started without ``elastic_ckpt.run``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed.launch import end_with_parent
from tests.distributed.model import Setup, TinyLM, build_optimizer, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--resume-from", required=True)
    parser.add_argument("--output", required=True)
    parser = elastic_ckpt.add_arguments(deepspeed.add_config_arguments(parser))
    arguments = parser.parse_args()
    elastic_ckpt.install()
    end_with_parent()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    model = TinyLM()
    optimizer = build_optimizer(model, Setup(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    engine.load_checkpoint(arguments.resume_from)
    losses = train(engine, engine.global_steps, 7)
    if dist.get_rank() == 0:
        result = {"losses": losses, "world": dist.get_world_size(), "report": str(engine.elastic_report)}
        Path(arguments.output).write_text(json.dumps(result))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as in unchanged_script.py


if __name__ == "__main__":
    main()

"""Ray Train's worker groups of several sizes, one after the other, that train by tests.distributed.nodes_script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from tests.distributed.nodes_script import FAIL, train


def train_loop(config: dict[str, Any]) -> None:
    os.environ.update(config["environment"])
    train(Path(config["folder"]), config["steps"])


def main() -> None:
    folder = sys.argv[1]
    ray.init(num_cpus=3, include_dashboard=False)
    for workers, steps, environment in ((2, 4, {FAIL: "3"}), (3, 6, {}), (1, 8, {})):
        name = f"{workers}_workers"
        TorchTrainer(
            train_loop,
            train_loop_config={"folder": folder, "steps": steps, "environment": environment},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(name, storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1)),
        ).fit()


if __name__ == "__main__":
    main()

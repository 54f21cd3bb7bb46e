"""Executes Python blocks of the documentation beside an engine of the demo's model: a job of one rank."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import deepspeed
import torch

import elastic_ckpt

REPO = Path(__file__).parents[2]


def demo() -> Any:
    """The demo's script, as a module."""
    spec = importlib.util.spec_from_file_location("demo_train", REPO / "launch" / "demo_train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def execute(code: str, names: dict[str, Any]) -> None:
    """A block, which may end a loop that is not shown."""
    exec(compile(f"for _ in [0]:\n{textwrap.indent(code, '    ')}", "<block>", "exec"), names)


def main() -> None:
    """Execute the blocks of a JSON file; each finds what the pages speak of."""
    blocks: list[list[str]] = json.loads(Path(sys.argv[1]).read_text())
    script = demo()
    torch.manual_seed(0)
    text, vocabulary = script.read_text()
    model = script.GPT(vocabulary)
    config = json.loads((REPO / "configs" / "elasticity.json").read_text())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    shutil.copytree("checkpoints", "as_saved")
    for where, code in blocks:
        shutil.rmtree("checkpoints")  # a block may save over it, at another stage
        shutil.copytree("as_saved", "checkpoints")
        names: dict[str, Any] = {
            **{"elastic_ckpt": elastic_ckpt, "torch": torch, "engine": engine, "parser": argparse.ArgumentParser()},
            **{"load_dir": "checkpoints", "save_dir": "checkpoints", "steps": 4, "step": 4, "rank": 0, "world_size": 1},
            **{"model": script.GPT(vocabulary), "stop_file": Path("stop")},
            **{"dataset": range(48), "config": dict(config), "learning_rate": 1e-3, "into_sequences": None},
            **{"DataLoader": torch.utils.data.DataLoader, "read_documents": lambda first: range(first, 48)},
            "global_batch_of": lambda step: script.local_batch(text, step, 24),
        }
        elastic_ckpt.install()
        engine.load_checkpoint("checkpoints")
        names["stop_file"].touch()
        print(f"executing {where}", flush=True)
        execute(code, names)
        if "load_checkpoint" in code:
            assert engine.elastic_report is not None and engine.global_steps == 3, where
        if "engine.step()" in code:
            assert engine.global_steps == 4, where
        if "save_checkpoint" in code:
            assert Path("checkpoints/latest").read_text() == "global_step3", where
    print(f"executed {len(blocks)} blocks", flush=True)
    os._exit(0)  # as in unchanged_script.py


if __name__ == "__main__":
    main()

"""A training script, started by the launchers that people use, resumes on another topology."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import REPO, end, environment, free_port, remove_shared_memory, start
from tests.distributed.model import GLOBAL_BATCH

UNCHANGED = str(REPO / "tests" / "distributed" / "unchanged_script.py")
INSTALLED = str(REPO / "tests" / "distributed" / "installed_script.py")
TORCHRUN = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", "{port}"]
DEEPSPEED = ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "{port}"]


@dataclass(frozen=True)
class Start:
    """One way to start a script: the words before its arguments, and its own."""

    words: list[str]
    arguments: tuple[str, ...] = ()
    section: Any = None


#: Where a config says "off", only the flag on the command line has elastic_ckpt load.
LAUNCHERS = {
    "torchrun -m elastic_ckpt.run": Start(
        [*TORCHRUN, "-m", "elastic_ckpt.run", UNCHANGED], ("--universal-checkpoint", "require")
    ),
    "deepspeed --module elastic_ckpt.run": Start(
        [*DEEPSPEED, "--module", "elastic_ckpt.run", "--universal-checkpoint", UNCHANGED]
    ),
    "torchrun": Start([*TORCHRUN, INSTALLED], (), {"mode": "require"}),
    "deepspeed": Start([*DEEPSPEED, INSTALLED], ("--universal-checkpoint",), {"mode": "off"}),
    "elastic_ckpt.run -m torchrun": Start(["elastic_ckpt.run", "-m", *TORCHRUN, UNCHANGED]),
    "elastic-ckpt exec -- torchrun": Start(
        ["elastic_ckpt", "exec", "--universal-checkpoint=require", "--", sys.executable, "-m", *TORCHRUN, INSTALLED],
        (),
        {"mode": "off"},
    ),
}


def config_arguments(section: Any, folder: Path) -> list[str]:
    """DeepSpeed's own flags, for a config with this section."""
    path = folder / "config.json"
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "elastic_checkpoint": section,
    }
    path.write_text(json.dumps(config))
    return ["--deepspeed", "--deepspeed_config", str(path)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_resumes_on_another_topology_under(
    launcher: str, native: Path, extensions_dir: str, tmp_path: Path
) -> None:
    way = LAUNCHERS[launcher]
    port = free_port()
    command = [sys.executable, "-m", *[word.format(port=port) for word in way.words], *way.arguments]
    if way.section is not None:
        command += config_arguments(way.section, tmp_path)
    resumes(command, native, environment(extensions_dir), tmp_path, port)


#: Lines of the documentation, with the flag where people write it; PORT and SCRIPT take places.
LINES = [
    "torchrun --nproc_per_node 2 --master_port PORT -m elastic_ckpt.run --universal-checkpoint require SCRIPT",
    "torchrun --nproc_per_node 2 --master_port PORT -m elastic_ckpt.run SCRIPT --universal-checkpoint require",
    "deepspeed --num_gpus 2 --master_port PORT --module elastic_ckpt.run --universal-checkpoint=require SCRIPT",
    "deepspeed --num_gpus 2 --master_port PORT --module elastic_ckpt.run SCRIPT --universal_checkpoint require",
    "elastic-ckpt exec --universal-checkpoint require -- torchrun --nproc_per_node 2 --master_port PORT SCRIPT",
    "elastic-ckpt exec -- torchrun --nproc_per_node 2 --master_port PORT SCRIPT --universal-checkpoint=require",
    "elastic-ckpt exec -- deepspeed --num_gpus 2 --master_port PORT SCRIPT --universal-checkpoint require",
]


@pytest.mark.nightly
@pytest.mark.parametrize("line", LINES)
def test_a_line_as_it_is_typed(line: str, native: Path, extensions_dir: str, tmp_path: Path) -> None:
    port = free_port()
    command = shlex.split(line.replace("PORT", str(port)).replace("SCRIPT", UNCHANGED))
    env = environment(extensions_dir)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    result = resumes([str(Path(sys.executable).with_name(command[0])), *command[1:]], native, env, tmp_path, port)
    assert result["variable"] == "require"


def resumes(command: list[str], native: Path, env: dict[str, str], folder: Path, port: int) -> dict[str, Any]:
    """Run a command, to which the script's arguments are added: it goes on with the losses of the run that saved."""
    source = native / "z3-fp32-adamw-dp3"
    output, log = folder / "result.json", folder / "log"
    process = start([*command, "--resume-from", str(source), "--output", str(output)], env, log)
    try:
        assert process.wait(200) == 0, log.read_text()[-4000:]
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text()[-4000:])
    finally:
        end(process)
        remove_shared_memory(port)
    result: dict[str, Any] = json.loads(output.read_text())
    truth = torch.load(source / "truth.pt", weights_only=False)
    assert result["world"] == 2
    assert "ZeRO-3, DP=3" in result["report"] and "ZeRO-1, DP=2" in result["report"]
    assert result["losses"] == pytest.approx(truth["losses"], abs=1e-5)
    assert "checkpoint restored" in log.read_text()
    return result

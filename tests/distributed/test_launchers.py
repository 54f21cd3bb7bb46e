"""An unchanged script, started by the launchers that people use, resumes on another topology."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import REPO, end, environment, free_port, remove_shared_memory, start

SCRIPT = str(REPO / "tests" / "distributed" / "unchanged_script.py")
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", "{port}", "-m", "elastic_ckpt.run"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "{port}", "--module", "elastic_ckpt.run"],
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_unchanged_script_resumes_on_another_topology_under(
    launcher: str, native: Path, extensions_dir: str, tmp_path: Path
) -> None:
    source = native / "z3-fp32-adamw-dp3"
    output, log = tmp_path / "result.json", tmp_path / "log"
    port = free_port()
    command = [sys.executable, "-m", *[word.format(port=port) for word in LAUNCHERS[launcher]]]
    process = start(
        [*command, SCRIPT, "--resume-from", str(source), "--output", str(output)], environment(extensions_dir), log
    )
    try:
        assert process.wait(200) == 0, log.read_text()[-4000:]
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text()[-4000:])
    finally:
        end(process)
        remove_shared_memory(port)
    result = json.loads(output.read_text())
    truth = torch.load(source / "truth.pt", weights_only=False)
    assert result["world"] == 2
    assert "ZeRO-3, DP=3" in result["report"] and "ZeRO-1, DP=2" in result["report"]
    assert result["losses"] == pytest.approx(truth["losses"], abs=1e-5)
    assert "checkpoint restored" in log.read_text()

"""The lines of docs/launchers.md that start a script of the Trainer, as they are written there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.blocks import REPO, blocks
from tests.distributed.launch import end, environment, free_port, remove_shared_memory, start
from tests.integration.comparing import assert_reported_once, assert_restored, assert_trains_on
from tests.integration.conftest import SCRIPTS, Job, Run

pytestmark = pytest.mark.nightly

ARGUMENTS = ("--stage", "2")
LINES = [
    line
    for block in blocks("bash")
    if block.not_run is not None and "test_launch_lines" in block.not_run
    for line in block.commands()
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_resumes_on_another_number_of_ranks(line: str, saved: Run, extensions_dir: str, tmp_path: Path) -> None:
    before = saved("trainer.py", *ARGUMENTS)
    seen, log, port = tmp_path / "seen", tmp_path / "log", free_port()
    seen.mkdir()
    env = environment(extensions_dir)
    bin_ = tmp_path / "bin"  # of this Python, wherever the tests' commands are installed
    bin_.mkdir()
    for name, module in {"elastic-ckpt": "elastic_ckpt", "torchrun": "torch.distributed.run"}.items():
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (bin_ / name).chmod(0o755)
    env["PATH"] = os.pathsep.join([str(bin_), str(Path(sys.executable).parent), env["PATH"]])
    env["PYTHONPATH"] = os.pathsep.join([str(REPO / "tests" / "integration" / "cpu"), env["PYTHONPATH"]])
    env |= {"MASTER_PORT": str(port), "PET_MASTER_PORT": str(port)}
    script = str(SCRIPTS / "trainer.py")
    command = re.sub(r"(num_processes |nproc_per_node |num_gpus )4", r"\g<1>3", line)
    command = re.sub(r"(accelerate launch) ", rf"\1 --main_process_port {port} ", command)
    command = re.sub(r"^deepspeed ", rf"\g<0>--master_port {port} ", command)
    command = command.replace("-m my_package.train", "-m tests.integration.scripts.trainer").replace("train.py", script)
    own = ["--output_dir", str(tmp_path / "out"), "--seen", str(seen), *ARGUMENTS]
    resume = ["--resume_from_checkpoint", str(before.output / "checkpoint-3")]
    process = start([*shlex.split(command), *own, *resume], env, log)
    try:
        assert process.wait(200) == 0, log.read_text()[-4000:]
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text()[-4000:])
    finally:
        end(process)
        remove_shared_memory(port)
    resumed = Job(tmp_path / "out", seen, log.read_text())
    assert_restored(before.holds("saved-3"), torch.load(seen / "loaded.pt", weights_only=False))
    assert_reported_once(resumed, 2, 3)
    assert_trains_on(before, resumed)

"""``launch/gpu.sh`` without a GPU, and the table that it writes with one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("launch_gpu", REPO / "launch" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_and_is_content(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ELASTIC_CKPT_PYTHON": sys.executable}
    command = ["bash", str(REPO / "launch" / "gpu.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "sees no GPU: nothing was tried" in done.stdout, done.stderr
    assert not (tmp_path / "out").exists()


def test_the_table_counts_what_is_right_wrong_failed_and_left_out() -> None:
    gpu = script()
    about = {"group": "ZeRO", "saved by": 2, "loaded by": 3}
    found = {
        "machine": {
            "gpu": "H100",
            "cores": 16,
            "torch": "2.13.0",
            "deepspeed": "0.19.8",
            "when": "2026-11-27 21:00:00",
        },
        "cells": [
            about | {"wrong": {}, "requantized blocks": 2},
            about | {"wrong": {"steps": "3 instead of 4"}},
            about | {"loaded by": 1, "failed": "exit code 1: RuntimeError: no"},
            {"group": "FusedAdam", "skipped": "no compiler"},
        ],
        "throughput": [
            {"nbytes": 3e9, "stage": 3, "load": 1.0, "read": 0.5, "copy": 0.25, "preadv": 0.3},
            {"failed": "exit code 1"},
        ],
    }
    text = gpu.table(found)
    assert "| ZeRO | 2 → 3 | 2 | 1, of which 1 within the bound of blocks that were cut |" in text
    assert "| ZeRO | 2 → 1 | 1 | 0: exit code 1: RuntimeError: no |" in text
    assert "| FusedAdam | | | not run: no compiler |" in text
    assert "| ZeRO-3, bf16, one rank | 3.00 | 1.00 | 0.50 | 6.0 | 12.0 | 2.00 | 10.0 |" in text
    page = (REPO / "docs" / "benchmarks.md").read_text()
    assert gpu.SECTION.sub(lambda match: match[1] + text + match[2], page).count(text) == 1

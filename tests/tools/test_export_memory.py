"""What an export takes of the machine, at a size where it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unpartitioned import FILE, indexed

_MIB = 1 << 20
#: Many tensors, which are several shards.
SHAPES = {f"layers.{number}.weight": (16 * _MIB,) for number in range(16)}
_SCRIPT = """
import json, sys
import elastic_ckpt
from pathlib import Path

import pytest

def counted():
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    status = Path("/proc/self/status").read_text()
    return int(io["rchar"]), int(status.partition("VmHWM:")[2].split()[0]) << 10

elastic_ckpt.export  # imports
read, before = counted()
report = elastic_ckpt.export(sys.argv[1], sys.argv[2], progress=False, dtype="bf16", max_shard_size="100MB")
after, peak = counted()
print(json.dumps({"read": after - read, "peak": peak - before, "written": report.nbytes, "files": report.files}))
"""


@pytest.mark.slow
def test_memory_is_that_of_a_shard_and_bytes_are_read_once(tmp_path: Path) -> None:
    source = tmp_path / "step"
    source.mkdir()
    groups = [{"lr": 1e-3, "params": list(range(len(SHAPES))), "param_names": list(SHAPES)}]
    indexed(source, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, {"state": {}, "param_groups": groups})
    nbytes = (source / FILE).stat().st_size
    assert nbytes > 1 << 30
    command = [sys.executable, "-c", _SCRIPT, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["written"] == 2 * 16 * 16 * _MIB and found["files"] == 8
    assert found["peak"] < 400 * _MIB, f"{found['peak'] / _MIB:.0f} MiB"
    assert 1.0 <= found["read"] / nbytes < 1.02

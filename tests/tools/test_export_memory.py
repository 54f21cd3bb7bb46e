"""What an export takes of the machine, at a size where it shows; and one that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import elastic_ckpt
from elastic_ckpt.tools.conversion.torch_file import save_without_data
from tests.unpartitioned import FILE, indexed

_MIB = 1 << 20
#: Larger than the memory that an export may take; and many small ones.
SHAPES = {"large": (320 * _MIB,), **{f"layers.{number}.weight": (4 * _MIB,) for number in range(16)}}
_SCRIPT = """
import json, sys
import elastic_ckpt
from pathlib import Path

def counted():
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    status = Path("/proc/self/status").read_text()
    return int(io["rchar"]), int(status.partition("VmHWM:")[2].split()[0]) << 10

elastic_ckpt.export  # imports
read, _ = counted()
report = elastic_ckpt.export(sys.argv[1], sys.argv[2], progress=False, **json.loads(sys.argv[3]))
after, peak = counted()
print(json.dumps({"read": after - read, "peak": peak, "written": report.nbytes}))
"""


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A checkpoint without ZeRO of 1.5 GiB, which are holes in its file."""
    folder = tmp_path / "step"
    folder.mkdir()
    groups = [{"lr": 1e-3, "params": list(range(len(SHAPES))), "param_names": list(SHAPES)}]
    indexed(folder, {}, {"state": {}, "param_groups": groups})
    tree = torch.load(folder / FILE, weights_only=False)

    def with_weights(tensors: list[torch.Tensor]) -> dict[str, Any]:
        return {**tree, "module": dict(zip(SHAPES, tensors, strict=True))}

    save_without_data(str(folder / FILE), with_weights, [(shape, "float32") for shape in SHAPES.values()])
    assert (folder / FILE).stat().st_size > 3 << 29 and (folder / FILE).stat().st_blocks < 8192
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("format", "jobs"), [("safetensors", 4), ("torch", 64)])
def test_memory_stays_below_a_gibibyte_and_bytes_are_read_once(
    format: str, jobs: int, sparse: Path, tmp_path: Path
) -> None:
    options = json.dumps({"dtype": "bf16", "format": format, "max_shard_size": "400MB", "jobs": jobs})
    command = [sys.executable, "-c", _SCRIPT, str(sparse), str(tmp_path / "out"), options]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["written"] > 3 << 28
    assert found["peak"] < 1 << 30, f"{found['peak'] / _MIB:.0f} MiB"
    assert 1.0 <= found["read"] / (sparse / FILE).stat().st_size < 1.02, "imports count too"


@pytest.mark.slow
def test_a_killed_export_goes_on_with_the_first_file_that_is_not_complete(sparse: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "max_shard_size": "20MB"}
    command = [sys.executable, "-c", _SCRIPT, str(sparse), str(tmp_path / "out"), json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    complete = tmp_path / ".out.partial" / "model-00002-of-00009.safetensors"
    deadline = time.monotonic() + 120
    while not complete.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL and complete.exists() and not (tmp_path / "out").exists()
    report = elastic_ckpt.export(sparse, tmp_path / "out", progress=False, **options)
    assert 2 <= report.files_kept < 9 and report.files == 9 - report.files_kept
    assert not complete.parent.exists()
    names = set()
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(path)
        names |= tensors.keys()
        assert all(not value.any() and tuple(value.shape) == SHAPES[name] for name, value in tensors.items())
    assert names == SHAPES.keys()

"""What an installed elastic_ckpt can do without its checkout; ``launch/package.sh`` runs it in fresh environments.

python smoke.py ENVIRONMENT CHECKPOINT     all: it has torch and DeepSpeed; light: no DeepSpeed; bare: no torch either
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import elastic_ckpt
from elastic_ckpt.sharding.rules import Preset

_READ_METADATA = ("inspect {}", "verify --full {}", "latest {}", "plan --dp 3 --zero 1 {}")
_READ_TENSORS = ("export {} weights", "convert {} ./universal", "diff {} ./universal")


def run(command: str, exit_code: int = 0, without_torch: bool = False) -> str:
    """What a command prints, which must end with ``exit_code``."""
    environment = os.environ | ({"PYTHONPROFILEIMPORTTIME": "1"} if without_torch else {})
    done = subprocess.run(
        shlex.split(command), capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == exit_code, f"{command}: ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert not (without_torch and re.search(r"\| +torch$", done.stderr, re.MULTILINE)), f"{command} imports torch"
    return done.stdout + done.stderr


def save(folder: str) -> None:
    """Save a checkpoint of one rank, by DeepSpeed."""
    import deepspeed  # noqa: PLC0415
    import torch  # noqa: PLC0415

    # it would be compiled, and one rank sends nothing
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    model = torch.nn.Linear(48, 32)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.Adam(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(1, 48)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    assert engine.elastic_report is not None


def try_everything(checkpoint: str) -> None:
    """Try what needs files of the package, and what needs torch and DeepSpeed."""
    package = Path(elastic_ckpt.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not the wheel that was installed"
    assert version("elastic_ckpt") == elastic_ckpt.__version__
    assert (package / "py.typed").is_file()
    assert {"bloom", "megatron-core"} <= set(Preset.names())
    assert run("elastic-ckpt --version").strip() == elastic_ckpt.__version__
    run("elastic-ckpt plan no-such-folder --dp 4", exit_code=3)
    run("elastic-ckpt verify no-such-folder", exit_code=3)
    assert not list((package / "docs").glob("*.py")), "only the pages are data"
    run("python -m elastic_ckpt --help")
    elastic_ckpt.install()
    save(checkpoint)
    elastic_ckpt.uninstall()


def try_commands(checkpoint: str, has_torch: bool) -> None:
    """Try the command line without DeepSpeed, and what says that it is missing."""
    assert find_spec("deepspeed") is None and (find_spec("torch") is not None) == has_torch
    assert "troubleshooting" in run("elastic-ckpt docs", without_torch=True)
    assert "DamagedError" in run("elastic-ckpt docs troubleshooting#damagederror", without_torch=True)
    for command in _READ_METADATA:
        run(f"elastic-ckpt {command.format(checkpoint)}", without_torch=True)
    for command in _READ_TENSORS:
        said = run(f"elastic-ckpt {command.format(checkpoint)}", exit_code=0 if has_torch else 2)
        assert has_torch or "pip install torch" in said, said
    assert "not installed" in run("elastic-ckpt doctor", exit_code=1, without_torch=True)
    try:
        elastic_ckpt.install()
    except elastic_ckpt.ElasticCkptError as error:
        assert "pip install torch 'deepspeed>=0.14.5'" in str(error), error
    else:
        raise AssertionError("install() does without DeepSpeed")


def main(environment: str, checkpoint: str) -> None:
    """Try what an environment can do."""
    if environment == "all":
        try_everything(checkpoint)
    else:
        try_commands(checkpoint, has_torch=environment == "light")
    print(f"elastic_ckpt {elastic_ckpt.__version__}: the wheel works outside the checkout ({environment})")


if __name__ == "__main__":
    main(*sys.argv[1:])

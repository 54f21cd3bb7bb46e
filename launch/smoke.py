"""What an installed elastic_ckpt can do without its checkout; ``launch/package.sh`` runs it in a fresh environment."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import elastic_ckpt
from elastic_ckpt.sharding.rules import Preset


def run(command: str, exit_code: int = 0) -> str:
    """The output of a command, which must end with ``exit_code``."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == exit_code, f"{command}: ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    """Try what needs files of the package, and what needs torch and DeepSpeed."""
    package = Path(elastic_ckpt.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not the wheel that was installed"
    assert version("elastic_ckpt") == elastic_ckpt.__version__
    assert (package / "py.typed").is_file()
    assert {"bloom", "megatron-core"} <= set(Preset.names())
    assert run("elastic-ckpt --version").strip() == elastic_ckpt.__version__
    run("elastic-ckpt plan no-such-folder --dp 4", exit_code=3)
    run("elastic-ckpt verify no-such-folder", exit_code=3)
    run("python -m elastic_ckpt --help")
    elastic_ckpt.install()
    elastic_ckpt.uninstall()
    print(f"elastic_ckpt {elastic_ckpt.__version__}: the wheel works outside the checkout")


if __name__ == "__main__":
    main()

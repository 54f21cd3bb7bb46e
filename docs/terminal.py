"""Draws what the commands print, as SVG, into docs/images: ``python docs/terminal.py``.

The demo's model is trained for a few steps on two ranks, and resumed on three, so that there is something to print.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

REPO = Path(__file__).parents[1]
IMAGES = REPO / "docs" / "images"
WIDTH = 80
#: The commands that are shown, by the name of the picture, in the order in which they are run.
COMMANDS = {
    "inspect": "elastic-ckpt inspect checkpoints",
    "plan": "elastic-ckpt plan checkpoints --dp 3 --zero 1",
    "verify": "elastic-ckpt verify damaged --full",
    "convert": "elastic-ckpt convert checkpoints universal/step3",
    "diff": "elastic-ckpt diff checkpoints universal/step3",
    "export": "elastic-ckpt export checkpoints my-model",
}
#: What this command prints when it resumes is the picture "report".
RESUME = "torchrun --nproc_per_node 3 -m elastic_ckpt.run train.py --resume-from checkpoints"
#: This one draws a picture of its own.
SCATTER = "elastic-ckpt plan checkpoints --dp 3 --zero 1 --plot scatter.svg"
_STEPS = 3
_TRAIN = f"--losses losses.csv --steps {_STEPS}"


def prepare(folder: Path, environment: Mapping[str, str]) -> str:
    """Save ``checkpoints`` and a ``damaged`` copy below a folder; what a resuming job prints as its report."""
    script, configs = REPO / "launch" / "demo_train.py", REPO / "configs"
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node"
    saving = f"{launcher} 2 {script} --deepspeed_config {configs}/zero3.json {_TRAIN} --save-at {_STEPS}"
    _run(saving, folder, environment)
    arguments = f"--deepspeed_config {configs}/zero1.json {_TRAIN} --resume-from checkpoints"
    printed = _run(f"{launcher} 3 -m elastic_ckpt.run {script} {arguments}", folder, environment)
    shutil.copytree(folder / "checkpoints", folder / "damaged")
    file = folder / "damaged" / f"global_step{_STEPS}" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    lines = printed.splitlines()
    (first,) = (at for at, line in enumerate(lines) if "checkpoint restored" in line)
    last = next(at for at, line in enumerate(lines) if at > first and "┘" in line)
    return "\n".join(lines[first : last + 1])


def _run(command: str, folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    # a finding is what one of them is about
    assert done.returncode == (1 if "damaged" in command else 0), f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def terminal_environment(**more: str) -> dict[str, str]:
    """An environment whose commands print as on a terminal, in colour."""
    shown = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore"}
    quiet = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return os.environ | shown | quiet | more


def pictures(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Every picture, by its name: the commands are run in a folder, which is empty before."""
    found = {"report": picture(RESUME, prepare(folder, environment))}
    _run(SCATTER, folder, environment)
    drawn = (folder / "scatter.svg").read_text(encoding="utf-8")
    found["scatter"] = re.sub(r" <metadata>.*?</metadata>\n", "", drawn, flags=re.DOTALL)  # the date, matplotlib's site
    return found | {name: picture(command, _run(command, folder, environment)) for name, command in COMMANDS.items()}


def picture(command: str, printed: str) -> str:
    """A terminal in which a command has been run."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(printed.rstrip()))
    drawn = console.export_svg(title="", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # nothing is loaded from elsewhere


def main() -> None:
    """Draw them all."""
    IMAGES.mkdir(exist_ok=True)
    work = Path(tempfile.gettempdir()) / "demo"  # its name is in the pictures
    work.mkdir()
    try:
        extensions = os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS", f"{work}/extensions")
        for name, drawn in pictures(work, terminal_environment(TORCH_EXTENSIONS_DIR=extensions)).items():
            (IMAGES / f"{name}.svg").write_text(drawn, encoding="utf-8")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()

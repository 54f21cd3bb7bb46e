"""Executes a page of the documentation: its commands, in order, and holds what it shows against what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.blocks import REPO, Block, blocks
from tests.distributed.launch import run_ranks

#: Of blocks that are executed here; a block without a language after one of them is what it prints.
EXECUTED = "tests/integration/test_examples.py runs this"
#: What rank 0 of a job prints when all that it loaded is what was saved.
EQUAL = "loaded as saved: {} tensors"
_LIMIT = 200


def normalized(text: str, folder: str) -> str:
    """A text without what differs from run to run: the folder, seconds and sizes, blanks, and lines around tables."""
    text = re.sub(r"\s|[│┃─━┏┓┗┛┌┐└┘├┤┬┴┼┡┩╇┳┻]", "", text)
    text = text.replace(f"{folder}/", "")  # which a table may have broken
    return re.sub(r"\d+\.\d+", "#", text)


@dataclass
class Walk:
    """What the commands of a page did.

    Attributes:
        printed: by all of them.
        jobs: what rank 0 of each job printed.
    """

    folder: Path
    extensions_dir: str
    more: Mapping[str, str] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    def execute(self, command: str) -> str:
        """Run one command; what it prints on both streams."""
        words = shlex.split(command, comments=True)
        ends_with = int(match[1]) if (match := re.search(r"# ends with (\d)", command)) else 0
        env = dict(self.more)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        if words[0] == "torchrun":
            return self._job(words, env)
        if words[0] == "elastic-ckpt":
            words[:1] = [sys.executable, "-m", "elastic_ckpt"]
        shown = {**os.environ, **env, "PYTHONPATH": str(REPO)}
        done = subprocess.run(
            words, cwd=self.folder, env=shown, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
        assert done.returncode == ends_with, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def _job(self, words: list[str], env: dict[str, str]) -> str:
        """``torchrun --nproc_per_node N [--nnodes N] SCRIPT ARGUMENTS``, on processes that have imported the frameworks."""
        options, script = dict[str, str](), 1
        while words[script].startswith("--"):
            options[words[script].lstrip("-").replace("-", "_")] = words[script + 1]
            script += 2
        nodes, each = int(options.get("nnodes", 1)), int(options["nproc_per_node"])
        logs = self.folder / "logs" / str(len(self.jobs))
        logs.mkdir(parents=True)
        places = [
            (0, {"LOCAL_RANK": str(rank % each), "GROUP_RANK": str(rank // each)}) for rank in range(nodes * each)
        ]
        arguments = {"argv": words[script:], "logs": str(logs), "cwd": str(self.folder), "env": env}
        limit = _LIMIT if any(Path(self.extensions_dir).rglob("*.so")) else 500
        run_ranks(nodes * each, "tests.integration.example:run", arguments, self.extensions_dir, limit, places=places)
        self.jobs.append((logs / "rank0.log").read_text())
        return self.jobs[-1]

    def losses(self) -> list[list[float]]:
        """Losses that jobs printed, by step: several where several jobs were at that step.

        The Trainer prints no steps: the last loss of each of its jobs is of the same one.
        """
        found: dict[int, list[float]] = {}
        for job in self.jobs:
            steps = [(int(step), loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", job, re.MULTILINE)]
            of_trainer = re.findall(r"^{'loss': '([\d.]+)'", job, re.MULTILINE)
            for step, loss in steps or [(at - len(of_trainer), loss) for at, loss in enumerate(of_trainer)]:
                found.setdefault(step, []).append(float(loss))
        return list(found.values())


def walk(page: str, section: str, walk: Walk) -> None:
    """Execute the blocks of a page, or of one of its sections, and compare what it shows."""
    (walk.folder / "examples").symlink_to(REPO / "examples")
    printed = None
    for block in (block for block in blocks("bash", "") if block.page.name == page and _is_below(block, section)):
        if block.language == "bash":
            runs = EXECUTED in (block.not_run or "")
            printed = "".join(walk.execute(command) for command in block.commands()) if runs else None
            walk.printed += [printed] if printed else []
        elif printed is not None:
            rest = normalized(printed, str(walk.folder))
            for part in re.split(r"^\.\.\.$", block.text, flags=re.MULTILINE):
                expected = normalized(part, str(walk.folder))
                assert expected in rest, f"{block.where}\n{part}\nwas not printed (in this order):\n{printed}"
                rest = rest[rest.index(expected) + len(expected) :]
    assert walk.printed, f"{page}: nothing is executed"


def _is_below(block: Block, section: str) -> bool:
    """Whether the last heading above a block is this one; all are below no heading."""
    above = block.page.read_text(encoding="utf-8").splitlines()[: block.line]
    return not section or next((line for line in reversed(above) if line.startswith("## ")), "") == f"## {section}"

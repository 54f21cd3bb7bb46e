"""Jobs that train with a framework and save, and jobs of another number of ranks that resume what they saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
#: Seconds that one job may take; they take two to ten. The first one builds DeepSpeed's extension.
LIMIT, FIRST_LIMIT = 120, 500


FRAMEWORKS = ("transformers", "accelerate", "peft", "bitsandbytes", "lightning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything below this folder is marked, wherever pytest was started, and needs the frameworks."""
    missing = [name for name in FRAMEWORKS if find_spec(name) is None]
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if missing:
                reason = f"not installed: {', '.join(missing)} (pip install elastic_ckpt[integration])"
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Job:
    """A job that has ended well.

    Attributes:
        output: the folder that the framework saved into.
        seen: what its witness wrote.
        log: everything that its ranks printed.
    """

    output: Path
    seen: Path
    log: str

    def holds(self, moment: str) -> dict[str, Any]:
        """What the engine held at a moment: ``saved-3``, ``loaded``; see :func:`tests.integration.witness.take`."""
        return torch.load(self.seen / f"{moment}.pt", weights_only=False)

    @property
    def result(self) -> dict[str, Any]:
        """The last step, and the loss of each."""
        return json.loads((self.seen / "result.json").read_text())


Run = Callable[..., Job]


@pytest.fixture(scope="session")
def run(extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(ranks, script, *arguments, elastic=True)``: as ``torchrun [-m elastic_ckpt.run] script arguments``.

    Fails with the ranks' output where one of them fails.
    """

    def job(ranks: int, script: str, *arguments: str, elastic: bool = False) -> Job:
        folder = tmp_path_factory.mktemp("job")
        seen = folder / "seen"
        seen.mkdir()
        argv = ["-m", "elastic_ckpt.run"] if elastic else []
        argv += [str(SCRIPTS / script), "--output_dir", str(folder / "out"), "--seen", str(seen), *arguments]
        limit = LIMIT if any(Path(extensions_dir).rglob("*.so")) else FIRST_LIMIT
        run_ranks(ranks, "tests.integration.script:run", {"argv": argv, "logs": str(seen)}, extensions_dir, limit)
        return Job(folder / "out", seen, "".join(file.read_text() for file in sorted(seen.glob("rank*.log"))))

    return job


@pytest.fixture(scope="session")
def saved(run: Run) -> Run:
    """``saved(script, *arguments)``: the job of two ranks that trains to the end and saves halfway; once a session."""
    jobs: dict[tuple[str, ...], Job] = {}

    def job(*command: str) -> Job:
        if command not in jobs:
            jobs[command] = run(2, *command)
        return jobs[command]

    return job

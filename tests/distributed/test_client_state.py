"""The client state that a job gets back: at the saved topology each rank its own, elsewhere the first rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.conftest import Launch
from tests.distributed.model import Setup

SKIPPING = (("elastic_checkpoint", {"on_unreadable_entry": "skip"}),)


def test_it_is_what_deepspeeds_own_loader_returns_or_one_entry_is_refused(launch: Launch, tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = []
    for stage in (1, 3):
        case = {"setup": Setup(stage), "folder": str(tmp_path / f"stage{stage}"), "skips": False}
        cases += [case, {**case, "setup": Setup(stage, config=SKIPPING), "skips": True}]
    launch(2, "client_jobs.save", cases[::2])
    for ranks in (2, 1):
        for facts in launch(ranks, "client_jobs.load", cases):
            assert facts is None, (ranks, facts)

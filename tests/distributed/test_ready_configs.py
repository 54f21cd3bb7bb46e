"""Every ready config of ``configs/`` trains, saves and resumes on another number of ranks."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.conftest import Launch
from tests.distributed.launch import REPO

CONFIGS = sorted(str(path) for path in (REPO / "configs").glob("*.json"))


def test_what_a_ready_config_saves_on_two_ranks_is_resumed_on_one(launch: Launch, tmp_path: Path) -> None:
    arguments = {"configs": CONFIGS, "folder": str(tmp_path)}
    launch(2, "config_jobs.save", arguments)
    for load in launch(1, "config_jobs.resume", arguments):
        stage = load.case
        assert f"ZeRO-{stage}, DP=2" in load.text and f"ZeRO-{stage}, DP=1, at step 2" in load.text
        assert load.differences == {}, load.where

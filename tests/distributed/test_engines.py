"""Several engines in one process: actor, critic and reference, engines made anew, and loads in threads."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.conftest import Launch


def test_each_engine_of_a_process_is_restored_and_no_two_are_at_once(launch: Launch, tmp_path: Path) -> None:
    launch(1, "engine_jobs.save", str(tmp_path))
    for found in launch(2, "engine_jobs.load", str(tmp_path)):
        assert len(found.differences) == 7 and set(map(str, found.differences.values())) == {"{}"}, found
        (refused,) = found.refused
        assert refused.startswith("ConfigError: another load of this process has not ended"), refused
        tags = {name: str(tmp_path / name / "global_step2") for name in ("actor", "critic")}
        assert found.reports == {"before": None, "anew": None, **tags}

"""Several engines in one process: actor, critic and reference, engines made anew, and loads in threads."""

from __future__ import annotations

from types import SimpleNamespace

from tests.distributed.cells import Cell, Save, Saves, cells

BOTH = Save("actor and critic", 1, "engine_jobs.save")


@cells([Cell("actor, critic and reference", BOTH, "engine_jobs.load", 2)])
def test_each_engine_of_a_process_is_restored_and_no_two_are_at_once(
    cell: Cell, facts: list[SimpleNamespace], saves: Saves
) -> None:
    for found in facts:
        assert len(found.differences) == 7 and set(map(str, found.differences.values())) == {"{}"}, found
        (refused,) = found.refused
        assert refused.startswith("ConfigError: another load of this process has not ended"), refused
        tags = {name: str(saves.folder(BOTH) / name / "global_step2") for name in ("actor", "critic")}
        assert found.reports == {"before": None, "anew": None, **tags}

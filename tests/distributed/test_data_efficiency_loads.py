"""A checkpoint's states of DeepSpeed's data schedulers and of the data position, changed: refused, or gone on with."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import Cell, cells


@cells(
    [Cell(f"on {ranks}", None, "data_efficiency_jobs.load_each", ranks, {"seed": 4, "count": 150}) for ranks in (1, 2)]
)
def test_a_changed_state_is_refused_on_every_rank_or_changes_nothing(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.problems == []
        assert found.refused > 100


@cells([Cell("follow", None, "data_efficiency_jobs.follow", 2)])
def test_each_way_out_of_a_strange_state_works(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.what == ("refused", "refused") and found.loaded
        assert found.texts == [
            'set "enabled": false in "curriculum_learning" of "data_sampling" in the DeepSpeed config, which restores '
            "everything else",
            "load_checkpoint(..., load_module_only=True) loads only the weights",
        ]
        assert found.weights and found.differ == set()
        assert found.is_held and "restore that folder" in found.lost


@cells([Cell("left to DeepSpeed", None, "data_efficiency_jobs.leave", 2)])
def test_a_strange_state_is_refused_before_deepspeeds_own_loader_begins(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        (what, error, is_held, _), (loaded, _, _, report) = found.loads
        assert what == "refused" and is_held and "max_value of random_ltd" in error
        assert loaded == "ok" and report is None
        assert found.continues == [True, True]

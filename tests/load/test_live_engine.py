"""What all ranks know of each pipeline stage, with the other ranks played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt import distributed
from elastic_ckpt.core.local_state import LiveGroup, LiveShards, LocalState, ModelLayout, RankCoordinates
from elastic_ckpt.load.live_engine import describe


def of_rank(pp: int, pp_rank: int, dp_rank: int = 0) -> LocalState:
    """A rank of a pipeline with one layer on each stage."""
    at = RankCoordinates(2, dp_rank, pp=pp, pp_rank=pp_rank)
    names = f"{pp_rank}.weight", f"{pp_rank}.bias"
    model = ModelLayout(at, {name: LiveShards(((2,),)) for name in names})
    return LocalState(0, "AdamW", (), (), (), (LiveGroup(names, {}),), model)


def described(ranks: list[LocalState], own: int, monkeypatch: pytest.MonkeyPatch) -> LocalState:
    """What one of these ranks learns."""

    def work_of(rank: LocalState) -> Any:
        said: list[Any] = []
        monkeypatch.setattr(distributed, "all_gather", lambda _, work: said.append(work()) or [said[0]])
        describe(lambda: SimpleNamespace(local_state=lambda: rank))  # type: ignore[arg-type, return-value]
        return said[0]

    sent = [work_of(rank) for rank in ranks]
    monkeypatch.setattr(distributed, "all_gather", lambda _, work: (work(), sent)[1])
    _, found = describe(lambda: SimpleNamespace(local_state=lambda: ranks[own]))  # type: ignore[arg-type, return-value]
    return found


@pytest.mark.parametrize("own", range(4))
def test_every_rank_knows_the_groups_of_all_stages(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [of_rank(2, pp_rank, dp_rank) for pp_rank in range(2) for dp_rank in range(2)]
    found = described(ranks, own, monkeypatch)
    assert [stage.groups for stage in found.stages] == [(("0.weight", "0.bias"),), (("1.weight", "1.bias"),)]
    assert [stage.names for stage in found.stages] == [{"0.weight", "0.bias"}, {"1.weight", "1.bias"}]
    assert found.model.names == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_without_a_pipeline_there_are_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert described([of_rank(1, 0), of_rank(1, 0, 1)], 0, monkeypatch).stages == ()

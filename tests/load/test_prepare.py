"""What ranks tell each other between plan and load, with the other ranks played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.core.read_plan import ReadPlan, ReplicaCheck
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.compare_replicas import ReplicaDifference
from elastic_ckpt.load.prepare import _any_loads_scheduler, _notes, _Planned, _refuse_different_shares, _told

DRIFTED = ReplicaDifference(ReplicaCheck("ema.weight", MASTER, 4, ()), copies=2, largest=0.5, total=1.0)
PLAN = ReadPlan((), (), (), notes=("of this rank",))
#: The rank that compares a parameter's copies stands in another pipeline stage than those that know its rule.
HERE = _Planned(1, "here", [DRIFTED], frozenset(), ("of this rank",), loads_scheduler=False)


def other(averaged: frozenset[str] = frozenset()) -> _Planned:
    """What the rank of the other stage tells."""
    return _Planned(0, "there", [], averaged, ("of the other",), loads_scheduler=False)


def test_what_is_averaged_by_a_rule_that_only_another_stage_knows_may_differ() -> None:
    notes = _notes(PLAN, [other(frozenset({"ema.weight"})), HERE], ElasticConfig())
    assert notes[:2] == ("of the other", "of this rank")
    assert "ema.weight: 2 copies" in notes[2]


def test_what_no_stage_averages_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"ema\.weight"):
        _notes(PLAN, [other(frozenset({"norm.weight"})), HERE], ElasticConfig())


def test_without_tensor_and_pipeline_parallelism_all_ranks_note_the_same() -> None:
    alone = replace(HERE, differences=[], notes=())
    assert _notes(PLAN, [alone, alone], ElasticConfig()) == PLAN.notes


def test_ranks_of_other_stages_may_deal_out_other_tensors_and_no_others() -> None:
    _refuse_different_shares([other(), HERE, HERE])
    with pytest.raises(MismatchError, match="rank 2 differs from rank 1") as caught:
        _refuse_different_shares([other(), HERE, replace(HERE, digest="another")])
    assert caught.value.rank == 2


def test_notes_are_told_where_ranks_have_others() -> None:
    for place in (RankCoordinates(tp=2), RankCoordinates(pp=2, pp_rank=1)):
        assert _told(PLAN, place, [DRIFTED], scheduler=True).notes == PLAN.notes
    alone = _told(PLAN, RankCoordinates(dp=2), [DRIFTED], scheduler=True)  # a rank may read dtypes that others do not
    assert alone.notes == PLAN.notes and alone.differences == [DRIFTED] and alone.loads_scheduler


def test_all_ranks_wait_for_a_scheduler_that_one_of_them_loads() -> None:
    assert not _any_loads_scheduler([HERE, HERE])
    assert _any_loads_scheduler([HERE, replace(HERE, loads_scheduler=True)])

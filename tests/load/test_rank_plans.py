"""What ranks tell each other between plan and load, with the other ranks played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan, ReplicaCheck
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.compare_replicas import Drift
from elastic_ckpt.load.rank_plans import RankPlan, _notes, _refuse_different_shares, agree_on_plans
from elastic_ckpt.storage.media import Medium

DRIFTED = Drift(ReplicaCheck("ema.weight", MASTER, 4, ()), copies=2, largest=0.5)
#: The rank that compares a parameter's copies stands in another pipeline stage than those that know its rule.
HERE = RankPlan(1, "here", [DRIFTED], frozenset(), ("of this rank",), runs_code=False)


def other(averaged: frozenset[str] = frozenset()) -> RankPlan:
    """The plan of the rank of the other stage."""
    return RankPlan(0, "there", [], averaged, ("of the other",), runs_code=False)


def test_what_is_averaged_by_a_rule_that_only_another_stage_knows_may_differ() -> None:
    notes = _notes([other(frozenset({"ema.weight"})), HERE], ElasticConfig())
    assert notes[:2] == ("of the other", "of this rank")
    assert "ema.weight: 2 copies" in notes[2]


def test_what_no_stage_averages_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"ema\.weight"):
        _notes([other(frozenset({"norm.weight"})), HERE], ElasticConfig())


def test_what_several_ranks_note_is_noted_once() -> None:
    alone = replace(HERE, differences=[])
    assert _notes([alone, alone], ElasticConfig()) == ("of this rank",)
    assert _notes([replace(alone, notes=())] * 2, ElasticConfig()) == ()


def test_where_one_rank_sees_a_network_all_read_as_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [replace(HERE, differences=[], medium=Medium(*each)) for each in (("network", "nfs4"), ("local", "xfs"))]
    monkeypatch.setattr(distributed, "all_gather", lambda doing, work: [work(), plans[0]])
    *_, medium = agree_on_plans(lambda: plans[1], lambda: LoadPlan(ReadPlan((), (), ())), ElasticConfig())
    assert str(medium) == "network (nfs4)"


def test_ranks_of_other_stages_may_deal_out_other_tensors_and_no_others() -> None:
    _refuse_different_shares([other(), HERE, HERE])
    with pytest.raises(MismatchError, match="rank 2 differs from rank 1") as caught:
        _refuse_different_shares([other(), HERE, replace(HERE, digest="another")])
    assert caught.value.rank == 2

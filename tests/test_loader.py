"""What ranks tell each other between plan and load, with the other ranks played."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ckpt import loader
from elastic_ckpt.catalog import MASTER
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.destinations import Place
from elastic_ckpt.drift import Difference
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.plan import Comparison, Plan

DRIFTED = Difference(Comparison("ema.weight", MASTER, 4, ()), copies=2, largest=0.5, total=1.0)
NOTHING = Plan((), (), ())
#: The rank that compares a parameter's copies stands in another pipeline stage than those that know its rule.
PLACE = Place(tp=1, pp=2, pp_rank=1)


def compared(monkeypatch: pytest.MonkeyPatch, elsewhere: frozenset[str]) -> Plan:
    """The plan of a rank that finds a parameter's copies apart, of which a rank of another stage knows a rule."""

    def gathered(doing: str, work: Any) -> list[Any]:
        return [([], elsewhere), work()]

    def share(item: Any) -> list[Any]:
        return [item, ("of the other",)]

    monkeypatch.setattr(loader, "find_drift", lambda plan, options: [DRIFTED])
    monkeypatch.setattr(loader.parallel, "gathered", gathered)
    monkeypatch.setattr(loader.parallel, "share", share)
    return loader._compare_copies(NOTHING, PLACE, ElasticConfig())


def test_what_is_averaged_by_a_rule_that_only_another_stage_knows_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compared(monkeypatch, frozenset({"ema.weight"}))
    assert plan.notes[0] == "of the other"
    assert "ema.weight: 2 copies" in plan.notes[1]


def test_what_no_stage_averages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MismatchError, match=r"ema\.weight"):
        compared(monkeypatch, frozenset({"norm.weight"}))

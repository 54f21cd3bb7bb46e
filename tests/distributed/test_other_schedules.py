"""Another lr scheduler than at the save: one that is not restored begins anew, from the live lr; none is half restored."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.other_schedule_jobs import MORE, SCHEDULES, fresh_rates

SAVED = ["none", "LambdaLR", "WarmupLR", "OneCycle", "OneCycleLR", "SequentialLR"]
KEEP_LIVE = {"param_groups": "keep_live"}
WITHOUT = {"load_lr_scheduler_states": False}
#: Saved and live schedule, and the config.
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("WarmupLR", "SequentialLR", {}),
    ("OneCycle", "SequentialLR", {}),
    ("OneCycleLR", "SequentialLR", {}),
    ("SequentialLR", "WarmupLR", {}),
    ("WarmupLR", "CosineAnnealingLR", {}),
    ("LambdaLR", "CosineAnnealingLR", KEEP_LIVE),
    ("SequentialLR", "LinearLR", {}),
]
ADDED = [("none", schedule) for schedule in SCHEDULES if schedule != "none"]
ASKED = [(was, now) for was, now, _ in REFUSED] + [("LambdaLR", "LambdaLR"), ("SequentialLR", "SequentialLR")]

#: Of a schedule that the script steps itself; two of them added since, one that the script would restore.
OUTSIDE = [("none", "SequentialLR"), ("WarmupLR", "OneCycleLR"), ("LambdaLR", "LambdaLR")]


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = str(tmp_path_factory.mktemp("other_schedules"))
    truth = launch(2, "other_schedule_jobs.save", {"folder": folder, "schedules": SAVED})[0]
    cases: list[dict[str, Any]] = [
        *({"was": was, "now": now, "section": section} for was, now, section in REFUSED),
        *({"was": was, "now": now} for was, now in ADDED),
        *({"was": was, "now": now, "arguments": WITHOUT} for was, now in ASKED),
        {"was": "LambdaLR", "now": "none"},
        *({"was": was, "now": now, "outside": True} for was, now in OUTSIDE),
    ]
    for number, case in enumerate(cases):
        case["stage"] = 3 if number % 2 else 1
    every = launch(2, "other_schedule_jobs.resume", {"folder": folder, "cases": cases})
    of_ranks = [every[number :: len(cases)] for number in range(len(cases))]
    return SimpleNamespace(cells=of_ranks, truth=truth, folder=Path(folder))


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_the_state_of_another_class_is_refused_before_anything_changes(number: int, found: SimpleNamespace) -> None:
    first, second = found.cells[number]
    assert first.error == second.error and first.error.startswith("MismatchError"), first.error
    was, now, _ = REFUSED[number]
    assert now in first.error and (was in first.error or "of DeepSpeed" in first.error)
    assert "load_lr_scheduler_states=False" in first.remedy
    assert not first.changed and not second.changed


@pytest.mark.parametrize("number", range(len(ADDED) + len(ASKED)))
def test_a_schedule_that_is_not_restored_begins_with_the_live_rates(number: int, found: SimpleNamespace) -> None:
    """Also what the remedy of the refusals says."""
    for each in found.cells[len(REFUSED) + number]:
        assert each.error is None, each.error
        expected = fresh_rates(each.case["now"])
        if each.case["was"] == "OneCycle":  # no state of DeepSpeed's says that momenta were cycled: the report does
            last = found.truth["OneCycle"][0]
            expected = [[(lr, last[0][1], start) for lr, _, start in rates] for rates in expected]
            assert "betas" in each.text
        assert each.rates == expected and len(expected) == MORE
    text = " ".join(found.cells[len(REFUSED) + number][0].text.replace("│", " ").split())
    assert "begins anew, from the live lr" in text


def test_without_a_live_schedule_the_lr_is_that_of_the_checkpoint(found: SimpleNamespace) -> None:
    for each in found.cells[-1 - len(OUTSIDE)]:
        assert each.rates == found.truth["LambdaLR"][:1] * MORE


def test_so_does_one_outside_of_the_engine_that_is_new(found: SimpleNamespace) -> None:
    *new, restored = found.cells[-len(OUTSIDE) :]
    for each in chain(*new):
        assert each.rates == fresh_rates(each.case["now"])
        assert "is new since the save" in each.text
    for each in restored:
        assert each.rates[0] == found.truth["LambdaLR"][0]
        assert "is new since the save" not in each.text

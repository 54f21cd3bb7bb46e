"""The clock of a load's phases, against a clock that is set by hand."""

from __future__ import annotations

import pytest

from elastic_ckpt.load import flow as module
from elastic_ckpt.load.flow import Clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    time = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: time[0])
    return time


def test_a_phase_that_comes_twice_adds_up(now: list[float]) -> None:
    clock = Clock()
    for seconds in (1.0, 2.0):
        with clock("plan"):
            now[0] += seconds
    assert clock.seconds == {"plan": 3.0}


def test_a_phase_inside_another_one_counts_for_itself_alone(now: list[float]) -> None:
    clock = Clock()
    with clock("plan"):
        now[0] += 1.0
        with clock("metadata"):
            now[0] += 10.0
        with clock("metadata"):
            now[0] += 20.0
        now[0] += 2.0
    with clock("metadata"):
        now[0] += 100.0
    assert clock.seconds == {"plan": 3.0, "metadata": 130.0}

"""How the loader leaves the process."""

from __future__ import annotations

import gc

import pytest

from elastic_ckpt.formats.pickled import collector_off
from elastic_ckpt.load import flow


def test_a_phase_that_comes_twice_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow.time, "perf_counter", iter((0.0, 1.0, 5.0, 7.0)).__next__)
    seconds: dict[str, float] = {}
    for _ in range(2):
        with flow.timed("plan", seconds):
            pass
    assert seconds == {"plan": 3.0}


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects: bool) -> None:
    was_enabled = gc.isenabled()

    @collector_off()
    def load() -> None:
        assert not gc.isenabled()
        raise KeyError

    try:
        (gc.enable if collects else gc.disable)()
        for _ in range(2):
            with pytest.raises(KeyError):
                load()
            assert gc.isenabled() == collects
    finally:
        (gc.enable if was_enabled else gc.disable)()

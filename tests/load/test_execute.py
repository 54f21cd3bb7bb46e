"""How the loader leaves the process."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan
from elastic_ckpt.errors import WITHOUT_STATES, CommunicationError, DamagedError, PartialLoadError, Remedy
from elastic_ckpt.formats.pickled import collector_off
from elastic_ckpt.io.coalesce import ReadOptions
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


def test_an_engine_that_is_partly_overwritten_has_the_ways_out_of_the_cause() -> None:
    ways = Remedy("use an earlier tag"), WITHOUT_STATES
    error = flow.as_partial_load_error(DamagedError("an overflow", remedy=ways))
    assert error.remedies == ways and str(error.remedy).endswith(PartialLoadError.LOAD_AGAIN)
    assert flow.as_partial_load_error(KeyError("a")).remedy == PartialLoadError.LOAD_AGAIN
    gone = flow.as_partial_load_error(CommunicationError("a rank died", remedy="start the job again"))
    assert gone.remedy == "start the job again"


def test_parts_of_an_engine_are_closed_where_one_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NVMe, where the sub-group in memory has to be swapped out, though the error is still held."""
    closed: list[bool] = []

    def fill(*_: Any) -> Any:
        try:
            yield None, None
        finally:
            closed.append(True)

    def execute(*_: Any) -> Any:
        raise DamagedError("a disk fails", "file")

    monkeypatch.setattr(flow, "execute", execute)
    adapter: Any = SimpleNamespace(fill=fill)
    with pytest.raises(DamagedError, match="a disk fails") as caught:
        flow.overwrite(adapter, LoadPlan(ReadPlan((), (), ())), ElasticConfig(), ReadOptions(), {}, True)
    assert closed == [True] and caught.value.file == "file"

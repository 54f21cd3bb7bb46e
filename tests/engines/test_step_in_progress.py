"""Which running steps are those of an engine's optimizer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt.engines.step_in_progress import is_within_step


class Optimizer:
    def __init__(self, inner: Any = None, during: Any = None) -> None:
        self.optimizer = inner or self
        self.during = during

    def step(self) -> None:
        if self.during is not None:
            self.during()
        elif self.optimizer is not self:
            self.optimizer.step()


def engine_with(during_own: Any = None, during_inner: Any = None) -> Any:
    return SimpleNamespace(optimizer=Optimizer(Optimizer(during=during_inner), during_own))


@pytest.mark.parametrize("where", ["during_own", "during_inner"])
def test_a_step_of_either_optimizer_is_seen_while_it_runs(where: str) -> None:
    found: list[bool] = []
    engine = engine_with(**{where: lambda: found.append(is_within_step(engine))})
    assert not is_within_step(engine)
    engine.optimizer.step()
    assert found == [True] and not is_within_step(engine)


def test_a_step_on_another_thread_is_seen() -> None:
    running, end = threading.Event(), threading.Event()
    engine = engine_with(during_inner=lambda: (running.set(), end.wait(30)))
    thread = threading.Thread(target=engine.optimizer.step)
    thread.start()
    running.wait(30)
    assert is_within_step(engine)
    end.set()
    thread.join()
    assert not is_within_step(engine)


def test_a_step_of_another_engine_or_of_a_loop_is_not_meant() -> None:
    found: list[bool] = []
    engine = engine_with()
    other = engine_with(during_inner=lambda: found.append(is_within_step(engine)))
    other.optimizer.step()

    class Loop:
        def step(self) -> None:
            found.append(is_within_step(engine))

    Loop().step()
    assert found == [False, False]
    assert not is_within_step(SimpleNamespace(optimizer=None))

"""Saves that a signal handler makes while the optimizer steps, and their loads: jobs of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import elastic_ckpt
from elastic_ckpt.config import CONFIG_KEY
from tests.distributed.count_jobs import different, held
from tests.distributed.facts import attempt, log_lines
from tests.distributed.model import build_engine, close, train

STEPS = 2
#: When the signal comes: before the optimizer has begun with any sub-group, after the first, or after the whole step.
BEFORE, AMID, AFTER = "before any", "after the first", "after the step"
#: Of ZeRO-3's optimizer, what has returned then.
METHODS = {BEFORE: "_get_norm_groups", AMID: "_release_sub_group"}


def save_and_load(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Save in a handler ``at`` a point of a step of ``setup``, and load: the error, or what is not as it was.

    ``follows``: entries of ``"elastic_checkpoint"`` of the load; ``universal``: by its conversion.
    """
    elastic_ckpt.install()
    folder = case["folder"]
    engine = build_engine(case["setup"])
    train(engine, 0, STEPS)
    truth = held(engine)
    with log_lines() as lines:
        _step_with_a_signal(engine, folder, case["at"])
    if case["at"] == AFTER:
        truth = held(engine)
    close(engine)
    engine = build_engine(case["setup"])
    settings = {"mode": "require", "report": False, **case.get("follows", {})}
    engine.config[CONFIG_KEY] = engine._config._param_dict[CONFIG_KEY] = settings
    refused = attempt(case["name"], engine, lambda: engine.load_checkpoint(folder))
    differences = [] if refused.kinds else different(truth, held(engine))
    is_next = not refused.kinds and engine.global_steps == STEPS + (case["at"] == AFTER)
    close(engine)
    return [SimpleNamespace(refused=refused, differences=differences, lines=lines, is_next=is_next)]


def _step_with_a_signal(engine: Any, folder: str, at: str) -> None:
    """Take a step, in which a signal comes once, whose handler saves."""
    before = signal.signal(signal.SIGUSR1, lambda *_: engine.save_checkpoint(folder, tag="tag"))
    left = [None]

    def interrupt() -> None:
        if left:
            left.pop()
            signal.raise_signal(signal.SIGUSR1)

    name = METHODS.get(at)
    if name is not None:
        method = getattr(engine.optimizer, name)

        def interrupted(*args: Any, **named: Any) -> Any:
            result = method(*args, **named)
            interrupt()
            return result

        setattr(engine.optimizer, name, interrupted)
    try:
        train(engine, STEPS, STEPS + 1)
        interrupt()
    finally:
        signal.signal(signal.SIGUSR1, before)

"""Jobs that load checkpoints of which files are missing."""

from __future__ import annotations

from functools import partial
from typing import Any

import elastic_ckpt
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.jobs import truth_of
from tests.distributed.model import WideLM, build_engine, close, train
from tests.distributed.optimizer_jobs import compare
from tests.distributed.optimizer_truth import decoded
from tests.distributed.refusal_jobs import once


def load(targets: list[dict[str, Any]]) -> list[Loaded | Refused] | None:
    """Load the ``folders`` of each target into an engine of its ``setup``: what differs from the truth, or the error.

    ``arguments``: of the load.
    """
    elastic_ckpt.install()
    facts: list[Loaded | Refused] = []
    for target in targets:
        engine = build_engine(target["setup"], WideLM(seed=8))
        train(engine, 50, 51)
        for folder in target["folders"]:
            start = partial(engine.load_checkpoint, folder, **target.get("arguments", {}))
            refused = attempt(folder, engine, start)
            if refused.kinds:
                facts.append(refused)
                continue
            truth = truth_of(folder)
            lacking = truth["states"].keys() - decoded(engine, set())[0].keys()
            found = None if lacking else compare(engine, truth, {})
            differences = {"states": f"none of {lacking}"} if found is None else {**found.differences, **found.states}
            facts.append(Loaded(folder, folder, engine.elastic_report, differences))
            close(engine)  # which a step of an optimizer without its states would end
            engine = build_engine(target["setup"], WideLM(seed=8))
            train(engine, 50, 51)
        close(engine)
    return once(facts)

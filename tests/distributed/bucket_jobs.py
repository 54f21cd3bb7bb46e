"""Jobs that load from a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt, log_lines, loss_gap, on_all_ranks
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, client_differences, where
from tests.distributed.model import BigLM, Setup, build_engine, close, train
from tests.storage.buckets import Bucket, serve_bucket


@contextmanager
def shared_bucket(folder: str, prefix: str) -> Iterator[tuple[Bucket | None, dict[str, Any]]]:
    """A bucket with a copy of a folder, which the first rank serves; there, the bucket, and on all, its options. Collective."""
    with ExitStack() as stack:
        bucket = None
        if dist.get_rank() == 0:
            bucket = stack.enter_context(serve_bucket())
            bucket.put(Path(folder), prefix)
        yield bucket, on_all_ranks(bucket and bucket.options)[0]
        dist.barrier()


def engine_of(case: dict[str, Any]) -> Any:
    """The case's engine, with weights of its own; ``section``: our options."""
    setup = case["setup"]
    config = (*setup.config, ("elastic_checkpoint", case["section"]))
    engine = build_engine(Setup(**{**vars(setup), "config": config}), BigLM(seed=8))
    train(engine, 50, 51)
    return engine


def load(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Load each case's ``url``, and compare all with the truth in ``folder``."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        engine = engine_of(case)
        with log_lines() as lines:
            path, client_state = engine.load_checkpoint(case["url"], **case.get("arguments", {}))
        differences = {} if path.startswith(case["url"]) else {"path": path}
        differences |= oracle.differences(engine, truth)
        differences |= client_differences(client_state, engine.elastic_report, case["setup"])
        gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth) if case.get("continue") else 0.0
        facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap, client_state, tuple(lines)))
        close(engine)
    return facts


def refuse(cases: list[dict[str, Any]]) -> list[Refused]:
    """What happens to each case, which must be refused."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        engine = engine_of(case)
        arguments = case.get("arguments", {})
        facts.append(attempt(case, engine, lambda e=engine, c=case, a=arguments: e.load_checkpoint(c["url"], **a)))
        close(engine)
    return facts

"""Jobs that load from a bucket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt, log_lines, on_all_ranks
from tests.distributed.jobs import SPOILS, client_differences, truth_of, where
from tests.distributed.model import BigLM, Setup, build_engine, close, train
from tests.storage.buckets import Bucket, serve_bucket


@dataclass(frozen=True)
class Shared:
    """A bucket with a copy of a case's folder.

    Attributes:
        url: of the copy.
        options: for ``"storage_options"``.
        bucket: on the first rank, which serves it.
    """

    url: str
    options: dict[str, Any]
    bucket: Bucket | None


@contextmanager
def shared_bucket(case: dict[str, Any]) -> Iterator[Shared]:
    """A bucket of all ranks. All of a process hold the same objects, so each case has a place of its own. Collective."""
    place = os.path.basename(case["scratch"])
    with ExitStack() as stack:
        bucket = None
        if dist.get_rank() == 0:
            bucket = stack.enter_context(serve_bucket())
            bucket.put(Path(case["folder"]), place)
        yield Shared(f"s3://bucket/{place}", on_all_ranks(bucket and bucket.options)[0], bucket)
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
        truth = truth_of(case["folder"])
        engine = engine_of(case)
        with log_lines() as lines:
            path, client_state = engine.load_checkpoint(case["url"], **case.get("arguments", {}))
        differences = {} if path.startswith(case["url"]) else {"path": path}
        differences |= oracle.differences(engine, truth)
        differences |= client_differences(client_state, engine.elastic_report, case["setup"])
        facts.append(Loaded(case, where(case), engine.elastic_report, differences, 0.0, client_state, tuple(lines)))
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


def load_served(case: dict[str, Any]) -> list[Loaded]:
    """:func:`load` a folder from a bucket that the first rank serves."""
    with shared_bucket(case) as shared:
        return load([served(case, shared)])


def transfer(case: dict[str, Any]) -> list[SimpleNamespace]:
    """The same; how many bytes of tensors all ranks own, and how many of each file were sent."""
    with shared_bucket(case) as shared:
        (loaded,) = load([served(case, shared)])
    if shared.bucket is None:
        return []
    by_object: dict[str, int] = {}
    for method, path, nbytes in shared.bucket.asked:
        if method == "GET" and "optim_states" in path:
            by_object[path] = by_object.get(path, 0) + nbytes * (1 + SPOILS)
    owned_nbytes = sum(rank.read.nbytes for rank in loaded.report.ranks)
    return [SimpleNamespace(owned_nbytes=owned_nbytes, nbytes_by_object=by_object)]


def refuse_served(case: dict[str, Any]) -> list[Refused]:
    """:func:`refuse` from there. ``refusal``: with which the bucket answers everything by now."""
    with shared_bucket(case) as shared:
        if shared.bucket is not None:
            shared.bucket.refusal = case.get("refusal")
        return refuse([served(case, shared)])


def follow(case: dict[str, Any]) -> list[tuple[Refused, dict[str, str]]]:
    """:func:`refuse_served`; then what differs after the command and the load that the error names, in ``scratch``."""
    truth = truth_of(case["folder"])
    with shared_bucket(case) as shared:
        (refused,) = refuse([served(case, shared)])
        (remedy,) = refused.remedies
        os.makedirs(case["scratch"], exist_ok=True)
        os.chdir(case["scratch"])
        if dist.get_rank() == 0:
            config = Path("ds.json")
            config.write_text(json.dumps({"elastic_checkpoint": {"storage_options": shared.options}}))
            result = CliRunner().invoke(app, [*remedy.command[1:], "--config", str(config)])
            assert result.exit_code == 0, result.output
        dist.barrier()
    engine = engine_of({**case, "section": {}})
    engine.load_checkpoint(**remedy.arguments)
    differences = oracle.differences(engine, truth)
    close(engine)
    return [(refused, differences)]


def served(case: dict[str, Any], shared: Shared) -> dict[str, Any]:
    """A case in a bucket, if it has no ``url`` of its own. ``section``: more of our options."""
    section = {"mode": "require", "storage_options": shared.options, **case.get("section", {})}
    return {"url": shared.url, **case, "section": section}

"""Jobs about loads that must fail: what error each rank gets, and what of the engine it changed all the same."""

from __future__ import annotations

import os
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Refused, attempt
from tests.distributed.jobs import SAVE_AT, SPOILS, truth_of
from tests.distributed.model import build_engine, close, train

_engines: dict[str, Any] = {}


def refuse(cases: list[dict[str, Any]]) -> list[Refused]:
    """Try to load the ``folder`` of each case with its ``arguments`` into an engine of its ``setup`` and ``model``.

    An engine that refuses is as it was: the next case that asks for one of its kind gets the same.
    """
    elastic_ckpt.install()
    facts: list[Refused] = []
    for case in cases:
        key = repr((case["setup"], case.get("model")))
        if key not in _engines:
            _engines[key] = build_engine(case["setup"], models.BUILDERS[case.get("model", "TinyLM")]())
            train(_engines[key], 50, 52)
        facts.append(refusal(case, _engines[key]))
        train(_engines[key], 52, 53)
    return once(facts)


def refusal(case: dict[str, Any], engine: Any) -> Refused:
    """One load. ``custom_load_fn``: with one, which only DeepSpeed's own loader takes. Collective."""
    more = {"custom_load_fn": lambda src, dst: dst.load_state_dict(src)} if case.get("custom_load_fn") else {}
    return attempt(case, engine, lambda: engine.load_checkpoint(case["folder"], **case.get("arguments", {}), **more))


def once(facts: list[Any]) -> list[Any] | None:
    """Facts that are the same on all ranks."""
    return facts if dist.get_rank() == 0 else None


def diverge(arguments: dict[str, Any]) -> list[Refused] | None:
    """Ranks ask for different things: folders, tags, arguments, and modes."""
    elastic_ckpt.install()
    engine = build_engine(arguments["setup"])
    first, folder = dist.get_rank() == 0 or SPOILS, arguments["folder"]
    cases = [
        {"folder": folder if first else "/nowhere"},
        # rank 0 looks for the checkpoint: what it does not find is not the point
        {"folder": "/nowhere" if first else folder},
        {"folder": folder, "arguments": {"tag": "no_such_tag" if first else "step4"}},
        {"folder": folder, "arguments": {"tag": "step4" if first else None}},
        {"folder": folder, "arguments": {"load_module_only": first}},
    ]
    facts = [refusal(case, engine) for case in cases]
    elastic_ckpt.config.flags.update(mode="off" if first else "auto")
    facts.append(refusal({"folder": folder}, engine))
    elastic_ckpt.config.flags.clear()
    return once(facts)


def bad_scheduler(arguments: dict[str, Any]) -> list[SimpleNamespace] | None:
    """A scheduler that fails on one rank; the step after a load that leaves schedulers alone."""
    elastic_ckpt.install()
    engine = build_engine(arguments["setup"])
    train(engine, 50, 51)
    real = type(engine.lr_scheduler)

    class Failing(real):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if dist.get_rank() == 1 and not SPOILS and state_dict["last_epoch"] == SAVE_AT:
                raise KeyError("a key that this scheduler wants")

    engine.lr_scheduler.__class__ = Failing
    refused = refusal(arguments, engine)
    engine.load_checkpoint(arguments["folder"], load_lr_scheduler_states=False)
    return once([SimpleNamespace(refused=refused, step=engine.global_steps)])


def break_reading(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """A disk that fails after the plan was agreed on; what differs from the truth when it is loaded again."""
    elastic_ckpt.install()
    engine = build_engine(arguments["setup"])
    real = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    os.preadv = failing if dist.get_rank() == dist.get_world_size() - 1 else real
    refused = refusal(arguments, engine)
    os.preadv = real
    engine.load_checkpoint(arguments["folder"])
    differences = oracle.differences(engine, truth_of(arguments["folder"]))
    return [SimpleNamespace(refused=refused, differences=differences)]


def without_a_name(cases: list[dict[str, Any]]) -> list[SimpleNamespace] | None:
    """Loads into engines that lack a private name of DeepSpeed on the last rank, and then have it again."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        engine = build_engine(case["setup"])
        train(engine, 50, 52)
        owner, _, name = case["owner_and_name"].rpartition(".")
        lacking = attrgetter(owner)(engine)
        kept = getattr(lacking, name)
        if dist.get_rank() == dist.get_world_size() - 1:
            delattr(lacking, name)
        refused = refusal(case, engine)
        setattr(lacking, name, kept)
        engine.load_checkpoint(case["folder"])
        differences = oracle.differences(engine, truth_of(case["folder"]))
        facts.append(SimpleNamespace(refused=refused, differences=differences))
        close(engine)
    return once(facts)


def left_on_by_mistake(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Loads that are DeepSpeed's, with ``load_universal`` left on: what they return and restore; and folders of nothing."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"])
    engine._config.load_universal_checkpoint = True
    path, client_state = engine.load_checkpoint(case["folder"])
    found = SimpleNamespace(path=path, client_state=client_state, report=engine.elastic_report)
    found.still_universal = engine.load_universal_checkpoint()
    found.differences = [oracle.differences(engine, truth_of(case["folder"]))]
    train(engine, 60, 61)
    engine.load_checkpoint(case["folder"], load_module_strict=False)
    found.differences.append(oracle.differences(engine, truth_of(case["folder"])))
    seen: list[list[str]] = []
    engine._config.load_universal_checkpoint = False
    engine.load_checkpoint(case["folder"], custom_load_fn=lambda src, dst: seen.append(sorted(src)))
    found.given_to_custom_load_fn, found.report_of_custom = seen, engine.elastic_report
    empty = case["scratch"]
    os.makedirs(empty, exist_ok=True)
    found.nothing = [engine.load_checkpoint(folder) for folder in (empty, os.path.join(empty, "nowhere"))]
    close(engine)
    return [found]


def pending(cases: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """A load while gradients wait for a step, and the load after that step."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        engine = build_engine(case["setup"])
        rows = models.batch(70, dist.get_world_size(), dist.get_rank())
        engine.backward(engine(rows[: len(rows) // engine.gradient_accumulation_steps()]))
        if engine.gradient_accumulation_steps() > 1:
            engine.step()  # of the first micro-batch: no update yet
        refused = refusal(case, engine)
        if engine.gradient_accumulation_steps() > 1:
            engine.backward(engine(rows[: len(rows) // 2]))
        engine.step()
        engine.load_checkpoint(case["folder"])
        differences = oracle.differences(engine, truth_of(case["folder"]))
        facts.append(SimpleNamespace(refused=refused, differences=differences))
        close(engine)
    return facts

"""Checkpoints of one state at several expert-parallel degrees: ``expert_tool_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import elastic_ckpt
from tests.distributed.expert_jobs import build, end
from tests.distributed.plan_jobs import both_sides


def resave(arguments: dict[str, Any]) -> list[str]:
    """Load ``source`` into an engine of each of ``runs``, and save it again without a step; the reports."""
    elastic_ckpt.install()
    texts = []
    for run in arguments["runs"]:
        engine = build(run, seed=8)
        engine.load_checkpoint(arguments["source"])
        folder = os.path.join(arguments["folder"], run.name)
        engine.save_checkpoint(folder, tag="step4")
        texts.append(str(engine.elastic_report))
        end(engine)
    return texts


def compare(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """What an engine of each of ``runs`` would read of ``source``, by the live engine and as ``plan`` foretells it."""
    elastic_ckpt.install()
    facts = []
    for run in arguments["runs"]:
        engine = build(run, seed=8)
        facts.append(both_sides(engine, arguments["source"], run.stage, f"{arguments['source']} -> {run.name}"))
        end(engine)
    return facts

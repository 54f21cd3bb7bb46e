"""Checkpoints of one state at several expert-parallel degrees: ``expert_tool_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
from typing import Any

import elastic_ckpt
from tests.distributed.expert_jobs import build, end


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

"""A run that goes on under other wrappers: what ``diff`` says of both saves, and weights that were exported between."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.comparison import compare as compare_checkpoints
from elastic_ckpt.tools.comparison import open_both
from tests.distributed import model as models
from tests.distributed.jobs import SPOILS
from tests.distributed.model import build_engine, close


def go_on(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load into a model of the kind ``live``, save that, and compare; export the first, and load the weights alone."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"], models.BUILDERS[case["live"]](8))
    engine.load_checkpoint(case["folder"])
    expected = _weights(engine)
    again = Path(case["scratch"], "again")
    engine.save_checkpoint(str(again), tag="step4")
    close(engine)
    compared = compare_checkpoints(*open_both(case["folder"], str(again), ElasticConfig())[:2], threads=1)

    exported = Path(case["scratch"], "weights")
    elastic_ckpt.export(case["folder"], exported, progress=False)
    other = build_engine(case["setup"], models.BUILDERS[case["live"]](9))
    report = elastic_ckpt.load_pretrained(other, exported)
    found = _weights(other)
    close(other)
    if SPOILS:
        next(iter(found.values())).view(-1)[0] += 1
    apart = [name for name in expected if not torch.equal(expected[name], found[name])]
    outcome = SimpleNamespace(
        differences=compared.differences,
        equal=compared.equal,
        notes=compared.notes,
        apart=apart,
        keys=(report.missing_keys, report.unexpected_keys),
    )
    return [outcome]


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}

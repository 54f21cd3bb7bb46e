"""Jobs that resume with more tokens than were saved: refused, then loaded by the config lines of the refusal."""

from __future__ import annotations

import json
import math
import os
import re
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed import jobs
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import attempt
from tests.distributed.model import VOCABULARY, build_engine, close, train

ADDED = 4
STATES = ("exp_avg", "exp_avg_sq")


class BiasedLM(models.UntiedLM):
    """A head of its own, with a bias."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.head = nn.Linear(13, VOCABULARY)


class BiasedWideLM(models.WideLM):
    """The same, big enough for 8-bit states."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.head = nn.Linear(13, VOCABULARY)


MODELS: dict[str, type[models.TinyLM]] = {"tied": models.TinyLM, "biased": BiasedLM, "wide": BiasedWideLM}
models.BUILDERS |= MODELS


def resized(model: models.TinyLM, rows: int) -> models.TinyLM:
    """A model with so many rows in its embedding and head, as Transformers' ``resize_token_embeddings`` makes them."""
    is_tied, has_bias = model.head.weight is model.embedding.weight, model.head.bias is not None
    torch.manual_seed(9)
    model.embedding, model.head = nn.Embedding(rows, 13), nn.Linear(13, rows, bias=has_bias)
    if is_tied:
        model.head.weight = model.embedding.weight
    return model


def save(case: dict[str, Any]) -> None:
    """:func:`tests.distributed.jobs.save_each` with a model of this module; the truth of 8-bit states is without them."""
    is_coded = case["setup"].optimizer.startswith("bnb")
    jobs.save_each([{**case, "truth": not is_coded}])
    if is_coded:
        engine = build_engine(case["setup"], MODELS[case["model"]]())
        train(engine, 0, jobs.SAVE_AT)
        truth = oracle.gather(engine, [])
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(case["folder"], "truth.pt"))
        close(engine)


def load(case: dict[str, Any]) -> list[SimpleNamespace]:
    """The refusal of a load; what differs after following it, notes of the report, and whether training goes on.

    ``folder``, ``setup``, ``model``; ``rows``: the live vocabulary; ``arguments``: of the load; ``options``: those of
    ``"elastic_checkpoint"`` at first. Rows beyond the saved ones should be as they were, with states of zero.
    """
    elastic_ckpt.install()
    engine = build_engine(case["setup"], resized(MODELS[case["model"]](seed=8), case.get("rows", VOCABULARY + ADDED)))
    arguments = case.get("arguments", {})
    before = oracle.gather(engine, [])
    remedies: list[str] = []

    def load_once() -> None:
        try:
            engine.load_checkpoint(case["folder"], **arguments)
        except ElasticCkptError as error:
            remedies.append(error.remedy or "")
            raise

    _set_options(engine, case.get("options", {}))
    found = SimpleNamespace(refused=attempt(case, engine, load_once), differences={}, notes=(), goes_on=False)
    config = re.search(r'"elastic_checkpoint": (\{"added_rows": .*?\]\})', remedies[0]) if remedies else None
    if config is not None:
        _set_options(engine, json.loads(config[1]))
        engine.load_checkpoint(case["folder"], **arguments)
        found.differences, found.notes = _differences(engine, case, before), tuple(engine.elastic_report.notes)
        found.goes_on = all(map(math.isfinite, train(engine, jobs.SAVE_AT, jobs.CONTINUE_TO)))
    close(engine)
    return [found]


def _set_options(engine: Any, options: dict[str, Any]) -> None:
    settings = {"report": False, **options}
    engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = settings


def _differences(engine: Any, case: dict[str, Any], before: dict[str, Any]) -> dict[str, str]:
    truth, is_coded = jobs.truth_of(case["folder"]), case["setup"].optimizer.startswith("bnb")
    has_states = not is_coded and not case.get("arguments") and bool(oracle.base_of(engine).state)
    keys = list(STATES) if has_states else []
    if keys:
        oracle.relink(engine)
    now = oracle.gather(engine, keys)
    expected: dict[str, Any] = {"weights": {}, "masters": {}, "states": {}, "buffers": truth["buffers"]}
    masters = truth["weights"] | truth["masters"]
    for name, live in now["weights"].items():
        expected["weights"][name] = _extended(masters[name].to(live.dtype), before["weights"][name])
    for name in now["masters"]:
        saved = masters[name]
        if case.get("arguments"):  # as DeepSpeed rounds them through the weights
            saved = saved.to(now["weights"][name].dtype).float()
        expected["masters"][name] = _extended(saved, before["masters"][name])
    for name, key in now["states"]:
        zeros = torch.zeros_like(now["states"][name, key])
        expected["states"][name, key] = _extended(truth["states"][name, key], zeros)
    return oracle.compare(now, expected)


def _extended(saved: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The saved rows, and those of a live tensor that follow on them."""
    return torch.cat([saved.to(live.dtype), live[len(saved) :]]) if saved.dim() else saved

"""Jobs that load checkpoints without optimizer files, and compare with what a test expects of the weights."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

import elastic_ckpt
from tests.distributed import foreign, foreign_jobs
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.model import build_engine, close
from tests.distributed.parallel_models import Parallel


def load(targets: list[dict[str, Any]]) -> list[Loaded | Refused]:
    """Load the ``sources`` of each target into an engine of its ``setup`` and ``model``, which DeepSpeed's own loader never gets.

    Of each source: ``folder``; ``config`` (``"elastic_checkpoint"``); ``arguments`` of the load; ``expected``: a file
    with the weights by name, as they were saved; ``refused``: whether the load should be.
    """
    elastic_ckpt.install()
    facts: list[Loaded | Refused] = []
    for target in targets:
        setup = target["setup"]
        is_parallel, model = isinstance(setup, Parallel), target.get("model", "TinyLM")
        engine = foreign.build(setup, seed=8) if is_parallel else build_engine(setup, models.BUILDERS[model](seed=8))
        for source in target["sources"]:
            settings = {"mode": "require", "report": False, **source.get("config", {})}
            engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = settings
            start = partial(engine.load_checkpoint, source["folder"], **source["arguments"])
            if source.get("refused"):
                facts.append(attempt(source, engine, start))
                continue
            start()
            found = foreign_jobs.gather(engine, setup) if is_parallel else _gathered(engine)
            where = f"{source['folder']} -> {setup.name}"
            facts.append(Loaded(source, where, engine.elastic_report, _differences(found, source["expected"])))
            for param in engine.module.parameters():  # leave other values for the next load to replace
                param.data.fill_(0.5)
        close(engine)
    return facts


def save_untied(case: dict[str, Any]) -> None:
    """Save a model whose head has weights of its own: equal to the embedding's, untrained, and then others.

    In ``equal`` and ``other`` of ``folder``, with what a tied model has of it: the embedding's weights.
    """
    engine = build_engine(case["setup"], models.BUILDERS["UntiedLM"](seed=7))
    for name in ("equal", "other"):
        folder = os.path.join(case["folder"], name)
        if name == "other":
            models.train(engine, 0, 2)
        engine.save_checkpoint(folder, tag="tag")
        found = _gathered(engine)
        is_equal = torch.equal(found["weights"].pop("head.weight"), found["weights"]["embedding.weight"])
        assert is_equal == (name == "equal")
        torch.save({key: found[key] for key in ("weights", "buffers")}, os.path.join(folder, "expected.pt"))
    close(engine)


def _gathered(engine: Any) -> dict[str, Any]:
    oracle.relink(engine)
    found = oracle.gather(engine, [])
    return {**found, "buffers": {name: value for name, value in found["buffers"].items() if name != "scratch"}}


def _differences(found: dict[str, Any], path: str) -> dict[str, str]:
    """Weights are the saved ones in the live dtype, and masters these in fp32; buffers are as saved."""
    expected = torch.load(path, weights_only=False)
    if "head.weight" in found["weights"]:  # no longer tied
        expected["weights"]["head.weight"] = expected["weights"]["embedding.weight"]
    weights = {name: value.to(found["weights"][name].dtype) for name, value in expected["weights"].items()}
    masters = {name: value.float() for name, value in weights.items()}
    wanted = {"masters": masters, "weights": weights, "buffers": expected["buffers"]}
    wanted |= {key: expected[key] for key in ("counters",) if key in expected}
    return oracle.compare(found, wanted)

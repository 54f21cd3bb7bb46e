"""Jobs that load checkpoints without optimizer files, and compare the weights; and those that write gpt-neox's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import foreign, foreign_jobs, parallel_models
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt
from tests.distributed.foreign_folders import TAG, read
from tests.distributed.jobs import Truth, truth_of, where, without_states
from tests.distributed.kept import engine_of
from tests.distributed.model import build_engine, close
from tests.distributed.parallel_models import Parallel

DRIFTED = "3.input_layernorm.weight"
#: Of gpt-neox, by the end of a name: what each tensor-parallel rank has whole, rows, and biases that GPT-J's layers add up.
WHOLE, ROWS = ("norm.weight", "norm.bias"), ("attention.dense.weight", "dense_4h_to_h.weight")
SUMMED = ("attention.dense.bias", "dense_4h_to_h.bias")


def live(case: dict[str, Any]) -> Any:
    """An engine of ``setup`` and ``model`` that has trained, with ``options``. Collective."""
    elastic_ckpt.install()
    setup, model = case["setup"], case.get("model", "TinyLM")
    if isinstance(setup, Parallel):
        engine = engine_of(setup, partial(foreign.build, setup, seed=8), parallel_models.end)
        parallel_models.train(engine, setup, 100, 101)
    else:
        engine = engine_of((setup, model), lambda: build_engine(setup, models.BUILDERS[model](seed=8)), close)
        models.train(engine, 100, 101)
    settings = {"mode": "require", "report": False, **case.get("options", {})}
    engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = settings
    return engine


def load(case: dict[str, Any]) -> list[Loaded]:
    """Load a folder with ``arguments``: weights are the saved ones in the live dtype, and masters these in fp32."""
    engine, truth = live(case), truth_of(case["folder"], weights_alone)
    engine.load_checkpoint(case["folder"], **case["arguments"])
    if isinstance(case["setup"], Parallel):
        found = foreign_jobs.gather(engine, case["setup"])
    else:
        oracle.relink(engine)
        found = weights_alone(oracle.gather(engine, []))
    if "head.weight" in found["weights"]:  # no longer tied
        for kind in ("weights", "masters"):
            truth[kind]["head.weight"] = truth[kind]["embedding.weight"]
    dtypes = {name: value.dtype for name, value in found["weights"].items()}
    masters = {name: value.to(dtypes[name]).float() for name, value in truth["masters"].items()}
    expected = {"masters": masters, "weights": truth["weights"], "buffers": truth["buffers"]}
    if "load_optimizer_states" in case["arguments"]:
        expected["counters"] = truth["counters"]
    return [Loaded(case, where(case), engine.elastic_report, oracle.compare(found, expected))]


def load_with_states(case: dict[str, Any]) -> list[Loaded]:
    """Load a folder with ``arguments``: weights, masters and states are the saved ones; a new head's states are zero."""
    engine, truth = live(case), truth_of(case["folder"])
    engine.load_checkpoint(case["folder"], **case["arguments"])
    oracle.relink(engine)
    keys = sorted({key for _, key in truth["states"]})
    found = oracle.gather(engine, keys)
    if "head.weight" in found["weights"]:  # no longer tied
        for kind in ("weights", "masters"):
            truth[kind]["head.weight"] = truth[kind]["embedding.weight"]
    for at in [("head.weight", key) for key in keys]:
        if at in found["states"]:  # without ZeRO, a step makes them
            truth["states"][at] = torch.zeros_like(found["states"][at])
    expected = {kind: truth[kind] for kind in ("masters", "weights", "states")}
    return [Loaded(case, where(case), engine.elastic_report, oracle.compare(found, expected))]


def weights_alone(truth: Truth) -> Truth:
    """A truth of weights, of which masters are made, and of persistent buffers."""
    buffers = {name: value for name, value in truth["buffers"].items() if name != "scratch"}
    masters = {name: value.float() for name, value in truth["weights"].items()}
    return without_states({**truth, "masters": masters, "buffers": buffers})


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load a folder with ``arguments``."""
    engine = live(case)
    refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"], **case["arguments"]))
    return [refused] if dist.get_rank() == 0 else None


def save_untied(case: dict[str, Any]) -> None:
    """Save a model whose head has weights of its own: equal to the embedding's, and after some ``steps`` others.

    Its truth is what a tied model has of it: the embedding's weights and states.
    """
    engine = build_engine(case["setup"], models.BUILDERS["UntiedLM"](seed=7))
    models.train(engine, 0, case["steps"])
    engine.save_checkpoint(case["folder"], tag="tag")
    oracle.relink(engine)
    found = oracle.gather(engine, oracle.state_keys(engine) if case["steps"] else [])
    is_equal = torch.equal(found["weights"].pop("head.weight"), found["weights"]["embedding.weight"])
    assert is_equal == (case["steps"] == 0)
    del found["masters"]["head.weight"]
    found["states"] = {at: value for at, value in found["states"].items() if at[0] != "head.weight"}
    if dist.get_rank() == 0:
        kinds = ("weights", "masters", "states", "buffers", "counters")
        torch.save({key: found[key] for key in kinds}, f"{case['folder']}/truth.pt")
    close(engine)


# --- what gpt-neox leaves without its optimizer files -----------------------------------------------------------------


def write(source: Path, target: Path, change: Callable[[Path], None] | None = None, gpt_j: bool = False) -> None:
    """A copy of gpt-neox's folder without optimizer files, changed, and its truth: the weights of its layers' files."""
    shutil.copytree(source, target)
    for path in target.glob("*/*optim_states.pt"):
        path.unlink()
    if change is not None:
        change(target)
    torch.save(merged(target / TAG, gpt_j), target / "truth.pt")


def merged(tag: Path, gpt_j: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The whole weights and buffers of two tensor-parallel ranks, by their layers' files."""
    found: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "buffers": {}}
    for path in sorted(tag.glob("layer_*-model_00-model_states.pt")):
        first, second = read(path), read(path.with_name(path.name.replace("model_00", "model_01")))
        for key, one in first.items():
            name, two = f"{int(path.name[6:8])}.{key}", second[key]
            if key.endswith("inv_freq"):
                found["buffers"][name] = one
            elif key.endswith(ROWS):
                found["weights"][name] = torch.cat([one, two], 1)
            elif key.endswith(SUMMED) and gpt_j:
                found["weights"][name] = one.float() + two.float()
            elif key.endswith(SUMMED):
                found["weights"][name] = one
            elif key.endswith(WHOLE):
                found["weights"][name] = (one.float() + two.float()) / 2
            else:
                found["weights"][name] = torch.cat([one, two])
    return found


def without_names(folder: Path) -> None:
    """Model-states files that list no parameters and state no pipeline, as of engines without ZeRO."""
    for path in (folder / TAG).glob("mp_rank_*.pt"):
        tree = {key: value for key, value in read(path).items() if key != "checkpoint_parallel_dimensions"}
        torch.save({**tree, "param_shapes": None}, path)


def drift(folder: Path) -> None:
    """The second rank's copy of a norm becomes another one."""
    path = folder / TAG / "layer_03-model_01-model_states.pt"
    weights = read(path)
    weights[DRIFTED[2:]].mul_(1.25)
    torch.save(weights, path)

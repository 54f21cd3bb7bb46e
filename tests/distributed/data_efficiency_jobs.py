"""Loads whose data sampler, random-LTD and data position were changed: ``data_efficiency_jobs.<function>`` of :mod:`jobs`."""

from __future__ import annotations

import copy
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import elastic_ckpt
from elastic_ckpt.data import ElasticStream
from elastic_ckpt.errors import PartialLoadError
from tests.distributed import truth as oracle
from tests.distributed.facts import on_all_ranks
from tests.distributed.jobs import SPOILS
from tests.distributed.malformed import WAYS, changed, outcome, places
from tests.distributed.model import close
from tests.distributed.unchanged_configurations import ROUTING, SAMPLING

SAMPLES = 96
FILE = "step1/mp_rank_00_model_states.pt"
#: Entries of a model-states file that DeepSpeed, or the sampler, takes as they are.
ENTRIES = ("data_sampler", "random_ltd", "elastic_ckpt_data")
#: What would be of the kind.
OTHERS: dict[str, Any] = {"2 ** 62": 1 << 62, "more than an epoch": 10**6, "users_own": "/x/users_own"}


def engine_of(clusters: str, **learning: Any) -> Any:
    """An engine with both schedulers, and a stream whose documents are skipped one by one."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    sampling: dict[str, Any] = copy.deepcopy(SAMPLING)
    sampling["data_sampling"]["curriculum_learning"].update(data_cluster_path=clusters, **learning)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
        "data_efficiency": {"enabled": True, **sampling, **ROUTING},
    }
    rows = TensorDataset(torch.arange(SAMPLES))
    parameters = [*model.parameters()]
    engine = deepspeed.initialize(model=model, model_parameters=parameters, training_data=rows, config=config)[0]
    elastic_ckpt.register(engine, sampler=ElasticStream(iter(range(1 << 62))))
    return engine


def _train(engine: Any) -> None:
    loss = engine(torch.ones(4, 4)).sum()
    engine.backward(loss)
    engine.step()


def _held(engine: Any) -> str:
    """What a refused load leaves as it was."""
    sampler = engine.training_dataloader.data_sampler
    kept = {key: value for key, value in vars(sampler).items() if key not in ("data_clusters", "np_rng")}
    states = [engine.random_ltd_scheduler.state_dict(), np.random.get_state(), elastic_position(engine)]
    return repr((oracle.fingerprint(engine), {**kept, "curriculum_schedulers": ""}, states))


def elastic_position(engine: Any) -> Any:
    """What the registered stream would save."""
    stream = engine._elastic_ckpt_sampler
    return stream.samples_consumed, stream._used.nonzero().tolist()


def load_each(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Save, then load changed copies: how many were ``refused``, and ``problems`` in words. Collective.

    ``seed`` and ``count`` of the changes that are drawn.
    """
    elastic_ckpt.install()
    scratch = Path(case["scratch"])
    clusters = str(scratch / "clusters")
    folder = str(scratch / "run")
    engine = engine_of(clusters)
    batches = iter(engine.training_dataloader.data_sampler)
    stream = iter(engine._elastic_ckpt_sampler)
    for _ in range(3):
        next(batches)
    for _ in range(4):
        next(stream)
    _train(engine)
    engine.save_checkpoint(folder, tag="step1")
    close(engine)
    path = Path(folder) / FILE
    tree = torch.load(path, weights_only=False)
    found = [(*place,) for key in ENTRIES for place in ((key, *each) for each in places(tree[key], most_items=5))]
    every = [(place, way) for place in found for way in (*WAYS, *OTHERS)]
    drawn = [*map(every.__getitem__, random.Random(case["seed"]).sample(range(len(every)), case["count"]))]
    drawn = [*drawn, *((place, way) for place in found for way in OTHERS)]
    problems: list[str] = []
    refused = 0
    engine = engine_of(clusters)
    for place, way in drawn:
        new = changed(tree, place, way, OTHERS)
        if new is ...:
            continue
        if dist.get_rank() == 0:
            torch.save(tree if SPOILS else new, path)
        dist.barrier()
        what, result, is_held = _loaded(engine, folder)
        if what == "refused":
            refused += 1
            is_right = is_held and not isinstance(result, PartialLoadError) and result.expected and result.found
        else:
            is_right = what == "ok" and _continues(engine)
            close(engine)
            engine = engine_of(clusters)
        if len({*on_all_ranks((what, str(result) if what != "ok" else ""))}) > 1 or not is_right:
            problems.append(f"{place} <- {way}: {what} {result}, {'' if is_held else 'not '}as before")
    close(engine)
    if dist.get_rank() == 0:
        shutil.rmtree(scratch)
    return [SimpleNamespace(refused=refused, problems=problems)]


def _loaded(engine: Any, folder: str, **arguments: Any) -> tuple[str, Any, bool]:
    """The outcome of a load, and whether the engine is as before."""
    before = _held(engine)
    what, result = outcome(lambda: engine.load_checkpoint(folder, **arguments))
    return what, result, before == _held(engine)


def _continues(engine: Any) -> bool:
    """Whether training continues, with samples of the data."""
    batches = iter(engine.training_dataloader.data_sampler)
    drawn = [index for _ in range(4) for index in next(batches, ())]
    np.random.random(700)  # more than the state of its generator has
    stream = iter(engine._elastic_ckpt_sampler)
    for _ in range(4):
        next(stream)
    _train(engine)
    return all(0 <= index < SAMPLES for index in drawn)


def follow(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Follow each way out of a state of the data sampler that is refused. Collective."""
    elastic_ckpt.install()
    clusters, folder, saved = _save(case)
    path = Path(folder) / FILE
    if dist.get_rank() == 0:
        tree = torch.load(path, weights_only=False)
        tree["data_sampler"]["data_cluster_paths"] = ["../users_own"]
        torch.save(tree, path)
    dist.barrier()
    engine = engine_of(clusters)
    what, error = outcome(lambda: engine.load_checkpoint(folder))
    arguments = dict(error.remedies[-1].arguments)
    alone = engine.load_checkpoint(folder, **arguments)[0]
    weights = oracle.fingerprint(engine)["weights"]
    close(engine)
    engine = engine_of(clusters, enabled=False)
    rest = engine.load_checkpoint(folder)[0]
    found = oracle.fingerprint(engine)
    close(engine)
    missing = os.path.join(clusters, "cluster_seqlen8.bin")
    if dist.get_rank() == 0:
        tree["data_sampler"]["data_cluster_paths"] = ["cluster_seqlen8"]
        torch.save(tree, path)
        os.rename(missing, f"{missing}.away")
    dist.barrier()
    engine = engine_of(clusters)
    lost_what, lost, is_held = _loaded(engine, folder)
    if dist.get_rank() == 0:
        os.rename(f"{missing}.away", missing)
    dist.barrier()
    restored = engine.load_checkpoint(folder)[0]
    close(engine)
    of_optimizer = ("weights", "masters", "states", "groups")
    differ = {key for key in of_optimizer if saved[key] != found[key]} | ({"weights"} if SPOILS else set())
    texts = [str(remedy) for remedy in error.remedies]
    return [
        SimpleNamespace(
            what=(what, lost_what),
            texts=texts,
            loaded=all((alone, rest, restored)),
            weights=weights == saved["weights"],
            differ=differ,
            is_held=is_held,
            lost=str(lost),
        )
    ]


def leave(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load by DeepSpeed's own loader, which knows an argument that elastic_ckpt does not, and go on. Collective.

    What is broken, then what is whole: twice, as both that loader and elastic_ckpt may load more than once.
    """
    elastic_ckpt.install()
    clusters, folder, _ = _save(case)
    path = Path(folder) / FILE
    tree = torch.load(path, weights_only=False)
    broken = {**tree, "random_ltd": {**tree["random_ltd"], "max_value": 100}}
    by_own = {"custom_load_fn": lambda src, dst: dst.load_state_dict(src)}
    engine = engine_of(clusters)
    found = []
    for each in (tree if SPOILS else broken, tree):
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(each, path)
        dist.barrier()
        what, result, is_held = _loaded(engine, folder, **by_own)
        found.append((what, str(result), is_held, engine.elastic_report))
    for arguments in (by_own, {}):
        engine.load_checkpoint(folder, **arguments)
        found.append(_continues(engine))
    close(engine)
    return [SimpleNamespace(loads=found[:2], continues=found[2:])]


def _save(case: dict[str, Any]) -> tuple[str, str, dict[str, str]]:
    """Save a run of one step: its clusters, its folder, and hashes of what it held."""
    scratch = Path(case["scratch"])
    clusters = str(scratch / "clusters")
    folder = str(scratch / "run")
    engine = engine_of(clusters)
    next(iter(engine.training_dataloader.data_sampler))
    next(iter(engine._elastic_ckpt_sampler))
    _train(engine)
    engine.save_checkpoint(folder, tag="step1")
    saved = oracle.fingerprint(engine)
    close(engine)
    return clusters, folder, saved

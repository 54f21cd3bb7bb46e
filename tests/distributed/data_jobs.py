"""Jobs that feed registered samplers and streams: ``data_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader, Dataset

import elastic_ckpt
from elastic_ckpt.data import ElasticSampler, ElasticStream
from tests.distributed.jobs import SPOILS, note, take_over
from tests.distributed.model import STEP, VOCABULARY, Setup, TinyLM, build_engine, close
from tests.distributed.pipe_partition_jobs import LAYERS, LayerSpec, PipelineModule

LENGTH = 50
#: Of whose position DeepSpeed's own loader is asked.
OWN = {"kind": "sampler", "stage": 1, "micro": 3, "steps": 1}


class Rows(Dataset):
    """Each sample with its number."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(number))


def packed(documents: Iterator[int]) -> Iterator[tuple[tuple[int, torch.Tensor], int]]:
    """Samples of one and two documents in turn, numbered by their last one: 0, 2, 3, 5, 6 ..."""
    for first in documents:
        last = first if first % 3 == 0 else next(documents)
        yield Rows()[last], last - first + 1


def engine_of(case: dict[str, Any]) -> Any:
    if case["kind"] == "pipeline":
        loss = torch.nn.CrossEntropyLoss()
        specs = [LayerSpec(layer) if isinstance(layer, type) else layer for layer in LAYERS]
        stages = min(dist.get_world_size(), 2)
        model = PipelineModule(specs, num_stages=stages, loss_fn=loss, partition_method="uniform")
        optimizer = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
        config = {"train_micro_batch_size_per_gpu": case["micro"], "gradient_accumulation_steps": case["steps"]}
        config |= {"optimizer": optimizer, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
        return deepspeed.initialize(model=model, config=config)[0]
    batch = case["micro"] * case["steps"] * dist.get_world_size()
    sizes = {"train_micro_batch_size_per_gpu": case["micro"], "gradient_accumulation_steps": case["steps"]}
    setup = Setup(case["stage"], config=tuple({**sizes, "train_batch_size": batch}.items()))
    return build_engine(setup, TinyLM(seed=7))


def run(case: dict[str, Any]) -> None:
    """Load what another run has saved, if one has; train some micro-batches; save, and note their samples in their order.

    ``kind`` of the data, ``stage`` of ZeRO, ``workers`` of the loader; ``registers_late``: whether the sampler is
    registered after the load; ``micro``: the micro-batch; ``steps``: micro-batches in a step; ``micro_batches``: of all.
    """
    take_over(case)
    elastic_ckpt.install()
    engine, micro, workers, kind = engine_of(case), case["micro"], case["workers"], case["kind"]
    if kind == "stream":
        sampler: Any = ElasticStream(count, pack=packed)
        loader = DataLoader(sampler, micro, num_workers=workers)
    else:
        sampler = ElasticSampler(Rows(), seed=5)
        loader = DataLoader(Rows(), micro, sampler=sampler, num_workers=workers, drop_last=kind == "pipeline")
    client = None
    if case["registers_late"]:
        client = _load(engine, case)
        elastic_ckpt.register(engine, sampler=sampler)
    else:
        elastic_ckpt.register(engine, sampler=sampler)
        client = _load(engine, case)
    report = engine.elastic_report
    if kind == "pipeline":
        order = _pipeline(engine, loader, case)
    else:
        order = in_global_order(train_micro_batches(engine, loader, case["micro_batches"]))
    mine = {"epoch": 3}
    engine.save_checkpoint(case["folder"], client_state=mine)
    assert mine == {"epoch": 3}, "what the user gave was changed"
    found = SimpleNamespace(order=order, client=client, consumed=sampler.samples_consumed, report=report)
    found.documents = sampler.documents_consumed if kind == "stream" and dist.get_rank() == 0 else None
    close(engine)
    gc.collect()
    if SPOILS:
        found.order[-1], found.report = [-1], None
    note(case["folder"], found)


def _load(engine: Any, case: dict[str, Any]) -> Any:
    if "source" not in case:
        return None
    _, client = engine.load_checkpoint(case["folder"])
    return {key: client[key] for key in client if key == "epoch" or "elastic" in key}


def train_micro_batches(engine: Any, loader: Any, count: int) -> list[list[int]]:
    """Train so many micro-batches; the numbers of the samples in each of this rank's."""
    seen: list[list[int]] = []
    while len(seen) < count:
        for numbers, tokens in loader:
            engine.backward(engine(tokens))
            with STEP():
                engine.step()
            seen.append(numbers.tolist())
            if len(seen) == count:
                break
    return seen


def in_global_order(seen: list[list[int]]) -> list[list[int]]:
    """All ranks' samples of each micro-batch, in the order of the sampler. Collective."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, seen)
    return [[part[place] for place in range(len(parts[0])) for part in parts] for parts in zip(*everybody, strict=True)]


def _pipeline(engine: Any, loader: Any, case: dict[str, Any]) -> list[list[int]]:
    seen: list[list[int]] = []

    def batches() -> Iterator[Any]:
        for numbers, tokens in RepeatingLoader(loader):
            seen.append(numbers.tolist())
            yield tokens[:, 0] % 16, tokens[:, 1] % 16

    fed = batches()
    for _ in range(case["micro_batches"] // case["steps"]):
        engine.train_batch(fed)
    return seen


def save_for_own_loader(case: dict[str, Any]) -> None:
    """Save a position that is not the engine's own count."""
    elastic_ckpt.install()
    engine, sampler = engine_of(OWN), ElasticSampler(Rows(), seed=5)
    elastic_ckpt.register(engine, sampler=sampler)
    sampler.load_state_dict({"samples_consumed": 2})
    train_micro_batches(engine, DataLoader(Rows(), 3, sampler=sampler), 2)
    engine.save_checkpoint(case["folder"], client_state={"epoch": 3})
    if dist.get_rank() == 0:
        torch.save(_weights(engine) + SPOILS, os.path.join(case["folder"], "weights.pt"))
    close(engine)


def by_own_loader(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What DeepSpeed's own loader takes back of a position.

    ``mode`` of elastic_ckpt; ``seed``: 6 for other data; ``alone``: whether weights alone are asked for.
    """
    elastic_ckpt.install()
    config = {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 3 * dist.get_world_size()}
    config["elastic_checkpoint"] = {"mode": case["mode"]}
    engine = build_engine(Setup(1, config=tuple(config.items())), TinyLM(seed=8))
    elastic_ckpt.register(engine, sampler=(sampler := ElasticSampler(Rows(), seed=case["seed"])))
    before, client, error = _weights(engine), None, ""
    custom = {"custom_load_fn": lambda src, dst: dst.load_state_dict(src)} if case["mode"] == "auto" else {}
    try:
        _, client = engine.load_checkpoint(case["folder"], load_module_only=case["alone"], **custom)
    except elastic_ckpt.ElasticCkptError as raised:
        error = f"{type(raised).__name__}: {raised}"
    after, saved = _weights(engine), torch.load(os.path.join(case["folder"], "weights.pt"))
    found = SimpleNamespace(error=error, consumed=sampler.samples_consumed, report=engine.elastic_report)
    found.is_saved, found.is_untouched = torch.equal(after, saved), torch.equal(after, before)
    found.client = client and {key: client[key] for key in client if key == "epoch" or "elastic" in key}
    close(engine)
    return [found]


def _weights(engine: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten().clone() for each in engine.module.parameters()])

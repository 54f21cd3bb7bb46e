"""Loads of pretrained weights under ZeRO-3, in real processes."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import elastic_ckpt
from benchmarks.floor import extents_of, read_extents, record_plan
from benchmarks.meter import Meter, settle
from elastic_ckpt.config import CONFIG_KEY, read_config

FLOOR, OURS, THEIRS, DCP = "floor", "elastic_ckpt", "from_pretrained", "torch.distributed.checkpoint into FSDP2"


def save_pretrained(folder: Path, hidden_size: int, layers: int) -> None:
    """Write a Llama with random weights in bf16, in shards of 200 MB."""
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 11 // 4,
        "num_hidden_layers": layers,
    }
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=32_000, dtype="bfloat16")
    with transformers.modeling_utils.local_torch_dtype(torch.bfloat16):
        transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


def pretrained(arguments: dict[str, Any]) -> None:
    """Each contender, round by round; writes down what all ranks measured of the weights' loads alone."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    elastic_ckpt.install()
    importlib.import_module("transformers.modeling_utils")  # imported by now, it is patched as the next is entered
    with deepspeed.zero.Init(enabled=False):
        pass
    meter, folder, points = Meter(cold=False), Path(arguments["folder"]), []
    for number in range(arguments["repeats"] + 1):
        for contender in (OURS, FLOOR, DCP, THEIRS) if number % 2 else (THEIRS, DCP, OURS, FLOOR):
            mine = (_measure_dcp if contender == DCP else partial(_measure, contender))(meter, folder)
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, mine)
            points += [{"contender": contender, "round": number, "ranks": everybody}] if number else []
    if dist.get_rank() == 0:
        Path(arguments["out"]).write_text(json.dumps(points), encoding="utf-8")


def _measure(contender: str, meter: Meter, folder: Path) -> dict[str, Any]:
    config = {
        "train_batch_size": dist.get_world_size(),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        CONFIG_KEY: {"pretrained": "off" if contender == THEIRS else "auto", "report": False},
    }
    ds_config, costs = HfDeepSpeedConfig(config), []

    def measured(load: Callable[..., Any], *given: Any) -> Any:
        results = []
        costs.append(meter.measure(lambda: results.append(load(*given)), folder, 0))
        return results[0]

    with _loads(measured), record_plan() as recorded:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    owned_nbytes = sum(param.ds_tensor.nbytes for param in model.parameters())
    if contender == FLOOR:
        assert recorded.plan is not None
        extents, targets = extents_of(recorded.plan), recorded.plan.targets
        of_name = dict(model.named_parameters())
        tensors = [of_name[target.name].ds_tensor.data.view(-1)[: target.numel] for target in targets]
        threads = read_config({}).reading.threads
        costs.append(meter.measure(lambda: read_extents(extents, tensors, threads), folder, 0))
    del model, ds_config
    settle()
    return {**asdict(costs[-1]), "owned_nbytes": owned_nbytes}


def _measure_dcp(meter: Meter, folder: Path) -> dict[str, Any]:
    """The reader of Hugging Face folders of torch.distributed.checkpoint, into parameters that FSDP2 has sharded."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    model.to_empty(device="cpu")
    state = model.state_dict()
    owned_nbytes = sum(tensor.to_local().zero_().nbytes for tensor in state.values())  # touched, as partitions are
    reader = HuggingFaceStorageReader(str(folder))
    cost = meter.measure(lambda: dcp.load(state, storage_reader=reader, no_dist=False), folder, 0)
    del model
    state.clear()
    settle()
    return {**asdict(cost), "owned_nbytes": owned_nbytes}


@contextmanager
def _loads(measured: Callable[..., Any]) -> Iterator[None]:
    """Has the weights' part of ``from_pretrained``, patched or not, pass through ``measured``."""
    kind, name = transformers.PreTrainedModel, "_load_pretrained_model"
    before = getattr(kind, name)

    @functools.wraps(before)  # with the mark of the patch, which is not put around it once more
    def load(*given: Any) -> Any:
        return measured(before, *given)

    setattr(kind, name, staticmethod(load))
    try:
        yield
    finally:
        setattr(kind, name, staticmethod(before))

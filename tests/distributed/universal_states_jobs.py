"""Jobs of tensor-parallel engines whose states are in 8 bits, from native checkpoints and their conversions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bitsandbytes
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from tests.distributed import parallel_models
from tests.distributed import truth as plain
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of
from tests.distributed.model import WideLM, build_engine, close
from tests.distributed.optimizer_jobs import masters
from tests.distributed.optimizer_truth import BLOCKS, decode_flat, decoded
from tests.distributed.parallel_jobs import declared_by_megatron
from tests.distributed.parallel_models import Parallel, build, folder_name, place_of, train
from tests.distributed.truth import base_of

States = dict[tuple[str, str], torch.Tensor]


def eight_bit(module: nn.Module, members: list[list[str]]) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    groups = [{"params": [named[name] for name in names], "weight_decay": 0.1 * (len(names) > 1)} for names in members]
    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=1e-2)
    optimizer.args.min_8bit_size = 256
    return optimizer


@contextmanager
def in_8_bits() -> Iterator[None]:
    with mock.patch.object(parallel_models, "build_optimizer", eight_bit):
        yield


def save(arguments: dict[str, Any]) -> None:
    """Train each setup and save it."""
    with in_8_bits():
        for parallel in arguments["setups"]:
            engine = build(parallel)
            train(engine, parallel, 0, SAVE_AT)
            engine.module.universal_checkpoint_info = declared_by_megatron(parallel)
            engine.save_checkpoint(os.path.join(arguments["folder"], folder_name(parallel)), tag="step4")
            close(engine)
            dist.barrier()


def load(targets: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Load the ``native`` checkpoint of each target and its ``universal`` one; what differs between the engines."""
    elastic_ckpt.install()
    facts = []
    with in_8_bits():
        for target in targets:
            parallel: Parallel = target["setup"]
            engine = build(parallel, seed=8, config=target["config"])
            found, reports = [], []
            for folder in (target["native"], target["universal"]):
                train(engine, parallel, 100, 101)  # leave other values for the load to replace
                engine.load_checkpoint(folder)
                found.append(states_of(engine))
                reports.append(engine.elastic_report)
            formats = [report.source.format for report in reports]
            requantized = [sum(rank.read.blocks for rank in report.ranks) for report in reports]
            compared = {key: (value, found[1].get(key)) for key, value in found[0].items()}
            differences = [key for key, (one, two) in compared.items() if two is None or not torch.equal(one, two)]
            coded = sum(value.dtype == torch.uint8 for value in found[0].values())
            losses = train(engine, parallel, SAVE_AT, CONTINUE_TO)
            where = f"rank {dist.get_rank()} ({place_of(parallel, dist.get_rank())}) of {parallel.name}"
            facts.append(SimpleNamespace(where=where, formats=formats, differences=differences, coded=coded))
            facts[-1].requantized, facts[-1].losses = requantized, losses
            close(engine)
    return facts


def states_of(engine: Any) -> States:
    """This rank's masters, and states of its partitions: codes, scales, maps, and the values that they stand for."""
    found: States = {}
    for number, flat in enumerate(engine.optimizer.single_partition_of_fp32_groups):
        found[f"group {number}", "master"] = flat.detach().clone()
        padding = engine.optimizer.groups_padding[number] if dist.get_rank() else 0  # what it has is not restored
        state = base_of(engine).state[flat]
        for key, value in state.items():
            kept = value.clone() if torch.is_tensor(value) else torch.tensor(value)
            found[f"group {number}", key] = kept
        for key in BLOCKS.keys() & state.keys():
            values, _ = decode_flat(state, key, flat.numel())
            found[f"group {number}", f"values of {key}"] = values[:, : flat.numel() - padding]
    return found


def deepspeed_loads(target: dict[str, Any]) -> dict[str, str]:
    """What differs in masters and elementwise states after DeepSpeed's own loader has read a universal folder."""
    elastic_ckpt.uninstall()
    engine = build_engine(target["setup"], WideLM(seed=8))
    engine._config.load_universal_checkpoint = True
    assert engine.load_checkpoint(target["folder"])[0] is not None
    truth = truth_of(target["folder"])
    states, _ = decoded(engine, set())
    found = {"masters": masters(engine), "states": states}
    close(engine)
    return plain.compare(found, {kind: truth[kind] for kind in found})

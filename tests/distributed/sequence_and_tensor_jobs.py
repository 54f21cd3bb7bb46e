"""Sequence and tensor parallelism together: an ``mpu`` in the style of Megatron-DeepSpeed's, a model, and its jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from tests.distributed import parallel_truth as oracle
from tests.distributed.facts import Loaded, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of
from tests.distributed.kept import close_kept, engine_of
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, close
from tests.distributed.parallel_layers import (
    HIDDEN,
    SEQUENCE,
    Column,
    GatedBlock,
    Gather,
    PlainBlock,
    Vocabulary,
    mean_loss,
)
from tests.distributed.parallel_models import (
    TOKENS,
    Parallel,
    build_optimizer,
    fill,
    forget_groups,
    group_members,
)


class Mpu:
    """Answers DeepSpeed as Megatron-DeepSpeed's ``mpu`` does, and leaves its sequence-parallel degree nowhere.

    Process groups of ranks that count tensor-parallel ones first, then sequence-parallel, then data-parallel ones.

    Args:
        tp: tensor-parallel degree.
        sp: sequence-parallel degree.
        ranks: all ranks, by data-, sequence- and tensor-parallel rank, if these count otherwise.
    """

    def __init__(self, tp: int, sp: int, ranks: torch.Tensor | None = None) -> None:
        ranks = torch.arange(dist.get_world_size()).view(-1, sp, tp) if ranks is None else ranks
        self._groups = {
            "model": _mine(ranks.reshape(-1, tp)),
            "sequence": _mine(ranks.transpose(1, 2).reshape(-1, sp)),
            "data": _mine(ranks.flatten(1).T),
            "sequence_data": _mine(ranks.reshape(-1, tp).T),
        }

    def __getattr__(self, name: str) -> Callable[[], Any]:
        kind, _, wanted = name.removeprefix("get_").replace("tensor_model", "model").partition("_parallel_")
        groups = self.__dict__.get("_groups", {})
        if not name.startswith("get_") or kind not in groups:
            raise AttributeError(name)
        group = groups[kind]
        answers: dict[str, Callable[[], Any]] = {
            "group": lambda: group,
            "world_size": lambda: dist.get_world_size(group),
            "rank": lambda: dist.get_rank(group),
            "src_rank": lambda: dist.get_global_rank(group, 0),
            "group_ranks": lambda: dist.get_process_group_ranks(group),
        }
        if wanted not in answers:
            raise AttributeError(name)
        return answers[wanted]


def _mine(rows: torch.Tensor) -> Any:
    """Make a group of each row of ranks; the one that this rank is in. Collective."""
    made = [(row, dist.new_group(row)) for row in rows.tolist()]
    return next(group for row, group in made if dist.get_rank() in row)


class SplitLM(nn.Module):
    """Embedding, two blocks and a head, cut over tensor-parallel ranks; each position by itself."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.embed = Vocabulary(64, group)
        self.blocks = nn.Sequential(PlainBlock(group), GatedBlock(group), nn.LayerNorm(HIDDEN))
        self.head = Column(HIDDEN, 64, group, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(Gather.apply(self.head(self.blocks(self.embed(tokens))), self.group), labels)


@dataclass(frozen=True)
class Topology:
    """Degrees; the rest of the ranks are data-parallel.

    Attributes:
        tp: tensor-parallel degree.
        sp: sequence-parallel degree.
        stage: of ZeRO.
        states_batch: whether the config states the whole batch, from which the degree of an ``mpu`` follows.
    """

    tp: int
    sp: int
    stage: int
    states_batch: bool = True

    @property
    def parallel(self) -> Parallel:
        """As the oracle knows it, whose data-parallel ranks are those that ZeRO partitions over."""
        return Parallel("split", f"sp{self.sp}", tp=self.tp, stage=self.stage)

    @property
    def name(self) -> str:
        return f"tp{self.tp}-sp{self.sp}-z{self.stage}" + "-no-batch" * (not self.states_batch)

    @property
    def data(self) -> int:
        """Data-parallel degree."""
        return dist.get_world_size() // (self.tp * self.sp)


def build(topology: Topology, seed: int = 7) -> Any:
    """A live engine on the default process group. Collective."""
    forget_groups()
    mpu = Mpu(topology.tp, topology.sp)
    module = SplitLM(mpu.get_model_parallel_group())
    fill(module, topology.parallel, seed)
    members = group_members(module)
    if topology.stage == 3:  # as Megatron-DeepSpeed does: by itself DeepSpeed takes the mpu's data-parallel ranks alone
        deepspeed.zero.Init(module, data_parallel_group=mpu.get_sequence_data_parallel_group(), mpu=mpu)
    optimizer = build_optimizer(module, members)
    engine = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // topology.data,
            **({"train_batch_size": GLOBAL_BATCH, "gradient_accumulation_steps": 1} if topology.states_batch else {}),
            "zero_optimization": {"stage": topology.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            **PRECISIONS["fp32"],
        },
    )[0]
    engine.members = members
    return engine


def train(engine: Any, topology: Topology, first: int, last: int) -> list[float]:
    """Steps of which each sequence-parallel rank sees its part of the sequence; mean losses over the global batch."""
    losses = []
    sp_rank, data_rank = dist.get_rank() // topology.tp % topology.sp, dist.get_rank() // (topology.tp * topology.sp)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, TOKENS, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)[data_rank :: topology.data]
        width = SEQUENCE // topology.sp
        part = tokens[:, sp_rank * width : (sp_rank + 1) * width + 1]
        loss = engine(part[:, :-1].contiguous(), part[:, 1:].contiguous())
        # ZeRO-1 and 2 sum the gradients of sequence-parallel ranks, ZeRO-3 averages them
        engine.backward(loss / topology.sp if topology.stage < 3 else loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train each ``setup``, save it, write down the truth, and train on for the reference losses."""
    for case in cases:
        topology = case["setup"]
        engine = build(topology)
        oracle.assert_fresh(engine, topology.parallel, seed=7)
        train(engine, topology, 0, SAVE_AT)
        engine.save_checkpoint(case["folder"], tag="step4", client_state={"rng": dist.get_rank()})
        truth = oracle.gather(engine, topology.parallel)
        truth["losses"] = train(engine, topology, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(case["folder"], "truth.pt"))
        close(engine)


def resume(case: dict[str, Any]) -> list[Loaded]:
    """Load a checkpoint into an engine of ``topology``, compare with its truth, and train on as the saved run did."""
    elastic_ckpt.install()
    topology, truth = case["topology"], truth_of(case["folder"])
    engine = engine_of(topology, partial(build, topology, seed=8), close)
    _, client_state = engine.load_checkpoint(case["folder"])
    report, differences = engine.elastic_report, oracle.differences(engine, topology.parallel, truth)
    gap = loss_gap(train(engine, topology, SAVE_AT, CONTINUE_TO), truth)
    train(engine, topology, 100, 101)  # leave other values for the next load to replace
    return [Loaded(case, f"rank {dist.get_rank()}: {case['name']}", report, differences, gap, client_state)]


def same_as_deepspeed(case: dict[str, Any]) -> list[SimpleNamespace]:
    """At the saved topology: what each rank gets without and with elastic loading, and what of it is not the truth."""
    close_kept()
    topology = case["topology"]
    found = SimpleNamespace(differences={}, client_states=[], losses=[])
    for install in (elastic_ckpt.uninstall, elastic_ckpt.install):
        install()
        engine = build(topology, seed=8)
        _, client_state = engine.load_checkpoint(case["folder"])
        found.differences |= oracle.differences(engine, topology.parallel, truth_of(case["folder"]))
        found.client_states.append(client_state["rng"])
        found.losses.append(train(engine, topology, SAVE_AT, CONTINUE_TO))
        close(engine)
    return [found]

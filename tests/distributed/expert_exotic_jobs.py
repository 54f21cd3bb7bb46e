"""Experts that are frozen, have buffers, 8-bit states, or other places than those of their numbers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
from deepspeed.checkpoint.autoep_affine import make_autoep_placement_descriptor
from deepspeed.module_inject import auto_ep_layer
from torch import nn

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.expert_jobs import WIDTH, ExpertLM, Experts, build, end, gather, name_in_job, train
from tests.distributed.facts import on_all_ranks
from tests.distributed.jobs import SAVE_AT, truth_of
from tests.distributed.optimizer_truth import decode_flat

_UNIFORM = auto_ep_layer.legacy_uniform_autoep_placement_descriptor


@dataclass(frozen=True)
class Exotic(Experts):
    """A run with experts.

    Attributes:
        frozen: pattern of the parameters that do not train.
        eight_bit: whether states are quantized; weights of experts are a few blocks long then, and have no biases.
        placement: experts on each expert-parallel rank.
        second: expert-parallel degree of the second layer, if it has one of its own.
    """

    frozen: str = ""
    eight_bit: bool = False
    placement: tuple[tuple[int, ...], ...] = ()
    second: int = 0

    @property
    def name(self) -> str:
        extra = "-frozen" + re.sub(r"\W+", "", self.frozen) if self.frozen else ""
        return super().name + extra + "-8bit" * self.eight_bit + "-placed" * bool(self.placement) + f"-{self.second}"

    def model(self, seed: int) -> tuple[nn.Module, Any]:
        model = ExoticLM(self, seed)
        for name, param in model.named_parameters():
            if self.frozen and re.fullmatch(self.frozen, name):
                param.requires_grad_(False)
        return model, None

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if not self.eight_bit:
            return super().optimizer(groups)
        optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=1e-2)
        optimizer.args.min_8bit_size = 256
        return optimizer

    def ep_of(self, layer: int) -> int:
        return self.second if layer and self.second else self.ep

    def placed(self, ep_rank: int) -> range | tuple[int, ...]:
        return self.placement[ep_rank] if self.placement else super().placed(ep_rank)


class ExpertWithBuffer(nn.Module):
    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=bias), nn.Linear(inner, WIDTH, bias=bias)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).tanh()) * self.scale.mean()


class ExoticLM(ExpertLM):
    """Its experts have buffers, each other values; the first layer of experts is used twice."""

    def _mixture(self, run: Exotic, number: int) -> nn.Module:  # type: ignore[override]
        mixture = super()._mixture(run, number)
        for at, expert in enumerate(mixture.deepspeed_moe.experts.deepspeed_experts):
            new = ExpertWithBuffer(64 if run.eight_bit else 10, not run.eight_bit)
            for param in new.parameters():
                param.allreduce, param.group_name = False, mixture.expert_group_name
            mixture.deepspeed_moe.experts.deepspeed_experts[at] = new
            del expert
        return mixture

    def _set_experts(self, run: Experts, seed: int) -> None:
        super()._set_experts(run, seed)
        for layer, mixture in enumerate(self.mixtures):
            local = mixture.num_local_experts
            for number, expert in enumerate(mixture.deepspeed_moe.experts.deepspeed_experts):
                expert.scale += seed / 100 + layer / 10 + (dist.get_rank() % run.ep_of(layer) * local + number) / 100

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mixtures[0](hidden)[0]


def built(run: Exotic, seed: int = 7) -> Any:
    """A live engine; with a placement of its own, AutoEP takes that for its layers'."""

    def descriptor(number: int, *_: int) -> Any:
        return make_autoep_placement_descriptor(number, [list(each) for each in run.placement])

    auto_ep_layer.legacy_uniform_autoep_placement_descriptor = descriptor if run.placement else _UNIFORM
    return build(run, seed)


def gathered(engine: Any, run: Exotic, keys: list[str]) -> dict[str, Any]:
    """What the job has, buffers of experts by their numbers among all, and 8-bit states decoded. Collective."""
    found = gather(engine, run, [] if run.eight_bit else keys)
    in_job = partial(name_in_job, run)
    mine = {in_job(name): value for name, value in found["buffers"].items()}
    states = {(in_job(name), key): value for (name, key), value in decoded(engine).items()} if run.eight_bit else {}
    found["buffers"] = {}
    for buffers, of_rank in on_all_ranks((mine, states)):
        for known, values in ((found["buffers"], buffers), (found["states"], of_rank)):
            for name, value in values.items():
                assert torch.equal(known.setdefault(name, value), value), name
    return found


def decoded(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """8-bit states of this rank's parameters, whole, in fp32. Collective."""
    optimizer, found = engine.optimizer, {}
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        flat = optimizer.bit16_groups_flat[group]
        ranks = optimizer.real_dp_process_group[group]
        for key in ("state1", "state2"):
            mine = decode_flat(optimizer.optimizer.state[master], key, master.numel())[0].contiguous()
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(ranks))]
            dist.all_gather(parts, mine, group=ranks)
            whole = torch.cat(parts, 1)
            for param in optimizer.bit16_groups[group]:
                start = (param.data_ptr() - flat.data_ptr()) // flat.element_size()
                found[engine.param_names[param], key] = whole[0, start : start + param.numel()].clone()
    return found


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train and save each ``setup``, and write down the truth."""
    for case in cases:
        run = case["setup"]
        engine = built(run)
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(case["folder"], tag="step4")
        if run.stage and not run.eight_bit:
            oracle.relink(engine)
        truth = gathered(engine, run, ["exp_avg", "exp_avg_sq"])
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(case["folder"], "truth.pt"))
        end(engine)
        dist.barrier()


def resume(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load a checkpoint into an engine of ``run``: names of what is not as saved, and by how much states differ."""
    elastic_ckpt.install()
    run, truth = case["run"], truth_of(case["folder"])
    engine = built(run, seed=8)
    engine.load_checkpoint(case["folder"])
    if run.stage and not run.eight_bit:
        oracle.relink(engine)
    now = gathered(engine, run, ["exp_avg", "exp_avg_sq"])
    different = {key for key, value in truth["buffers"].items() if not torch.equal(now["buffers"][key], value)}
    for name, weight in truth["weights"].items():
        if name in now["masters"]:  # of frozen parameters, only weights were saved
            same = torch.equal(now["masters"][name], truth["masters"].get(name, weight.float()))
        else:
            same = torch.equal(now["weights"][name], weight)
        different |= set() if same else {name}
    both = now["states"].keys() & truth["states"].keys()
    drift = {each: float((now["states"][each] - truth["states"][each]).abs().max()) for each in both}
    largest: dict[str, float] = {}
    for (_, key), value in truth["states"].items():
        largest[key] = max(largest.get(key, 0.0), float(value.abs().max()))
    found = SimpleNamespace(
        where=f"rank {dist.get_rank()}: {case['name']}",
        different=different,
        drift={each: value for each, value in drift.items() if value},
        compared=len(both),
        largest=largest,
        report=engine.elastic_report,
    )
    end(engine)
    return [found]

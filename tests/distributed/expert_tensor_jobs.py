"""Experts in models that are tensor parallel too."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from torch import nn

from tests.distributed.expert_jobs import WIDTH, ExpertLM, Experts, build, end, train
from tests.distributed.parallel_layers import Column, Row
from tests.distributed.sequence_and_tensor_jobs import Mpu

_INNER = 10
#: The sharded dimension. The parameters of experts are copies, which lack the attributes that say so.
_DIMS = {(Column, "weight"): 0, (Column, "bias"): 0, (Row, "weight"): 1}


@dataclass(frozen=True)
class Sharded(Experts):
    """A tensor-parallel run with experts.

    Attributes:
        degree: tensor-parallel degree.
        slices: whether tensor-parallel ranks slice each expert (``enable_expert_tensor_parallelism``); if not, the
            ranks of an expert-parallel group are neighbors, whichever tensor-parallel ranks they are.
        outer: whether data-parallel ranks are neighbors, instead of tensor-parallel ones.
    """

    degree: int = 2
    slices: bool = True
    outer: bool = False

    @property
    def name(self) -> str:
        return f"{super().name}-tp{self.degree}" + "-slices" * self.slices

    @property
    def tp(self) -> int:
        return self.degree

    def model(self, seed: int) -> tuple[nn.Module, Any]:
        ranks = torch.arange(self.world).view(self.degree, -1).T.unsqueeze(1) if self.outer else None
        mpu = Mpu(self.degree, 1, ranks)

        def gathered(values: torch.Tensor, dim: int = 0) -> torch.Tensor:
            parts = [torch.empty_like(values) for _ in range(self.degree)]
            dist.all_gather(parts, values.contiguous(), group=mpu.get_model_parallel_group())
            return torch.cat(parts, dim)

        mappings._gather_tokens = gathered  # DeepSpeed's own gathers into another shape, as gloo cannot
        return ShardedLM(self, seed, mpu.get_model_parallel_group()), mpu


class ShardedLM(ExpertLM):
    """A dense layer, and experts, of one hidden layer that tensor-parallel ranks slice; values by their names."""

    def __init__(self, run: Sharded, seed: int, group: Any) -> None:
        self.__dict__["groups"] = (
            group,
            group if run.slices else dist.new_group([dist.get_rank()], use_local_synchronization=True),
        )
        super().__init__(run, seed)
        self.dense = self._mlp(group)
        for module in (self.embedding, self.head):
            module.weight.tensor_model_parallel = False  # whole, as Megatron says it
        self._fill(run, seed)

    def _mlp(self, group: Any) -> nn.Sequential:
        return nn.Sequential(Column(WIDTH, _INNER, group), nn.Tanh(), Row(_INNER, WIDTH, group))

    def _mixture(self, run: Sharded, number: int) -> MoE:  # type: ignore[override]
        options = {"use_rts": False, "capacity_factor": 8.0, "min_capacity": 0, "use_residual": run.residual}
        options["enable_expert_tensor_parallelism"] = run.slices
        expert = self._mlp(self.groups[1])
        expert[0].group = expert[2].group = None  # process groups cannot be copied
        mixture = MoE(WIDTH, expert, num_experts=number, ep_size=run.ep, k=1, **options)
        for module in mixture.modules():
            if isinstance(module, (Column, Row)):
                module.group = self.groups[1]
        return mixture

    def _set_experts(self, run: Experts, seed: int) -> None:
        pass

    def _fill(self, run: Sharded, seed: int) -> None:
        """Give each parameter values of its name in the job, a slice of the whole."""
        rank, tp = dist.get_rank(), run.degree
        at = rank // tp if run.slices else rank
        ranks = run.world // tp if run.slices else run.world
        ep_rank = at // (ranks // run.ep) if run.data_first else at % run.ep
        for name, param in self.named_parameters():
            in_job = name
            path, found, rest = name.partition("deepspeed_experts.")
            if found:
                number, _, rest = rest.partition(".")
                local = self.get_submodule(path.split(".deepspeed_moe")[0]).num_local_experts
                in_job = f"{path}{found}{ep_rank * local + int(number)}.{rest}"
            layer, _, kind = name.rpartition(".")
            dim = _DIMS.get((type(self.get_submodule(layer)), kind))
            is_sharded = dim is not None and dist.get_world_size(self.get_submodule(layer).group) > 1
            shape = list(param.shape)
            if is_sharded:
                param.shard_dim = dim
                shape[dim] *= tp
            generator = torch.Generator().manual_seed(1000 * seed + zlib.crc32(in_job.encode()) % 1000)
            whole = torch.randn(shape, generator=generator) / 4
            param.data.copy_(whole.chunk(tp, dim)[rank % tp] if is_sharded else whole)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dense(hidden)


def save_alone(case: dict[str, Any]) -> None:
    """Train and save ``setup``, and compare nothing."""
    engine = build(case["setup"])
    train(engine, 0, 2)
    engine.save_checkpoint(case["folder"], tag="step4")
    end(engine)

"""Live engines whose parameters are whole on every data-parallel rank: stages 0 to 2, and without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from elastic_ckpt import distributed
from elastic_ckpt.core.chunks import group_rules, placements
from elastic_ckpt.core.flat_ranges import Placement
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.engines.adapter import EngineAdapter, Params
from elastic_ckpt.engines.compat import base_optimizer, dp_group_of, flat_offsets, has_optimizer
from elastic_ckpt.engines.optimizers import StateSchema

#: By optimizer: its fp32 masters, their parameters in flat order, the parameters as it numbers them, and those of ZeRO
#: the low-precision partitions of all ranks. ``BF16_Optimizer`` is ZeRO-1 that accumulates gradients in fp32.
LISTS = {
    BF16_Optimizer: ("fp32_groups_flat_partition", "bf16_groups", "bf16_groups", "bf16_partitioned_groups"),
    DeepSpeedZeroOptimizer: (
        "single_partition_of_fp32_groups",
        "round_robin_bit16_groups",
        "bit16_groups",
        "parallel_partitioned_bit16_groups",
    ),
    FP16_Optimizer: ("fp32_groups_flat", "fp16_groups", "fp16_groups"),
    FP16_UnfusedOptimizer: ("fp32_groups", "fp16_groups", "fp16_groups"),
}


class Zero012Adapter(EngineAdapter):
    """Adapter of a ZeRO-1/2 optimizer, of one without ZeRO, or of an engine below ZeRO-3 without an optimizer.

    ZeRO-1/2 and ``FP16_Optimizer`` (with FusedAdam, in fp16 and bf16) have one flat master for each param group,
    ``FP16_UnfusedOptimizer`` one for each parameter, and a plain fp32 optimizer updates the parameters themselves.
    In bf16 without an optimizer, DeepSpeed wraps a dummy in a ``BF16_Optimizer``, whose masters are never updated.
    """

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        optimizer, trains = engine.optimizer, has_optimizer(engine)
        lists = [getattr(optimizer, name) for name in LISTS.get(type(optimizer), ()) if trains]
        self._has_masters = bool(lists)
        if not lists:
            numbered = [group["params"] for group in base_optimizer(engine).param_groups] if trains else []
            own = [[param for param in params if param.requires_grad] for params in numbered]
            lists = [own, own, numbered]
        masters, members, self._numbered, *partitions = lists
        self._partitions = partitions[0] if partitions else ()
        groups: Iterable[int] = range(len(masters))
        if not self._has_masters or isinstance(optimizer, FP16_UnfusedOptimizer):
            groups = [number for number, of_group in enumerate(masters) for _ in of_group]
            masters, members = [*chain(*masters)], [[param] for params in members for param in params]
        self._offsets = flat_offsets(optimizer, members)
        # Muon orthogonalizes whole gradients on every rank that has some of their elements; offloaded, it gathers them
        self.keeps_touched = bool(partitions) and not getattr(optimizer, "cpu_offload", False)
        self.replicated = not partitions
        stage = engine.zero_optimization_stage() if partitions else 0
        super().__init__(engine, schema, stage, masters, list(groups), members, dp_group_of(engine))

    def numbered(self) -> Params:
        return self._numbered

    def placements(self, flat: int) -> Iterable[Placement]:
        numels = [param.numel() for param in self.members[flat]]
        rank = dist.get_rank(group=self.optimizer.real_dp_process_group[flat]) if self._partitions else 0
        return placements(group_rules(numels, self._offsets[flat], self.masters[flat].numel()), rank)

    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        optimizer = self.optimizer
        if self._partitions:
            if all(partitions[0].device.type == "cpu" for partitions in self._partitions):
                self._broadcast_partitions()
            else:
                optimizer.update_lp_params()
            if not exact_masters:
                optimizer._restore_from_bit16_weights()
            if plan.restores_states:
                # DeepSpeed links each parameter once to its slice of the states that exist then; new ones must be
                # linked again, or its public getters miss them
                optimizer._hp_optimizer_states_linked = False
                if all(self.base.state.get(master) for master in self.masters):
                    optimizer._lazy_init_hp_params_optimizer_state()
        elif self._has_masters:  # as the optimizers' own steps end
            for index, params in enumerate(self.members):
                flat = self.masters[index].data.reshape(-1)
                for placement in self.placements(index):
                    param, start = params[placement.index], placement.flat_offset
                    param.data.copy_(flat[start : start + param.numel()].view(param.shape))
            if not exact_masters:
                optimizer.refresh_fp32_params()

    def _broadcast_partitions(self) -> None:
        """Broadcast every rank's part of the low-precision weights in place, like ``update_lp_params``. Collective.

        DeepSpeed gathers whole groups at once, for which gloo needs a second low-precision model in memory.
        """
        for index, (partitions, master) in enumerate(zip(self._partitions, self.masters, strict=True)):
            group = self.optimizer.real_dp_process_group[index]
            partitions[dist.get_rank(group=group)].data.copy_(master.data)
            members = dist.get_process_group_ranks(group)
            pending = [
                # as bytes: not every backend knows every dtype
                dist.broadcast(partition.data.view(torch.uint8), src=member, group=group, async_op=True)
                for partition, member in zip(partitions, members, strict=True)
            ]
            for work in pending:
                distributed.wait(work)

"""Live engines whose parameters are whole on every data-parallel rank: stages 0 to 2, and without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from elastic_ckpt.core.chunks import group_rules, placements
from elastic_ckpt.core.flat_ranges import Placement, group_offsets
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.engines.adapter import EngineAdapter, Params
from elastic_ckpt.engines.compat import base_optimizer, flat_offsets, has_optimizer
from elastic_ckpt.engines.optimizers import StateSchema


class UnpartitionedAdapter(EngineAdapter):
    """Adapter of an optimizer at stage 0, or of an engine below ZeRO-3 without one: every rank holds everything.

    A plain fp32 optimizer updates the parameters themselves, ``FP16_UnfusedOptimizer`` one fp32 master for each, and
    ``FP16_Optimizer`` (with FusedAdam) a flat one for each param group; the latter two serve fp16 and bf16. In bf16
    without an optimizer, DeepSpeed wraps a dummy in a ``BF16_Optimizer``, whose masters are never updated.
    """

    replicated = True

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        stepped = list(_stepped_on(engine)) if has_optimizer(engine) else []
        super().__init__(
            engine,
            schema,
            zero_stage=0,
            masters=[master for _, master, _ in stepped],
            groups=[group for group, _, _ in stepped],
            members=[params for _, _, params in stepped],
            dp_group=engine.seq_data_parallel_group,
        )

    def numbered(self) -> Params:
        if isinstance(self.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            return super().numbered()
        return [group["params"] for group in self.base.param_groups]  # frozen ones too

    def placements(self, flat: int) -> Iterable[Placement]:
        numels = [param.numel() for param in self.members[flat]]
        return placements(group_rules(numels, group_offsets(numels), sum(numels)), rank=0)

    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        """Like the end of ``FP16_UnfusedOptimizer.step`` and ``FP16_Optimizer.step``. Local."""
        if not isinstance(self.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            return  # the masters are the weights
        for index, params in enumerate(self.members):
            flat = self.masters[index].data.reshape(-1)
            for placement in self.placements(index):
                param, start = params[placement.index], placement.flat_offset
                param.data.copy_(flat[start : start + param.numel()].view(param.shape))
        if not exact_masters:
            self.optimizer.refresh_fp32_params()


def _stepped_on(engine: Any) -> Iterable[tuple[int, Any, list[Any]]]:
    """Per fp32 tensor that the optimizer updates: its param group, itself, and its parameters in flat order."""
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_Optimizer):
        for number, (master, group) in enumerate(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)):
            yield number, master, list(group)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for number, (masters, group) in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)):
            for master, param in zip(masters, group, strict=True):
                yield number, master, [param]
    else:
        for number, group in enumerate(base_optimizer(engine).param_groups):
            yield from ((number, param, [param]) for param in group["params"] if param.requires_grad)


class Zero12Adapter(EngineAdapter):
    """Adapter of a ZeRO-1/2 optimizer, with one flat partition per param group.

    ``BF16_Optimizer`` is one too: ZeRO-1 that accumulates gradients in fp32.
    """

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        optimizer = engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            masters, members = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
            self._numbered: Params = members
            self._offsets = [group_offsets([param.numel() for param in params]) for params in members]
            self._partitions = optimizer.bf16_partitioned_groups
        else:
            masters, members = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
            self._numbered = optimizer.bit16_groups
            self._offsets = flat_offsets(optimizer)
            self._partitions = optimizer.parallel_partitioned_bit16_groups
        # Muon orthogonalizes whole gradients on every rank that has some of their elements; offloaded, it gathers them
        self.keeps_touched = not getattr(optimizer, "cpu_offload", False)
        stage = engine.zero_optimization_stage()
        super().__init__(engine, schema, stage, masters, range(len(masters)), members, optimizer.dp_process_group)

    def numbered(self) -> Params:
        return self._numbered

    def placements(self, flat: int) -> Iterable[Placement]:
        numels = [param.numel() for param in self.members[flat]]
        rank = dist.get_rank(group=self.optimizer.real_dp_process_group[flat])
        return placements(group_rules(numels, self._offsets[flat], self.masters[flat].numel()), rank)

    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        optimizer = self.optimizer
        if all(partitions[0].device.type == "cpu" for partitions in self._partitions):
            self._broadcast_partitions()
        else:
            optimizer.update_lp_params()
        if not exact_masters:
            optimizer._restore_from_bit16_weights()
        if plan.restores_states:
            # DeepSpeed links each parameter once to its slice of the states that exist then; new ones must be linked
            # again, or its public getters miss them
            optimizer._hp_optimizer_states_linked = False
            if all(self.base.state.get(master) for master in self.masters):
                optimizer._lazy_init_hp_params_optimizer_state()

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
                work.wait()

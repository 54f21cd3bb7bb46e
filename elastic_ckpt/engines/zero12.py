"""Live ZeRO-1 and ZeRO-2 engines: ``DeepSpeedZeroOptimizer``, and ``BF16_Optimizer``.

Private attributes used, all of DeepSpeed 0.19. Both: ``real_dp_process_group``, ``_hp_optimizer_states_linked``,
``_lazy_init_hp_params_optimizer_state``, ``_restore_from_bit16_weights``. ``DeepSpeedZeroOptimizer``:
``bit16_groups``, ``round_robin_bit16_groups``, ``round_robin_bit16_offsets``, ``partition_size``,
``single_partition_of_fp32_groups``, ``parallel_partitioned_bit16_groups``. ``BF16_Optimizer``: ``bf16_groups``,
``fp32_groups_flat_partition``, ``bf16_partitioned_groups``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic_ckpt.core.flat_ranges import contiguous_partition, group_offsets
from elastic_ckpt.core.local_state import FlatPartition, Fragment, LocalState
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.engines.base import FlatOptimizer, ReadPart
from elastic_ckpt.engines.state_schema import StateSchema


class Zero12Adapter(FlatOptimizer):
    """Adapter of a ZeRO-1/2 optimizer: one flat partition for each param group."""

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        masters = self._masters(engine.optimizer)
        super().__init__(
            module=engine.module,
            param_names=engine.param_names,
            base=engine.optimizer.optimizer,
            schema=schema,
            masters=masters,
            groups=range(len(masters)),
            dp_group=engine.optimizer.dp_process_group,
        )
        self._optimizer = engine.optimizer
        self._zero_stage = engine.zero_optimization_stage()

    def _masters(self, optimizer: Any) -> Sequence[torch.Tensor]:
        """The flat fp32 partitions of this rank."""
        return optimizer.single_partition_of_fp32_groups

    def _flat_params(self) -> Sequence[Sequence[torch.nn.Parameter]]:
        """Per group, its parameters in the order of the flat buffer."""
        return self._optimizer.round_robin_bit16_groups

    def _flat_offsets(self) -> Sequence[Sequence[int]]:
        """Per group, where its parameters start in the flat buffer."""
        return self._optimizer.round_robin_bit16_offsets

    def _numbered_params(self) -> Sequence[Sequence[torch.nn.Parameter]]:
        """Per group, its parameters in the order in which the base optimizer was given them."""
        return self._optimizer.bit16_groups

    def keeps_touched(self) -> bool:
        """Muon orthogonalizes whole gradients, on every rank that holds a part; offloaded, it gathers them instead."""
        return not getattr(self._optimizer, "cpu_offload", False)

    def _partitions(self) -> Sequence[Sequence[torch.Tensor]]:
        """Per group, the partitions of all ranks in its flat low-precision buffer, each as big as the others."""
        return self._optimizer.parallel_partitioned_bit16_groups

    def local_state(self) -> LocalState:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        flats, fragments = [], []
        for index, (params, offsets) in enumerate(zip(self._flat_params(), self._flat_offsets(), strict=True)):
            names = self.names_of(params)
            numels = [param.numel() for param in params]
            rank = dist.get_rank(group=self._optimizer.real_dp_process_group[index])
            master = self.masters[index]
            flats.append(FlatPartition(index, index, master.numel(), self.dtype_of(master), names))
            fragments += [
                Fragment(names[p.index], tuple(params[p.index].shape), p.range, index, p.flat_offset)
                for p in contiguous_partition(numels, offsets, master.numel(), rank)
            ]
        group_names = [self.names_of(params) for params in self._numbered_params()]
        return self.describe(self._zero_stage, flats, fragments, self.whole_frozen(self._frozen()), group_names)

    def _frozen(self) -> Mapping[str, torch.Tensor]:
        owned = {id(param) for params in self._flat_params() for param in params}
        return {name: param.data for param, name in self.param_names.items() if id(param) not in owned}

    def fill(self, plan: ReadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        return self.fill_at_once(plan, read, self._frozen())

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        optimizer = self._optimizer
        if all(partitions[0].device.type == "cpu" for partitions in self._partitions()):
            self._spread_partitions()
        else:
            optimizer.update_lp_params()
        if not exact_masters:
            optimizer._restore_from_bit16_weights()
        if plan.restores_states:
            # DeepSpeed links each parameter to its slice of the states once, and only finds states that are there
            # at that time; the ones just made must be linked anew, or its public getters miss them.
            optimizer._hp_optimizer_states_linked = False
            if all(self.base.state.get(master) for master in self.masters):
                optimizer._lazy_init_hp_params_optimizer_state()

    def _spread_partitions(self) -> None:
        """What ``update_lp_params`` does, in place: every rank's part of the low-precision weights to all. Collective.

        DeepSpeed gathers whole groups at once, and gloo gathers into memory of its own before it copies: a second
        low-precision model. It broadcasts in place.
        """
        for index, (partitions, master) in enumerate(zip(self._partitions(), self.masters, strict=True)):
            group = self._optimizer.real_dp_process_group[index]
            partitions[dist.get_rank(group=group)].data.copy_(master.data)
            members = dist.get_process_group_ranks(group)
            pending = [
                # as bytes: not every backend knows every dtype
                dist.broadcast(partition.data.view(torch.uint8), src=member, group=group, async_op=True)
                for partition, member in zip(partitions, members, strict=True)
            ]
            for work in pending:
                work.wait()


class Bf16Adapter(Zero12Adapter):
    """Adapter of ``BF16_Optimizer``: ZeRO-1 that accumulates gradients in fp32."""

    def _masters(self, optimizer: Any) -> Sequence[torch.Tensor]:
        return optimizer.fp32_groups_flat_partition

    def _flat_params(self) -> Sequence[Sequence[torch.nn.Parameter]]:
        return self._optimizer.bf16_groups

    def _flat_offsets(self) -> Sequence[Sequence[int]]:
        return [group_offsets([param.numel() for param in params]) for params in self._optimizer.bf16_groups]

    def _numbered_params(self) -> Sequence[Sequence[torch.nn.Parameter]]:
        return self._optimizer.bf16_groups

    def _partitions(self) -> Sequence[Sequence[torch.Tensor]]:
        return self._optimizer.bf16_partitioned_groups

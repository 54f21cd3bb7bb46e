"""Live ZeRO-1 and ZeRO-2 engines (``DeepSpeedZeroOptimizer``).

Private attributes used, all of DeepSpeed 0.19: ``round_robin_bit16_groups``, ``round_robin_bit16_offsets``,
``bit16_groups_flat``, ``partition_size``, ``single_partition_of_fp32_groups``, ``real_dp_process_group``,
``_hp_optimizer_states_linked``, ``_lazy_init_hp_params_optimizer_state``, ``_restore_from_bit16_weights``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from elastic_ckpt.catalog import FROZEN
from elastic_ckpt.destinations import Destinations, FlatPartition, Fragment, LiveGroup, WholeTensor
from elastic_ckpt.engines.base import FlatOptimizer
from elastic_ckpt.geometry import FlatRange, contiguous_partition
from elastic_ckpt.plan import Plan
from elastic_ckpt.states.schema import StateSchema


class Zero12Adapter(FlatOptimizer):
    """Adapter of a ZeRO-1/2 optimizer: one flat partition for each param group."""

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        self._optimizer = engine.optimizer
        super().__init__(
            module=engine.module,
            param_names=engine.param_names,
            base=engine.optimizer.optimizer,
            schema=schema,
            masters=engine.optimizer.single_partition_of_fp32_groups,
            groups=range(len(engine.optimizer.single_partition_of_fp32_groups)),
        )
        self._zero_stage = engine.zero_optimization_stage()

    def destinations(self) -> Destinations:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        optimizer = self._optimizer
        flats, fragments, groups = [], [], []
        for index, (params, offsets) in enumerate(
            zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        ):
            names = tuple(self.param_names[param] for param in params)
            numels = [param.numel() for param in params]
            rank = dist.get_rank(group=optimizer.real_dp_process_group[index])
            master = self.masters[index]
            dtype = str(master.dtype).removeprefix("torch.")
            flats.append(FlatPartition(index, index, master.numel(), dtype, names))
            fragments += [
                Fragment(names[p.index], tuple(params[p.index].shape), p.range, index, p.flat_offset)
                for p in contiguous_partition(numels, offsets, optimizer.partition_size[index], rank)
            ]
            groups.append(LiveGroup(names, self.group_hyperparameters(index)))
        return Destinations(
            zero_stage=self._zero_stage,
            dp=dist.get_world_size(group=optimizer.dp_process_group),
            dp_rank=dist.get_rank(group=optimizer.dp_process_group),
            optimizer=self.schema.optimizer,
            state_keys=self.schema.elementwise,
            scalar_keys=self.schema.scalars,
            flats=tuple(flats),
            fragments=tuple(fragments),
            wholes=tuple(self.whole_buffers() + self._whole_frozen()),
            groups=tuple(groups),
            ties=self.ties(),
        )

    def _frozen(self) -> Mapping[str, torch.Tensor]:
        owned = {id(param) for params in self._optimizer.round_robin_bit16_groups for param in params}
        return {name: param.data for param, name in self.param_names.items() if id(param) not in owned}

    def _whole_frozen(self) -> list[WholeTensor]:
        return [
            WholeTensor(
                name,
                FROZEN,
                tuple(data.shape),
                FlatRange(0, math.prod(data.shape)),
                str(data.dtype).removeprefix("torch."),
            )
            for name, data in self._frozen().items()
        ]

    def prepare(self, plan: Plan) -> list[torch.Tensor]:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        return self.memory(plan, self._frozen())

    def refresh_weights(self, plan: Plan, exact_masters: bool) -> None:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        optimizer = self._optimizer
        optimizer.update_lp_params()
        if not exact_masters:
            optimizer._restore_from_bit16_weights()
        if plan.restores_states:
            # DeepSpeed links each parameter to its slice of the states once, and only finds states that are there
            # at that time; the ones just made must be linked anew, or its public getters miss them.
            optimizer._hp_optimizer_states_linked = False
            if all(self.base.state.get(master) for master in self.masters):
                optimizer._lazy_init_hp_params_optimizer_state()

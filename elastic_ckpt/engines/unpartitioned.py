"""Live engines without ZeRO partitions (stage 0): every data-parallel rank holds everything.

Private attributes used, all of DeepSpeed 0.19: ``fp16_groups``, ``fp32_groups`` (``FP16_UnfusedOptimizer``),
``fp32_groups_flat`` (``FP16_Optimizer``), ``refresh_fp32_params``, and the engine's ``seq_data_parallel_group``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_ckpt.core.flat_ranges import FlatRange, group_offsets
from elastic_ckpt.core.local_state import FlatPartition, Fragment, LocalState
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.engines.base import FlatOptimizer, ReadPart, base_optimizer
from elastic_ckpt.engines.state_schema import StateSchema

Params = Sequence[Sequence[torch.nn.Parameter]]


class PlainAdapter(FlatOptimizer):
    """Adapter of a plain fp32 optimizer: it steps on the parameters themselves, one by one."""

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        self._optimizer = engine.optimizer
        base = base_optimizer(engine)
        masters = self._masters(base)
        super().__init__(
            module=engine.module,
            param_names=engine.param_names,
            base=base,
            schema=schema,
            masters=[master for group in masters for master in group],
            groups=[number for number, group in enumerate(masters) for _ in group],
            dp_group=engine.seq_data_parallel_group,
        )

    def _masters(self, base: torch.optim.Optimizer) -> Sequence[Sequence[torch.Tensor]]:
        """Per group, the fp32 tensors that the optimizer steps on."""
        return [[param for param in group["params"] if param.requires_grad] for group in base.param_groups]

    def _params(self) -> Params:
        """Per group, the parameters of the model that belong to them."""
        return self._masters(self.base)  # type: ignore[return-value]

    def _numbered_params(self) -> Params:
        return [group["params"] for group in self.base.param_groups]

    def _members(self) -> list[list[torch.nn.Parameter]]:
        """Per master, its parameters in flat order."""
        return [[param] for group in self._params() for param in group]

    def local_state(self) -> LocalState:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        flats, fragments = [], []
        for index, params in enumerate(self._members()):
            names = self.names_of(params)
            master = self.masters[index]
            together = self.can_send(master)
            flats.append(
                FlatPartition(index, self.groups[index], master.numel(), self.dtype_of(master), names, together)
            )
            offsets = group_offsets([param.numel() for param in params])
            fragments += [
                Fragment(name, tuple(param.shape), FlatRange(0, param.numel()), index, offset)
                for name, param, offset in zip(names, params, offsets, strict=True)
            ]
        group_names = [self.names_of(params) for params in self._numbered_params()]
        return self.describe(0, flats, fragments, self.whole_frozen(self._frozen()), group_names)

    def _frozen(self) -> Mapping[str, torch.Tensor]:
        owned = {id(param) for params in self._params() for param in params}
        return {name: param.data for param, name in self.param_names.items() if id(param) not in owned}

    def fill(self, plan: ReadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        return self.fill_at_once(plan, read, self._frozen())

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
        """Nothing to do: the masters are the weights. Local."""


class UnfusedAdapter(PlainAdapter):
    """Adapter of ``FP16_UnfusedOptimizer`` (fp16 and bf16): an fp32 master for each parameter."""

    def _masters(self, base: torch.optim.Optimizer) -> Sequence[Sequence[torch.Tensor]]:
        return self._optimizer.fp32_groups

    def _params(self) -> Params:
        return self._optimizer.fp16_groups

    def _numbered_params(self) -> Params:
        return self._optimizer.fp16_groups

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`. Local.

        As the end of ``FP16_UnfusedOptimizer.step`` and of ``FP16_Optimizer.step`` does it.
        """
        for master, params in zip(self.masters, self._members(), strict=True):
            position = 0
            for param in params:
                values = master.data.reshape(-1)[position : position + param.numel()]
                param.data.copy_(values.view(param.shape))
                position += param.numel()
        if not exact_masters:
            self._optimizer.refresh_fp32_params()


class FusedAdapter(UnfusedAdapter):
    """Adapter of ``FP16_Optimizer`` (fp16 and bf16, with FusedAdam): a flat fp32 master for each param group."""

    def _masters(self, base: torch.optim.Optimizer) -> Sequence[Sequence[torch.Tensor]]:
        return [[master] for master in self._optimizer.fp32_groups_flat]

    def _members(self) -> list[list[torch.nn.Parameter]]:
        return [list(group) for group in self._optimizer.fp16_groups]

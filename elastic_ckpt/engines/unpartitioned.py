"""Live engines without ZeRO partitions (stage 0, or no optimizer): every data-parallel rank holds everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from elastic_ckpt.core.chunks import group_rules, placements
from elastic_ckpt.core.flat_ranges import Placement, group_offsets
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.engines.adapter import EngineAdapter, Params
from elastic_ckpt.engines.compat import base_optimizer, has_optimizer
from elastic_ckpt.engines.optimizers import StateSchema


class UnpartitionedAdapter(EngineAdapter):
    """Adapter of an optimizer at stage 0, or of an engine below ZeRO-3 without one.

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

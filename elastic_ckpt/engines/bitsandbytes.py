"""The states that a bitsandbytes optimizer keeps for a flat partition, as bitsandbytes itself decides.

A shallow copy of the live optimizer makes the state of a tensor of the right size on device ``meta``, so that its
class, version, ``min_8bit_size`` and overrides decide; none of its rules is copied here.

Attributes of ``bitsandbytes.optim.optimizer.Optimizer8bit`` used: ``init_state``, ``name2qmap``, ``is_paged``,
``initialized``, ``check_overrides``, ``get_config``, ``mng`` (``pid2config``, ``module_weight_config_triple``),
``optimizer_name``.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_ckpt.core.read_plan import Slot
from elastic_ckpt.core.state_kinds import (
    COMPANIONS,
    REPLICATED,
    SCRATCH,
    BlockFormat,
    Codebook,
    LiveState,
    block_numel_of,
    codebook,
)
from elastic_ckpt.engines.optimizers import OptimizerParam, StateSchema, dtype_name
from elastic_ckpt.errors import UnsupportedError


def is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes', which is not imported."""
    module = sys.modules.get("bitsandbytes.optim.optimizer")
    return module is not None and isinstance(optimizer, module.Optimizer8bit)


class BitsAndBytesSchema(StateSchema):
    """States of a live bitsandbytes optimizer. All its Adam and AdamW classes decouple weight decay."""

    def __init__(self, base: Any) -> None:
        super().__init__(base, family="adam" if getattr(base, "optimizer_name", None) == "adam" else None)
        self.decoupled = True
        self._codebooks: dict[str, Codebook] = {}

    def states(self, param: OptimizerParam) -> tuple[LiveState, ...] | None:
        master = param.master
        shape = (param.numel,) if master.dim() == 1 else tuple(master.shape)
        made = self._probe(torch.empty(shape, device="meta", dtype=master.dtype), param)
        quantized = {key for key in COMPANIONS if key in made and made[key].dtype == torch.uint8}
        if quantized and not master.is_contiguous():
            problem = "8-bit states of a parameter that is not contiguous have another order than its elements"
            found, remedy = f"shape {tuple(master.shape)}, strides {master.stride()}", "ZeRO stage 1, 2 or 3"
            raise UnsupportedError(problem, expected="a contiguous parameter", found=found, remedy=remedy)
        companions = {name for key in quantized for name in COMPANIONS[key]}
        return tuple(
            self._live_state(key, made, param, key in quantized)
            for key, value in made.items()
            if isinstance(value, torch.Tensor) and key not in companions
        )

    def scalars(self, param: OptimizerParam) -> tuple[str, ...] | None:
        return ("step",)

    def set_scalars(self, param: OptimizerParam, values: Mapping[str, Any]) -> None:
        self._base.state[param.master]["step"] = int(values["step"])

    def _live_state(self, key: str, made: dict[str, Any], param: OptimizerParam, quantized: bool) -> LiveState:
        value, dtype = made[key], dtype_name(made[key])
        if key not in COMPANIONS:
            layout = SCRATCH if key == "unorm_vec" else REPLICATED  # each step writes it before it reads it
            return LiveState(key, dtype, layout, shape=tuple(value.shape))
        rows = value.numel() // max(param.numel, 1) or 1
        if not quantized:
            return LiveState(key, dtype, rows=rows)
        scales, qmap = COMPANIONS[key]
        block_numel = block_numel_of(param.numel, made[scales].numel() // rows)
        assert block_numel is not None, f"{made[scales].numel()} scales of {param.numel} elements"
        if qmap not in self._codebooks:
            probe = self._probe_optimizer(param)
            least = probe.get_config(param.group, param.position, probe.param_groups[param.group])["min_8bit_size"]
            tables = self._probe(torch.zeros(max(1, min(least, param.numel))), param)
            self._codebooks |= {
                name: codebook(table.float().cpu().tolist()) for name, table in tables.items() if name[:4] == "qmap"
            }
        return LiveState(key, dtype, rows=rows, blocks=BlockFormat(block_numel, scales, self._codebooks[qmap]))

    def _probe(self, tensor: torch.Tensor, param: OptimizerParam) -> dict[str, Any]:
        probe = self._probe_optimizer(param)
        probe.init_state(probe.param_groups[param.group], tensor, param.group, param.position)
        return probe.state[tensor]

    def _probe_optimizer(self, param: OptimizerParam) -> Any:
        """A shallow copy of the live optimizer with a state of its own."""
        probe = object.__new__(type(self._base))
        probe.__dict__.update(self._base.__dict__)  # copy.copy would leave out what torch does not pickle
        probe.state, probe.name2qmap, probe.is_paged = defaultdict(dict), {}, False
        probe.param_groups = [dict(group) for group in self._base.param_groups]
        # get_config looks up overrides by them
        probe.param_groups[param.group]["params"] = [param.master] * (param.position + 1)
        probe.mng = copy.copy(self._base.mng)
        probe.mng.pid2config = dict(self._base.mng.pid2config)
        for module, name, override in self._base.mng.module_weight_config_triple:
            if getattr(module, name) is param.master:  # bitsandbytes applies these in the first step
                probe.mng.pid2config[id(param.master)] = override
        return probe

    def allocate(self, param: OptimizerParam, slots: Sequence[Slot]) -> None:
        """Has bitsandbytes make the tensors, which shares its codebooks."""
        state, group = self._base.state[param.master], self._base.param_groups[param.group]
        live = [(state.get(slot.key), slot) for slot in slots]
        if all(isinstance(it, torch.Tensor) and (it.numel(), dtype_name(it)) == (s.numel, s.dtype) for it, s in live):
            return
        state.clear()
        if not self._base.initialized:
            self._base.check_overrides()
        params = group["params"]
        group["params"] = [param.master] * (param.position + 1)  # empty between two steps of ZeRO-3
        try:
            self._base.init_state(group, param.master, param.group, param.position)
        finally:
            group["params"] = params

"""The states that a bitsandbytes optimizer keeps for a flat partition, as bitsandbytes itself decides.

A shallow copy of the live optimizer makes the state of a tensor of the right size on device ``meta``, so that its
class, version, ``min_8bit_size`` and overrides decide; none of its rules is copied here.

Attributes of ``bitsandbytes.optim.optimizer.Optimizer8bit`` used: ``init_state``, ``fill_qmap``, ``name2qmap``,
``is_paged``, ``initialized``, ``check_overrides``, ``get_config``, ``mng`` (``pid2config``,
``module_weight_config_triple``), ``optimizer_name``, and ``bitsandbytes.functional.create_dynamic_map``.
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
from elastic_ckpt.engines.optimizers import StateSchema, Stepped, dtype_name
from elastic_ckpt.errors import UnsupportedError

#: Tensors that each step writes before it reads them.
_SCRATCH = frozenset({"unorm_vec"})


def is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes', which is not imported."""
    module = sys.modules.get("bitsandbytes.optim.optimizer")
    return module is not None and isinstance(optimizer, module.Optimizer8bit)


class BitsAndBytesSchema(StateSchema):
    """States of a live bitsandbytes optimizer."""

    #: All its Adam and AdamW classes decouple weight decay.
    decoupled: bool | None = True

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self._codebooks: dict[str, Codebook] = {}
        self.family = "adam" if getattr(base, "optimizer_name", None) == "adam" else None

    def states(self, stepped: Stepped) -> tuple[LiveState, ...] | None:
        shape = (stepped.numel,) if stepped.master.dim() == 1 else tuple(stepped.master.shape)
        made = self._probe(torch.empty(shape, device="meta", dtype=stepped.master.dtype), stepped)
        quantized = {key for key in COMPANIONS if key in made and made[key].dtype == torch.uint8}
        if quantized and not stepped.master.is_contiguous():
            raise UnsupportedError(
                "bitsandbytes orders the 8-bit states of this parameter otherwise than its elements",
                expected="a contiguous parameter",
                found=f"shape {tuple(stepped.master.shape)}, strides {stepped.master.stride()}",
                remedy="store the parameter contiguously, or use ZeRO stage 1, 2 or 3",
            )
        companions = {name for key in quantized for name in COMPANIONS[key]}
        return tuple(
            self._describe(key, value, made, stepped, key in quantized)
            for key, value in made.items()
            if isinstance(value, torch.Tensor) and key not in companions
        )

    def scalars(self, stepped: Stepped) -> tuple[str, ...] | None:
        return ("step",)

    def _describe(
        self, key: str, value: torch.Tensor, made: Mapping[str, torch.Tensor], stepped: Stepped, quantized: bool
    ) -> LiveState:
        dtype = dtype_name(value)
        if key not in COMPANIONS:
            return LiveState(key, dtype, SCRATCH if key in _SCRATCH else REPLICATED, shape=tuple(value.shape))
        rows = value.numel() // max(stepped.numel, 1) or 1
        if not quantized:
            return LiveState(key, dtype, rows=rows)
        scales, qmap = COMPANIONS[key]
        block_numel = block_numel_of(stepped.numel, made[scales].numel() // rows)
        assert block_numel is not None, f"{made[scales].numel()} scales of {stepped.numel} elements"
        return LiveState(key, dtype, rows=rows, blocks=BlockFormat(block_numel, scales, self._codebook(qmap, stepped)))

    def _codebook(self, qmap: str, stepped: Stepped) -> Codebook:
        if qmap not in self._codebooks:
            probe = self._probe_optimizer(stepped)
            group = probe.param_groups[stepped.group]
            least = probe.get_config(stepped.group, stepped.position, group)["min_8bit_size"]
            made = self._probe(torch.zeros(max(1, min(least, stepped.numel))), stepped)
            self._codebooks |= {
                key: codebook(value.float().cpu().tolist()) for key, value in made.items() if key.startswith("qmap")
            }
        return self._codebooks[qmap]

    def _probe(self, tensor: torch.Tensor, stepped: Stepped) -> dict[str, Any]:
        probe = self._probe_optimizer(stepped)
        probe.init_state(probe.param_groups[stepped.group], tensor, stepped.group, stepped.position)
        return probe.state[tensor]

    def _probe_optimizer(self, stepped: Stepped) -> Any:
        """A shallow copy of the live optimizer with a state of its own."""
        probe = object.__new__(type(self._base))
        probe.__dict__.update(self._base.__dict__)  # copy.copy would leave out what torch does not pickle
        probe.state, probe.name2qmap, probe.is_paged = defaultdict(dict), {}, False
        probe.param_groups = [dict(group) for group in self._base.param_groups]
        params = [stepped.master] * (stepped.position + 1)
        probe.param_groups[stepped.group]["params"] = params  # get_config looks up overrides by them
        probe.mng = copy.copy(self._base.mng)
        probe.mng.pid2config = dict(self._base.mng.pid2config)
        for module, name, override in self._base.mng.module_weight_config_triple:
            if getattr(module, name) is stepped.master:  # bitsandbytes applies these in the first step
                probe.mng.pid2config[id(stepped.master)] = override
        return probe

    def allocate(self, stepped: Stepped, slots: Sequence[Slot]) -> None:
        """Has bitsandbytes make the tensors, which shares its codebooks."""
        state = self._base.state[stepped.master]
        live = [(state.get(slot.key), slot) for slot in slots]
        if all(isinstance(it, torch.Tensor) and (it.numel(), dtype_name(it)) == (s.numel, s.dtype) for it, s in live):
            return
        state.clear()
        if not self._base.initialized:
            self._base.check_overrides()
        group = self._base.param_groups[stepped.group]
        params = group["params"]
        group["params"] = [stepped.master] * (stepped.position + 1)  # empty between two steps of ZeRO-3
        try:
            self._base.init_state(group, stepped.master, stepped.group, stepped.position)
        finally:
            group["params"] = params

    def set_scalars(self, stepped: Stepped, values: Mapping[str, Any]) -> None:
        self._base.state[stepped.master]["step"] = int(values["step"])

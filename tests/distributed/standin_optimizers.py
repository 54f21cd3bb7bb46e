"""Optimizers as packages have or had them that are not installed here."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit


class QuantizedAdamW(torch.optim.AdamW):
    """Has the class name of one of torchao's, by which alone elastic_ckpt knows these."""


QuantizedAdamW.__module__ = "torchao.optim.adam"


class ClippedAdamW8bit(AdamW8bit):
    """Keeps the last norms of each tensor's gradients, as bitsandbytes did with ``percentile_clipping``."""

    norms = 100

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        self.state[p]["gnorm_vec"] = torch.zeros(self.norms)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        state = self.state[p]
        state["gnorm_vec"][state["step"] % self.norms] = p.grad.square().sum()
        super().update_step(group, p, gindex, pindex)


class BrieflyClippedAdamW8bit(ClippedAdamW8bit):
    """Keeps fewer."""

    norms = 50

"""Writing into live tensors of any shape, strides and device by row-major position."""

from __future__ import annotations

import torch


def write_flat(target: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    """Write 1-D ``values`` into ``target`` from its element ``offset`` on, in row-major order."""
    if target.is_contiguous():
        target.view(-1)[offset : offset + values.numel()].copy_(values)
        return
    positions = torch.arange(offset, offset + values.numel())
    target[torch.unravel_index(positions, target.shape)] = values.to(target.dtype).to(target.device)

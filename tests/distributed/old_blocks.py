"""Rewrites the 8-bit states of ZeRO-1/2 files: as older bitsandbytes wrote them, or damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

NESTED = "__bnb_optimizer_quant_state__"
OLD_BLOCK = 2048


def _rewrite(folder: Path, change: Callable[[dict[str, Any], int], None]) -> None:
    """Apply ``change(state of a flat partition, rank)`` to every optimizer file of a checkpoint."""
    for path in sorted(folder.glob("*/*_optim_states.pt")):
        tree = torch.load(path, weights_only=False)
        rank = int(path.name.split("zero_pp_rank_")[1].split("_")[0])
        for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            change(state, rank)
        torch.save(tree, path)


def to_flat_blocks_of_2048(folder: Path) -> None:
    """Before 0.49.2 states lay flat; before 0.44 a block had 2048 elements."""

    def change(state: dict[str, Any], rank: int) -> None:
        state.update(state.pop(NESTED))
        for number in (1, 2):
            if f"absmax{number}" in state:
                values = decode(state, number, 256)
                codes, scales = encode(values, state[f"qmap{number}"].numpy())
                state[f"state{number}"] = torch.from_numpy(codes)
                state[f"absmax{number}"] = torch.from_numpy(scales)

    _rewrite(folder, change)


def decode(state: dict[str, Any], number: int, block: int) -> np.ndarray:
    codes, scales, qmap = (state[f"{name}{number}"].numpy() for name in ("state", "absmax", "qmap"))
    return qmap[codes] * np.repeat(scales, block)[: codes.size]


def encode(values: np.ndarray, qmap: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value to the nearest code; blocks as bitsandbytes 0.43 had them."""
    scales = np.array(
        [np.abs(values[start : start + OLD_BLOCK]).max() for start in range(0, values.size, OLD_BLOCK)], np.float32
    )
    codes = np.empty(values.size, np.uint8)
    for block, scale in enumerate(scales):
        part = slice(block * OLD_BLOCK, (block + 1) * OLD_BLOCK)
        distance = np.abs(values[part, None] / (scale or 1.0) - qmap[None, :])
        codes[part] = distance.argmin(axis=1)
    return codes, scales


def flip_map(folder: Path) -> None:
    """One value of one rank's map is another one."""

    def change(state: dict[str, Any], rank: int) -> None:
        held = state[NESTED]
        if rank == 1 and "qmap1" in held:
            held["qmap1"] = held["qmap1"].clone()
            held["qmap1"][200] = 0.0

    _rewrite(folder, change)


def lose_map(folder: Path) -> None:
    """No file has the second map any more."""
    _rewrite(folder, lambda state, rank: state[NESTED].pop("qmap2", None))


def lose_scales(folder: Path) -> None:
    """The scales of one rank are too few."""

    def change(state: dict[str, Any], rank: int) -> None:
        held = state[NESTED]
        if rank == 1 and "absmax1" in held:
            held["absmax1"] = held["absmax1"][:-3].clone()

    _rewrite(folder, change)

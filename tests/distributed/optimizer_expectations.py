"""Engines with 8-bit optimizers, and what is expected of loads by :func:`tests.distributed.optimizer_jobs.load`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.distributed.model import Setup

SUB_GROUPS = (("sub_group_size", 5000),)
#: By which losses may differ after states were requantized.
LOOSE = 2e-2
#: Half the widest gap of bitsandbytes' maps: what requantizing may change, as a part of a block's largest value.
BOUNDS = {"state1": 0.9 / 128, "state2": 0.9 / 256}


def bnb(name: str, stage: int, **more: Any) -> Setup:
    """An engine with an optimizer of bitsandbytes; its partitions are cut into sub-groups in ZeRO-3."""
    return Setup(stage, optimizer=f"bnb.{name}", zero=SUB_GROUPS if stage == 3 else (), **more)


def configured(setup: Setup, **options: Any) -> Setup:
    """The same engine with options of elastic_ckpt."""
    return replace(setup, config=(("elastic_checkpoint", options),))


@dataclass(frozen=True)
class Exact:
    """Everything comes back bit by bit: no block is requantized.

    Attributes:
        loss_gap: by how much a loss of the run that goes on may differ.
    """

    loss_gap: float = 1e-5

    def check(self, facts: Sequence[Any]) -> None:
        """Hold against what the ranks found."""
        for found in facts:
            assert found.differences == {} and found.states == {}, found.where
            assert (found.requantized, found.reported_drift) == (0, 0.0), found.where
            assert found.loss_gap <= self.loss_gap, (found.where, found.loss_gap)


@dataclass(frozen=True)
class Requantized:
    """All but states comes back bit by bit, they within their bounds; the report says how many, and how far off.

    Attributes:
        loss_gap: by how much a loss of the run that goes on may differ.
    """

    loss_gap: float = LOOSE

    def check(self, facts: Sequence[Any]) -> None:
        """Hold against what the ranks found."""
        for found in facts:
            assert found.differences == {}, found.where
            assert all(drift <= BOUNDS.get(key, 0.0) * (1 + 1e-5) for key, drift in found.drift.items()), found
            assert found.requantized > 0 and found.reported_drift > 0.0, found.where
            assert found.reported_drift >= max(found.drift.values()) - 1e-6, found.where
            assert f"{found.requantized} of {found.blocks} requantized" in found.text
            assert found.loss_gap <= self.loss_gap, (found.where, found.loss_gap)

"""DeepSpeed's Muon in each class of optimizer that DeepSpeed wraps it in, and with each auxiliary Adam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.conftest import Launch
from tests.distributed.model import Setup

IN_BF16_OPTIMIZER = Setup(1, "bf16_fp32acc", optimizer="muon")
SCATTERED = (("reduce_scatter", False),)
#: ZeRO-2 keeps momenta of whole parameters, the others as much as the partition; with ``torch_adam``, the auxiliary
#: optimizer counts its steps in tensors.
EVERY = [
    IN_BF16_OPTIMIZER,
    Setup(2, "bf16", optimizer="muon"),
    Setup(1, optimizer="muon_torch_adam"),
    Setup(3, optimizer="muon_torch_adam", zero=SCATTERED),
    Setup(1, "bf16_fp32acc", optimizer="muon_torch_adam"),
]


def test_muon_goes_on_as_if_it_had_not_been_interrupted(launch: Launch, tmp_path: Path) -> None:
    """Masters and states bit by bit; the next losses, too, at the degree of the save, where sums are the same."""
    launch(2, "optimizer_jobs.save", {"folder": str(tmp_path), "setups": EVERY}, timeout=590)

    def source(target: Setup, saved: Setup, degree: int) -> dict[str, Any]:
        by_rounding = 1e-4 if (saved.precision, target.precision) == ("fp32", "fp32") else 5e-3
        loss = 0.0 if degree == 2 and saved == target else by_rounding if saved.precision == target.precision else 0.5
        return {"folder": str(tmp_path / f"{saved.name}-dp2"), "loss": loss}

    for degree in (2, 3):
        sources = EVERY if degree == 3 else []
        targets = [
            {"setup": target, "sources": [source(target, saved, degree) for saved in sources or [target]]}
            for target in EVERY
        ]
        for found in launch(degree, "optimizer_jobs.load", targets, timeout=500):
            assert found.differences == {} and found.states == {}, found.where
            assert found.loss_gap <= found.case["loss"], (found.where, found.loss_gap)

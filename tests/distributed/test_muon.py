"""DeepSpeed's Muon in each class of optimizer that DeepSpeed wraps it in, and with each auxiliary Adam."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.model import Setup
from tests.distributed.optimizer_expectations import Exact

SCATTERED = (("reduce_scatter", False),)
#: Momenta in ZeRO-3's own buffers, which DeepSpeed's own loader does not fill.
IN_MEMORY = (*SCATTERED, ("save_muon_momentum_buffer_in_memory", True))
#: ZeRO-2 keeps momenta of whole parameters, the others as much as the partition; with ``torch_adam``, the auxiliary
#: optimizer counts its steps in tensors.
EVERY = [
    Setup(1, "bf16_fp32acc", optimizer="muon"),
    Setup(2, "bf16", optimizer="muon"),
    Setup(1, optimizer="muon_torch_adam"),
    Setup(3, optimizer="muon_torch_adam", zero=SCATTERED),
    Setup(3, optimizer="muon_torch_adam", zero=IN_MEMORY),
    Setup(1, "bf16_fp32acc", optimizer="muon_torch_adam"),
]


def rounding(source: Setup, target: Setup) -> float:
    """By which losses differ where ranks add gradients up in another order."""
    if source.precision != target.precision:
        return 0.5
    return 1e-4 if source.precision == "fp32" else 5e-3


def resumed(source: Setup, target: Setup, ranks: int, loss_gap: float) -> Cell:
    """A load of what two ranks have saved."""
    save = Save(source, 2, "optimizer_jobs.save")
    return crossing(save, target, ranks, "optimizer_jobs.load", Exact(loss_gap), trained=source != target)


@cells(
    [resumed(setup, setup, 2, 0.0) for setup in EVERY]
    + [resumed(source, target, 3, rounding(source, target)) for target in EVERY for source in EVERY]
)
def test_muon_goes_on_as_if_it_had_not_been_interrupted(cell: Cell, facts: list[Any]) -> None:
    """Masters and states bit by bit; the next losses, too, at the degree of the save, where sums are the same."""
    cell.expected.check(facts)

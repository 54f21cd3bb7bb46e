"""Models whose modules are wrapped in one run and not in the other, or otherwise."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

from tests.distributed import model as models
from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import Loaded, Resumes
from tests.distributed.model import Setup

Z0, Z1, Z2, Z3 = (Setup(stage, groups="one") for stage in range(4))
BF16_2, BF16_3 = (Setup(stage, "bf16", groups="one") for stage in (2, 3))
KINDS = ("TinyLM", "CheckpointedLM", "CompiledLM", "HeldLM")
#: Saved and live kind, where something is wrapped.
PAIRS = [pair for pair in product(KINDS, KINDS) if pair != ("TinyLM", "TinyLM")]
SAYS = "wrapped otherwise"


def names_of(kind: str) -> list[str]:
    """Names of parameters and buffers, in an order that wrappers do not change."""
    model = models.BUILDERS[kind](0)
    named = chain(model.named_parameters(), model.named_buffers())
    return [name for name, _ in named]


NAMES = {kind: names_of(kind) for kind in KINDS}


def wrapped(save: Save, target: Setup, live: str, ranks: int = 3) -> Cell:
    saved = save.more["model"]
    differ = "HeldLM" in (saved, live) or "CompiledLM" in (saved, live)
    says = (SAYS,) if saved != live and differ else ()
    names = dict(zip(NAMES[saved], NAMES[live], strict=True))
    facts = {"model": live, "names": names, "continue": save.setup.precision == "fp32"}
    return crossing(save, target, ranks, "changed", Resumes(save.format, 1e-5, says), f"{saved} to {live}", **facts)


@cells(
    [
        wrapped(Save(source, more={"model": saved}), target, live)
        for saved, live in PAIRS
        for source, target in ((Z1, Z2), (BF16_2, BF16_3), (Z3, Z0), (Z0, Z1))
    ]
    + [
        wrapped(Save(source, more={"model": saved}, converted=True), target, live)
        for saved, live in (("CheckpointedLM", "TinyLM"), ("TinyLM", "CheckpointedLM"), ("HeldLM", "CheckpointedLM"))
        for source, target in ((Z1, Z3), (Z3, Z2))
    ]
)
def test_weights_and_states_come_back_whatever_wraps_the_modules(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@cells(
    [
        Cell(
            f"{saved} to {live}", Save(Z1, more={"model": saved}), "wrapper_jobs.go_on", 1, {"setup": Z1, "live": live}
        )
        for saved, live in (("TinyLM", "CompiledLM"), ("CompiledLM", "HeldLM"), ("HeldLM", "TinyLM"))
    ]
)
def test_diff_and_load_pretrained_know_wrappers_as_a_load_does(cell: Cell, facts: list[Any]) -> None:
    (each,) = facts
    assert each.differences == ()
    assert each.equal > len(NAMES["TinyLM"])
    assert [note for note in each.notes if SAYS in note]
    assert (each.apart, each.keys) == ([], ((), ()))

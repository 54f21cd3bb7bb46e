"""DualPipeV, of which pipeline rank ``r`` of ``P`` has the stages ``r`` and ``2 * P - 1 - r``: to and from any pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import deepspeed
import pytest

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.parallel_models import Parallel

pytestmark = pytest.mark.skipif(not hasattr(deepspeed, "DualPipeVModule"), reason="DeepSpeed has it since 0.19.8")


#: By which losses of runs that go on may differ, where gradients are summed in another order.
ROUNDING = 1e-5


def dual(stage: int, pp: int = 2) -> Parallel:
    return Parallel("dualpipev", "uniform", pp=pp, stage=stage)


def plain(stage: int, pp: int = 2) -> Parallel:
    return Parallel("pipeline", "uniform", pp=pp, stage=stage)


def each(saved: Sequence[tuple[int, Parallel]], *targets: tuple[int, Parallel]) -> list[Cell]:
    """What so many ranks have saved, into each of these engines on as many ranks."""
    found = []
    for ranks, target in targets:
        for of, setup in saved:
            save, name = Save(setup, of, "parallel_jobs.save_each"), f"{setup.name}-n{of} to {target.name}-n{ranks}"
            expected = Resumes("native", ROUNDING)
            found.append(Cell(name, save, "parallel_jobs.resume", ranks, {"setup": target}, expected=expected))
    return found


CELLS = [
    *each(
        [(2, dual(1))],
        (2, dual(1)),
        (4, dual(1)),
        (2, dual(0)),
        (2, plain(1)),
        (1, plain(1, pp=1)),
        (4, plain(1, pp=4)),
    ),
    # the states of each rank are numbered, of layers that only one division of either kind fits
    *each([(2, dual(0))], (2, dual(0)), (2, dual(1)), (2, plain(0)), (1, plain(1, pp=1))),
    *each([(2, plain(1)), (2, plain(0)), (1, plain(0, pp=1))], (2, dual(0)), (2, dual(1))),
]


@cells(CELLS)
def test_it_resumes_bit_exactly_at_any_stages_of_either_class(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@cells(
    [
        Cell(f"{saved_by} to {live}", Save(saved_by, job="dualpipev_jobs.save"), "dualpipev_jobs.refuse", 2, {"setup": live})
        for saved_by in ("plain", "dual")
        for live in ("plain", "dual")
    ]
)  # fmt: skip
def test_states_of_equal_layers_may_be_those_of_either_class(
    cell: Cell, facts: list[tuple[Refused, dict[str, str]]]
) -> None:
    """By position, those of one layer would become another's. Weights are named, and load."""
    for refused, wrong in facts:
        Refuses("MismatchError", ("DualPipeVModule", "load_module_only=True")).check([refused])
        assert wrong == {}


def even(precision: str, pp: int = 2, kind: str = "even") -> Parallel:
    """Four equal layers without ZeRO, which either class may have divided."""
    return Parallel(kind, "parameters", pp=pp, precision=precision)


def even_dual(precision: str) -> Parallel:
    return even(precision, kind="even_dualpipev")


#: By which losses may differ where other ranks add up gradients in 16 bits.
ROUNDING_OF_16_BITS = 3e-2


@cells(
    [
        Cell(
            f"{source.name} to {target.name}-n{ranks}",
            Save(source, job="parallel_jobs.save_each"),
            "parallel_jobs.resume",
            ranks,
            {"setup": target},
            expected=Resumes("native", ROUNDING_OF_16_BITS),
        )
        for source, targets in (
            # slices of flat masters have names
            (even("bf16"), [(2, even("bf16")), (2, even("bf16", pp=1)), (4, even("bf16")), (2, even_dual("bf16"))]),
            (even_dual("bf16"), [(2, even("bf16")), (2, even("bf16", pp=1)), (2, even_dual("bf16"))]),
            # masters are compared with the weights
            (even("fp16"), [(2, even("fp16")), (4, even("fp16"))]),
            (even_dual("fp16"), [(2, even_dual("fp16"))]),
        )
        for ranks, target in targets
    ]
)
def test_masters_tell_equal_layers_in_16_bits(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


OF_OTHERS = ("MismatchError", ("this parameter's are not those of its weights",))
NOT_KNOWN = ("UnsupportedError", ("which stage had which parameters is not known", "load_module_only=True"))


@cells(
    [
        Cell(
            f"{source.name} to {target.name}",
            Save(source, job="parallel_jobs.save_each"),
            "parallel_jobs.refuse",
            2,
            {"setup": target},
            expected=Refuses(error, words),
            fits=(Save(even_dual("bf16"), job="parallel_jobs.save_each"), {"setup": even("bf16")}),
        )
        for source, target, (error, words) in (
            (even("fp16"), even_dual("fp16"), OF_OTHERS),
            (even_dual("fp16"), even("fp16"), OF_OTHERS),
            (even("fp16"), even("fp16", pp=1), NOT_KNOWN),
            (even("fp32"), even("fp32", pp=1), NOT_KNOWN),
            (even_dual("fp32"), even("fp32", pp=1), NOT_KNOWN),
        )
    ]
)
def test_equal_layers_of_other_stages_or_of_the_other_class_are_refused(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)

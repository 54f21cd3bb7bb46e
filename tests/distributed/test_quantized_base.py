"""LoRA over a base that bitsandbytes has quantized: state dicts have entries that are neither parameters nor buffers."""

from __future__ import annotations

import pytest

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.model import Setup

pytest.importorskip("bitsandbytes", reason="quantizes the base")

MODEL = {"model": "QuantizedLoraLM"}
LEFT_OUT = {**MODEL, "exclude_frozen": True}
NOT_STRICT = {"load_module_strict": False}
SAYS = ("four.weight.absmax", "eight.SCB", "they describe quantized weights that were left out of the save")
# of the tied weight, DeepSpeed keeps the second name
FROZEN = ["back.weight", "gain", "hidden.bias", "hidden.weight", "never_used", "norm.bias"]
FRESH = [*FROZEN, "norm.weight", "four.weight", "eight.weight"]
STAGES = [Setup(stage) for stage in range(3)]


@cells(
    [
        crossing(
            Save(source, more=LEFT_OUT),
            target,
            ranks,
            "changed",
            Resumes(says=SAYS),
            fresh=FRESH,
            arguments=NOT_STRICT,
            **MODEL,
        )
        for source in STAGES
        for target, ranks in ((source, 2), (STAGES[(source.stage + 1) % 3], 3))
    ]
)
def test_adapters_come_back_over_the_models_own_quantized_base(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


#: Whose gradients are summed in another order where there are other ranks.
ROUNDING = 1e-4


@cells(
    [
        crossing(
            Save(source, more={"model": model}),
            target,
            ranks,
            "changed",
            Resumes(loss_gap=ROUNDING),
            note=model,
            model=model,
            trained=True,
            **{"continue": True},
        )
        for model in ("QuantizedLM", "DoublyQuantizedLM")
        for source in (*STAGES, Setup(3))
        for target, ranks in ((STAGES[source.stage % 3], 2), (STAGES[(source.stage + 1) % 3], 3))
    ]
)
def test_a_base_that_was_saved_comes_back_with_what_describes_it(cell: Cell, facts: list[Loaded]) -> None:
    """Over one of other values, whose scales the live model computes with; the same losses show it."""
    cell.expected.check(facts)
    for load in facts:
        restored = {name for each in load.report.outcomes if each.what == "restored" for name in each.names}
        assert {"four.weight", "four.weight.absmax", "eight.weight", "eight.SCB"} <= restored, load.text


def refused(source: Setup, target: Setup, saved: str, live: str, *words: str) -> Cell:
    """A saved base that is not the live one, and cannot become it."""
    fits = Save(source, more={"model": "DoublyQuantizedLM"}), {"setup": target, "model": "DoublyQuantizedLM"}
    return Cell(
        f"{saved}, {source.name} to {live}, {target.name}",
        Save(source, more={"model": saved}),
        "refusal_jobs.refuse",
        3,
        {"setup": target, "model": live},
        expected=Refuses("MismatchError", (*words, "quantize the base as the saved run did")),
        fits=fits,
    )


@cells(
    [
        # its offset is in the packed state, which each state dict has a copy of
        refused(
            STAGES[1],
            STAGES[2],
            "RandomDoublyQuantizedLM",
            "DoublyQuantizedLM",
            "four.weight.quant_state.bitsandbytes__nf4",
            "which a load cannot replace",
        ),
        refused(STAGES[2], STAGES[0], "QuantizedLM", "DoublyQuantizedLM", "four.weight.nested_absmax"),
        refused(STAGES[0], STAGES[1], "DoublyQuantizedLM", "QuantizedLM", "four.weight.nested_absmax"),
    ]
)
def test_a_base_that_was_quantized_otherwise_is_refused(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


ZERO3 = Setup(3)


@cells(
    [
        Cell(
            f"ZeRO-{source.stage} to ZeRO-{target.stage} on {ranks} ranks, {'strict' if strict else 'not strict'}",
            Save(source, more={"model": "QuantizedLM"}),
            "refusal_jobs.refuse",
            ranks,
            {"setup": target, "model": "QuantizedLM", "arguments": {"load_module_strict": strict}},
            expected=Refuses("MismatchError", ("four.weight.absmax", "eight.SCB", "exclude_frozen_parameters=True")),
            fits=(Save(ZERO3, more=LEFT_OUT), {"setup": ZERO3, **MODEL, "arguments": NOT_STRICT}),
        )
        for source, target, ranks in ((ZERO3, ZERO3, 2), (ZERO3, ZERO3, 3), (STAGES[1], ZERO3, 2))
        for strict in (True, False)
    ]
)
def test_a_saved_base_is_refused_by_name_under_zero3(cell: Cell, facts: list[Refused]) -> None:
    """Of which plain DeepSpeed says the same, by an error of torch's or of bitsandbytes'."""
    cell.expected.check(facts)


@cells(
    [
        crossing(
            Save(ZERO3, more=LEFT_OUT),
            target,
            ranks,
            "changed",
            Resumes(says=SAYS),
            fresh=[*FRESH, "embedding.weight"],
            arguments=NOT_STRICT,
            **MODEL,
        )
        for target, ranks in ((ZERO3, 2), (STAGES[2], 3))
    ]
)
def test_adapters_of_zero3_come_back_over_the_models_own_quantized_base(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)

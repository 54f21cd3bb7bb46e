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


WHOLE = Refuses("UnsupportedError", ("four.weight.absmax", "eight.SCB", "exclude_frozen_parameters=True"))


@cells(
    [
        Cell(
            f"{source.name} to {target.name}",
            Save(source, more=MODEL),
            "refusal_jobs.refuse",
            3,
            {"setup": target, "arguments": NOT_STRICT, **MODEL},
            expected=WHOLE,
            fits=(Save(source, more=LEFT_OUT), {"setup": target, "arguments": NOT_STRICT, **MODEL}),
        )
        for source, target in ((STAGES[1], STAGES[2]), (STAGES[2], STAGES[1]))
    ]
)
def test_a_base_that_was_saved_is_not_left_without_what_describes_it(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)

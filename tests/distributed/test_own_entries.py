"""LoRA over a base whose modules keep what describes their frozen weights in entries of their own, as HQQ's."""

from __future__ import annotations

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.model import Setup

PACKED = {"model": "PackedLM"}
LEFT_OUT = {**PACKED, "exclude_frozen": True}
NOT_STRICT = {"load_module_strict": False}
STAGES = [Setup(stage) for stage in range(3)]
#: Of the tied weight, DeepSpeed keeps the second name.
FRESH = ["back.weight", "gain", "hidden.bias", "hidden.weight", "never_used", "norm.bias", "norm.weight", "packed.W_q"]


@cells(
    [
        Cell(
            f"ZeRO-{source} to ZeRO-{target} on {ranks} ranks, {'strict' if strict else 'not strict'}",
            Save(STAGES[source], more=PACKED),
            "refusal_jobs.refuse",
            ranks,
            {"setup": STAGES[target], **PACKED, "arguments": {"load_module_strict": strict}},
            expected=Refuses("UnsupportedError", ("packed.scale", "exclude_frozen_parameters=True")),
            fits=(Save(STAGES[1], more=LEFT_OUT), {"setup": STAGES[1], **PACKED, "arguments": NOT_STRICT}),
        )
        for source, target, ranks in ((1, 2, 3), (0, 1, 2))
        for strict in (True, False)
    ]
)
def test_codes_never_come_back_without_what_they_mean(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@cells(
    [
        crossing(
            Save(STAGES[source], more=LEFT_OUT),
            STAGES[target],
            ranks,
            "changed",
            Resumes(says=("packed.scale", "they describe quantized weights that were left out of the save")),
            fresh=FRESH,
            arguments=NOT_STRICT,
            **PACKED,
        )
        for source, target, ranks in ((1, 1, 3), (2, 0, 2))
    ]
)
def test_adapters_come_back_over_the_models_own_base(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)

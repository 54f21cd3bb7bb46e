"""Masters in bf16 and fp16 (``bf16_master_weights_and_grads``): any degree and stage, and to and from fp32 masters."""

from __future__ import annotations

from dataclasses import replace

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.model import Setup

OFFLOAD = (("offload_optimizer", {"device": "cpu"}),)
BF16 = [Setup(stage, "bf16_masters") for stage in (1, 2, 3)]
MIXED = [Setup(stage, "bf16_masters_fp32_states", "cpuadam", OFFLOAD) for stage in (1, 3)]
FP16 = [Setup(stage, "fp16_masters", "cpuadam", OFFLOAD) for stage in (2, 3)]
WIDE = [Setup(1, "bf16"), Setup(3, "bf16")]
#: Losses of the run that goes on may differ by this: 8 bits of mantissa at a loss of 3.6.
RESUMES = Resumes(loss_gap=2e-2)
STRICT = (("elastic_checkpoint", {"on_change": "error"}),)


def loaded(source: Setup, target: Setup, ranks: int, masters: str, states: str) -> Cell:
    """A load, and the dtypes that the live engine has."""
    return crossing(Save(source), target, ranks, "low_precision_jobs.load", masters=masters, states=states)


def in_their_dtypes(ranks: int) -> list[Cell]:
    found = [loaded(a, b, ranks, "bfloat16", "bfloat16") for a in BF16 for b in (BF16[0], BF16[2])]
    found += [loaded(a, b, ranks, "bfloat16", "float32") for a in MIXED for b in MIXED]
    return found + [loaded(a, b, ranks, "float16", "float32") for a in FP16 for b in FP16]


@cells([cell for ranks in (1, 2, 3) for cell in in_their_dtypes(ranks)])
def test_masters_in_low_precision_come_back_bit_by_bit_at_any_degree_and_stage(cell: Cell, facts: list[Loaded]) -> None:
    RESUMES.check(facts)
    for load in facts:
        assert not any("rounded" in note for note in load.report.notes), load.where


def in_others(ranks: int) -> list[Cell]:
    found = [loaded(a, b, ranks, "float32", "float32") for a in BF16[::2] for b in WIDE]
    found += [loaded(a, b, ranks, "bfloat16", "bfloat16") for a in WIDE for b in BF16[::2]]
    return [*found, loaded(WIDE[0], MIXED[1], ranks, "bfloat16", "float32")]


@cells([cell for ranks in (1, 3) for cell in in_others(ranks)])
def test_bf16_masters_become_fp32_exactly_and_fp32_masters_bf16_by_rounding(cell: Cell, facts: list[Loaded]) -> None:
    RESUMES.check(facts)
    is_rounded = cell.case["masters"] == "bfloat16"
    for load in facts:
        assert any("rounded" in note for note in load.report.notes) == is_rounded, load.where


#: What was saved, the live engine, and the remedy.
REFUSED = {
    "the config says so": (WIDE[1], replace(BF16[2], config=STRICT), "on_change"),
    # whose range is smaller
    "fp32 masters do not become fp16": (WIDE[0], FP16[0], "resume with the dtype"),
}


@cells(
    [
        Cell(
            name,
            Save(source),
            "refusal_jobs.refuse",
            2,
            {"setup": target},
            expected=Refuses("MismatchError", ("lose precision", remedy)),
            fits=(Save(source), {"setup": source}),
        )
        for name, (source, target, remedy) in REFUSED.items()
    ]
)
def test_rounding_is_refused_where(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)

"""Tensor- and pipeline-parallel checkpoints on other topologies: every value by name, and training that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.jobs import SAVE_AT
from tests.distributed.model import GLOBAL_BATCH
from tests.distributed.parallel_models import NATIVE, Parallel

LLAMA, GPT = ("megatron", "llama"), ("megatron", "gpt")
PIPELINE, THREE = ("pipeline", "uniform"), ("3d", "uniform")
FUSED, UNEVEN = ("autotp", "fused"), ("autotp", "fused_uneven")
#: By which losses of runs that go on may differ: where gradients are summed in another order, in bf16, and where other
#: padding is another denominator of the softmax.
ROUNDING, BF16, OTHER_PADDING = 1e-5, 3e-2, 0.3
EXACT = Resumes("native", ROUNDING)


def saved(ranks: int, setup: Parallel, converted: bool = False, **more: Any) -> Save:
    return Save(setup, ranks, "parallel_jobs.save_each", more, converted)


def resumed(save: Save, ranks: int, target: Parallel, expected: Resumes = EXACT, **more: Any) -> Cell:
    """A checkpoint that goes on in this engine."""
    kind = " universal" * save.converted
    name = f"{save.setup.name}-n{save.ranks}{kind} to {target.name}-n{ranks}"
    return Cell(name, save, "parallel_jobs.resume", ranks, {"setup": target, **more}, expected=expected)


def each(saves: Sequence[Save], *targets: tuple[int, Parallel], expected: Resumes = EXACT) -> list[Cell]:
    """All of these checkpoints into each of these engines on as many ranks."""
    return [resumed(save, ranks, target, expected) for ranks, target in targets for save in saves]


LLAMAS = [
    saved(1, Parallel(*LLAMA, stage=1)),
    saved(2, Parallel(*LLAMA, tp=2, stage=3)),
    saved(4, Parallel(*LLAMA, tp=4, stage=1)),
]
GPTS = [saved(1, Parallel(*GPT, stage=0)), saved(4, Parallel(*GPT, tp=2, stage=3))]
TWO_STAGES = saved(2, Parallel("pipeline", "parameters", pp=2, stage=1))
THREE_DIMENSIONS = [
    saved(1, Parallel(*THREE, stage=1)),
    saved(4, Parallel(*THREE, tp=2, pp=2, stage=1)),
    saved(2, Parallel(*THREE, tp=2, stage=1)),
]
NUMBERED = saved(2, Parallel(*PIPELINE, pp=2))
REVERSED = saved(2, Parallel(*PIPELINE, pp=2, reverses=True))

CHANGED_TOPOLOGIES = [
    *each(
        LLAMAS,
        (1, Parallel(*LLAMA, stage=2)),
        (2, Parallel(*LLAMA, tp=2, stage=3)),
        (4, Parallel(*LLAMA, tp=2, stage=1)),
    ),
    *each(
        GPTS,
        (1, Parallel(*GPT, stage=3)),
        (2, Parallel(*GPT, tp=2, stage=0)),
        (4, Parallel(*GPT, tp=4, stage=3)),
    ),
    *each(
        [TWO_STAGES],
        (1, Parallel(*PIPELINE, stage=1)),
        (4, Parallel(*PIPELINE, pp=4, stage=1)),
        (4, Parallel(*PIPELINE, pp=2, stage=1)),
    ),
    *each(
        THREE_DIMENSIONS,
        (1, Parallel(*THREE, stage=1)),
        (2, Parallel("3d", "parameters", pp=2, stage=1)),
        (4, Parallel("3d", "parameters", tp=2, pp=2, stage=1)),
    ),
    *each(
        [saved(2, Parallel(*GPT, tp=2, stage=1, precision="bf16"))],
        (1, Parallel(*GPT, stage=3, precision="bf16")),
        expected=Resumes("native", BF16),
    ),
    *each(
        [saved(2, Parallel(*PIPELINE, pp=2, precision="bf16"))],
        (1, Parallel(*PIPELINE, stage=1, precision="bf16")),
        expected=Resumes("native", BF16),
    ),
    # whose vocabulary gets more rows, which are padding
    *each(
        [saved(1, Parallel(*GPT, stage=1, rows=61))],
        (2, Parallel(*GPT, tp=2, stage=1, rows=64)),
        expected=Resumes("native", OTHER_PADDING),
    ),
]


@cells(CHANGED_TOPOLOGIES)
def test_any_tensor_and_pipeline_parallel_degree_and_stage_resumes_bit_exactly(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


AUTOTP = [
    *each(
        [saved(1, Parallel(*UNEVEN, stage=1)), saved(2, Parallel(*UNEVEN, tp=2, stage=1))],
        (1, Parallel(*UNEVEN, stage=1)),
        (2, Parallel(*UNEVEN, tp=2, stage=1)),
    ),
    *each([saved(2, Parallel("autotp", "tied", tp=2, stage=1))], (1, Parallel("autotp", "tied", stage=1))),
    # of three heads, one rank has none
    *each([saved(4, Parallel("autotp", "uneven", tp=4, stage=1))], (2, Parallel("autotp", "uneven", tp=2, stage=1))),
    *each([saved(1, Parallel("autotp", "llama", stage=1))], (4, Parallel("autotp", "llama", tp=2, stage=3))),
]


@cells(AUTOTP)
def test_autotp_changes_its_degree_and_knows_its_batch(cell: Cell, facts: list[Loaded]) -> None:
    """Its config states no ``train_batch_size``, which DeepSpeed completes by all ranks."""
    cell.expected.check(facts)
    for load in facts:
        assert load.report.samples_consumed == SAVE_AT * GLOBAL_BATCH, load.where
        assert "set_train_batch_size" not in load.text, load.where


FUSED_UNIVERSAL = saved(2, Parallel(*FUSED, tp=2, stage=1), converted=True)
#: Three Megatron Core runs with the patterns of Megatron-DeepSpeed, of which one rank omits the rows.
LLAMA_1, GPT_2, LLAMA_4 = (
    saved(ranks, Parallel(*kind, tp=ranks, stage=stage), converted=True, declares=True)
    for ranks, kind, stage in ((1, LLAMA, 1), (2, GPT, 1), (4, LLAMA, 2))
)
EXACT_UNIVERSAL = Resumes("universal", ROUNDING)
#: Of which the converter drops padding: its rows are the live model's own.
OTHER_ROWS = Resumes("universal", OTHER_PADDING)
UNIVERSAL = [
    *each([FUSED_UNIVERSAL], *((tp, Parallel(*FUSED, tp=tp, stage=3)) for tp in (1, 2)), expected=EXACT_UNIVERSAL),
    *(resumed(save, 2, Parallel(*LLAMA, tp=2, stage=3), OTHER_ROWS, tokens=True) for save in (LLAMA_1, LLAMA_4)),
    resumed(GPT_2, 2, Parallel(*GPT, tp=2, stage=1), OTHER_ROWS, tokens=True),
]


@cells(UNIVERSAL)
def test_universal_checkpoints_of_tensor_parallel_runs_resume_bit_exactly(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


UNDECLARED = saved(2, Parallel(*THREE, tp=2, stage=1), converted=True)


@cells([resumed(UNDECLARED, tp, Parallel(*THREE, tp=tp, stage=1), EXACT_UNIVERSAL) for tp in (1, 2)])
def test_what_the_converter_concatenated_without_rules_is_divided_again(cell: Cell, facts: list[Loaded]) -> None:
    """Replicated biases and rows too. It drops the buffers of layers."""
    for load in facts:
        dropped = {key for key in load.differences if key.startswith("buffers")}
        assert load.format == "universal" and load.differences.keys() == dropped, load.where
        assert load.loss_gap <= ROUNDING, load.where
        assert ("divided again" in str(load.report.notes)) == (cell.ranks == 1), load.text


def refused(save: Save, target: Parallel, error: str, *words: str) -> Cell:
    """A load of one rank that must fail; into an engine of one rank as it was saved from it does not."""
    fits = saved(1, target)
    return Cell(
        f"{save.setup.name}-n{save.ranks} to {target.name}",
        save,
        "parallel_jobs.refuse",
        1,
        {"setup": target},
        expected=Refuses(error, words),
        fits=(fits, {"setup": target}),
    )


NARROWER = refused(
    saved(2, Parallel(*LLAMA, tp=2, stage=1)),
    Parallel(*LLAMA, stage=1, rows=61),
    "MismatchError",
    "embedding.word_embeddings.weight",
    '"vocabulary": 61',
    "64 rows, and nothing says which of them are padding",
)
OTHER_STAGES = refused(
    REVERSED, Parallel(*PIPELINE, reverses=True), "UnsupportedError", "which stage had which parameters", "2 stages"
)


@cells([NARROWER, OTHER_STAGES])
def test_rows_that_may_be_no_padding_and_states_that_cannot_be_named_are_refused(
    cell: Cell, facts: list[Refused]
) -> None:
    cell.expected.check(facts)
    assert facts[0].kinds[0] == cell.expected.error


#: Tokens that were added to shards: the option for it, and the rule that its error names.
ADDED = {"added_rows": [".*embed.*"]}
RULE = {"tp_rules": [{"pattern": "tied_modules\\.embed\\.weight", "kind": "vocabulary"}]}
GROWN = Parallel(*THREE, tp=2, stage=1, rows=66)
OF_FEWER = {1: saved(1, Parallel(*THREE, stage=1, rows=61)), 2: saved(2, Parallel(*THREE, tp=2, stage=1))}


@cells(
    [
        Cell(
            f"rows that are added to the shards of {ranks}",
            save,
            "parallel_jobs.refuse",
            2,
            {"setup": GROWN, "config": {"elastic_checkpoint": ADDED}},
            fits=(save, {"setup": GROWN, "config": {"elastic_checkpoint": ADDED | RULE}}),
        )
        for ranks, save in OF_FEWER.items()
    ]
)
def test_rows_that_are_added_to_shards_take_a_rule(cell: Cell, facts: list[Refused]) -> None:
    Refuses("UnsupportedError", ("tensor-parallel shards",)).check(facts)
    assert [[dict(remedy.config) for remedy in refused.remedies] for refused in facts] == [[RULE]]


@cells(
    [
        resumed(save, 2, GROWN, Resumes("native", OTHER_PADDING), config={"elastic_checkpoint": ADDED | RULE})
        for save in OF_FEWER.values()
    ]
)
def test_the_rule_brings_the_saved_rows_back(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    for load in facts:
        assert "keep the live values: tied_modules.embed.weight" in str(load.report.notes), load.text


def numbered(pp: int, kind: tuple[str, str] = PIPELINE, **more: Any) -> Parallel:
    """A pipeline without ZeRO, whose states each stage numbers by itself."""
    return Parallel(*kind, pp=pp, **more)


IN_BF16 = {"precision": NATIVE}
#: Of masters in fp32, and by which losses may differ.
IN_16_BITS = {"bf16": BF16, "fp16": BF16, "fp16_static": BF16}
NUMBERED_STAGES = [
    *each(
        [NUMBERED],
        (2, numbered(2)),
        (4, numbered(2)),
        (1, numbered(1)),
        (4, numbered(4)),
        (2, numbered(2, ("pipeline", "parameters"))),
        (1, numbered(1, stage=1)),
    ),
    *each([saved(4, numbered(2)), saved(1, numbered(1))], (2, numbered(2))),
    *each([saved(2, numbered(2, **IN_BF16))], (4, numbered(2, **IN_BF16)), expected=Resumes("native", BF16)),
    *each([saved(4, numbered(2, **IN_BF16))], (2, numbered(2, **IN_BF16)), expected=Resumes("native", BF16)),
    # fp32 masters beside weights in 16 bits: of bf16 flat ones, of fp16 one for each parameter or flat ones
    *(
        cell
        for precision, rounding in IN_16_BITS.items()
        for cell in each(
            [saved(2, numbered(2, precision=precision))],
            (2, numbered(2, precision=precision)),
            (4, numbered(2, precision=precision)),
            (2, numbered(1, precision=precision)),
            expected=Resumes("native", rounding),
        )
    ),
    # in an order of the user's own, which fits on the same stages
    *each([REVERSED], (4, REVERSED.setup)),
    *each([saved(4, numbered(2, THREE, tp=2))], (2, numbered(2, THREE)), (2, numbered(1, THREE, tp=2))),
]


@cells(NUMBERED_STAGES)
def test_states_that_are_numbered_by_stage_resume_bit_exactly(cell: Cell, facts: list[Loaded]) -> None:
    """With tied layers; at the same stages, and at others where the shapes tell the saved ones."""
    cell.expected.check(facts)


@cells([Cell("weights", NUMBERED, "parallel_jobs.weights", 1, {"setup": numbered(1, stage=1)})])
def test_weights_of_numbered_states_load_at_other_stages(cell: Cell, facts: list[Loaded]) -> None:
    """The tied embedding among them, which no file names."""
    (load,) = facts
    assert load.format == "native" and load.differences == {}

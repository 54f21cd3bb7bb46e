"""Optimizer states of every kind, on another topology: exact, or within the bound of 8-bit blocks that were cut."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed import old_blocks
from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import Refused, Refuses
from tests.distributed.model import Setup
from tests.distributed.optimizer_expectations import BOUNDS, LOOSE, SUB_GROUPS, Exact, Requantized, bnb, configured

SCATTERED = (("reduce_scatter", False),)
OFFLOADED = (("offload_optimizer", {"device": "cpu"}),)
#: Their updates are scaled by the norm of a flat partition, which a change of degree changes.
BY_NORM = ("bnb.LAMB", "adafactor")
EIGHT_BIT = [
    *[bnb("AdamW8bit", stage) for stage in (0, 1, 2, 3)],
    bnb("AdamW8bit", 0, precision="bf16"),
    bnb("Adam8bit", 2),
    bnb("Lion8bit", 1),
    bnb("Lion8bit", 3),
    bnb("AdEMAMix8bit", 2),
    bnb("AdEMAMix8bit", 3),
    bnb("RMSprop8bit", 1),
    bnb("SGD8bit", 2),
    bnb("Adagrad8bit", 3),
    bnb("LAMB8bit", 1),
    bnb("PagedAdamW8bit", 2),
    bnb("AdamW8bit", 2, precision="bf16"),
    Setup(1, optimizer="bnb.AdamW8bit", zero=OFFLOADED),
]
THIRTY_TWO_BIT = [bnb("AdamW32bit", 1), bnb("Lion", 3), bnb("AdEMAMix", 2), bnb("LAMB", 2), bnb("PagedAdam32bit", 1)]
#: Of the same optimizer, each is loaded into each.
OTHERS = [
    [Setup(stage, optimizer="sgd") for stage in (0, 2, 3)],
    [Setup(1, optimizer="sgd_plain")],
    [Setup(stage, optimizer="adagrad", groups="one") for stage in (2, 3)],
    [Setup(stage, optimizer="rmsprop_centered") for stage in (1, 3)],
    [Setup(2, optimizer="adadelta")],
    [Setup(stage, optimizer="nadam") for stage in (0, 1)],
    [Setup(3, optimizer="radam")],
    [Setup(1, optimizer="adamax")],
    [Setup(2, optimizer="rprop")],
    # Adafactor's factors of a matrix are no states of a flat partition
    [Setup(0, optimizer="adafactor")],
    [Setup(1, optimizer="adafactor")],
    [Setup(stage, optimizer="asgd") for stage in (0, 2)],
    [Setup(0, optimizer="torch_muon")],
    [Setup(1, optimizer="unknown"), Setup(3, optimizer="unknown", zero=SUB_GROUPS)],
    [Setup(stage, optimizer="apex") for stage in (0, 2)],
]
#: What only DeepSpeed's own loader takes.
DIARY = Setup(1, optimizer="diary")
MUON = [
    Setup(1, optimizer="muon"),
    Setup(2, "bf16", optimizer="muon"),
    Setup(3, optimizer="muon", zero=SCATTERED),
    Setup(1, optimizer="muon", zero=OFFLOADED),
    Setup(0, optimizer="muon"),
]
ALIGNED = [
    configured(setup, align_partitions=4096)
    for setup in (
        *[Setup(stage, optimizer="bnb.AdamW8bit") for stage in (1, 2, 3)],
        Setup(2, optimizer="bnb.AdEMAMix8bit"),
        Setup(3, optimizer="bnb.Adagrad8bit"),  # whose weight decay goes into the state: padding must be defined
    )
]
ADAM8 = [bnb("AdamW8bit", stage) for stage in range(4)]


def saved(setup: Setup, ranks: int = 2, **more: Any) -> Save:
    return Save(setup, ranks, "optimizer_jobs.save", **more)


def loaded(
    source: Setup | Save, target: Setup, ranks: int, expected: Exact | Requantized, note: str = "", **case: Any
) -> Cell:
    save = source if isinstance(source, Save) else saved(source)
    return crossing(save, target, ranks, "optimizer_jobs.load", expected, note, **case)


def rounding(setup: Setup) -> float:
    """By how much losses differ where ranks add gradients up in another order."""
    return 1e-5 if setup.precision == "fp32" else 5e-3


@cells([loaded(setup, setup, 2, Exact()) for setup in EIGHT_BIT])
def test_blocks_that_stay_whole_keep_their_bytes(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


#: AdamW of every stage into ZeRO-1 and 3, but for its own.
CROSSED = [(ADAM8[a], ADAM8[b]) for a, b in ((2, 1), (3, 1), (1, 3), (2, 3))]


@cells(
    [loaded(setup, setup, 3, Requantized()) for setup in EIGHT_BIT if setup.stage > 0]
    + [loaded(source, target, 3, Requantized()) for source, target in CROSSED]
)
def test_blocks_that_are_cut_are_requantized_within_the_bound(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


@cells([loaded(setup, setup, 3, Exact(rounding(setup))) for setup in EIGHT_BIT if setup.stage == 0])
def test_without_partitions_no_block_is_cut(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


@cells(
    [loaded(setup, setup, 1, Requantized()) for setup in (ADAM8[1], ADAM8[3], bnb("AdEMAMix8bit", 2))]
    + [loaded(ADAM8[stage], ADAM8[0], 1, Requantized()) for stage in (1, 3)]
    + [loaded(setup, setup, 4, Requantized()) for setup in (ADAM8[1], ADAM8[3])]
)
def test_eight_bit_states_go_to_one_rank_and_to_four(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


@cells(
    [
        loaded(setup, setup, 3, Exact(1.0 if setup.optimizer in BY_NORM else 1e-5), trained=place % 2 == 1)
        for place, setup in enumerate(THIRTY_TWO_BIT)
    ]
)
def test_thirty_two_bit_states_are_exact(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


#: Partitions of two ranks have 8,600 elements, those of four 4,300: 8-bit on two, fp32 on four.
SMALLEST = Setup(1, optimizer="bnb.AdamW8bit@6000")


@cells(
    [
        loaded(saved(SMALLEST, 2), SMALLEST, 4, Exact(LOOSE)),  # fp32 holds every value of 8 bits
        loaded(saved(SMALLEST, 4), SMALLEST, 2, Requantized()),
    ]
)
def test_states_change_their_kind_where_partitions_cross_the_smallest_size(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


def by_way_of(setup: Setup, ranks: int) -> Save:
    """Saved by two ranks, loaded by others, and saved again."""
    return Save(setup, ranks, "optimizer_jobs.resave", source=saved(setup))


@cells(
    [loaded(setup, setup, ranks, Exact()) for setup in ALIGNED for ranks in (1, 3, 4)]
    + [loaded(by_way_of(setup, ranks), setup, 2, Exact()) for setup in ALIGNED for ranks in (1, 3, 4)]
)
def test_aligned_partitions_make_changes_of_degree_exact_for_good(cell: Cell, facts: list[Any]) -> None:
    """From two ranks to one, three and four, and back."""
    cell.expected.check(facts)


#: One rank trains on padded parameters in the test above.
ALIKE = [*[Setup(stage, precision) for stage in (1, 3) for precision in ("fp32", "bf16")], Setup(1, "bf16_fp32acc")]


@cells([Cell(setup.name, None, "optimizer_jobs.losses", 3, {"setup": setup, "numel": 64}) for setup in ALIKE])
def test_alignment_changes_nothing_about_training(cell: Cell, facts: list[Any]) -> None:
    bound = 1e-6 if cell.case["setup"].precision == "fp32" else 5e-3  # memory that begins elsewhere adds up otherwise
    for found in facts:
        assert found.plain == pytest.approx(found.aligned, abs=bound)


#: Alignment of partitions that ``zero.Init`` was told, and the engine.
OTHERWISE = [(256, 0), (256, 64), (0, 64)]


@cells(
    [
        Cell(
            f"{made_with} and {trained_with}",
            None,
            "optimizer_jobs.mismatched_init",
            2,
            {"made_with": made_with, "trained_with": trained_with},
            fits=(None, {"made_with": 64, "trained_with": 64}),
        )
        for made_with, trained_with in OTHERWISE
    ]
)
def test_a_model_that_was_partitioned_otherwise_is_refused(cell: Cell, facts: list[str]) -> None:
    """Gradients would be cut elsewhere than parameters."""
    for error in facts:
        assert "align_partitions" in error and "zero.Init" in error


TO_BNB = {"exp_avg": "state1", "exp_avg_sq": "state2"}
FROM_BNB = {new: old for old, new in TO_BNB.items()}
TWO_ADAMS = 0.5  # losses of two implementations differ
CONVERTED = [
    *[(Setup(stage), bnb("AdamW8bit", 2), TO_BNB, Requantized(TWO_ADAMS)) for stage in (1, 3)],
    *[(bnb("AdamW8bit", stage), Setup(2), FROM_BNB, Exact(TWO_ADAMS)) for stage in (1, 3)],
    (bnb("AdamW8bit", 1), Setup(3, optimizer="cpuadam"), FROM_BNB, Exact(TWO_ADAMS)),
]


@cells(
    [
        loaded(source, configured(target, convert_optimizer=True), 3, expected, rename=names)
        for source, target, names, expected in CONVERTED
    ]
)
def test_adam_in_fp32_and_in_8_bits_become_each_other(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


@cells(
    [
        loaded(source, target, 3, Exact(1.0 if target.optimizer in BY_NORM else 1e-5), trained=place > 0)
        for setups in OTHERS
        for target in setups
        for place, source in enumerate(setups)
    ]
)
def test_other_optimizers_come_back_exactly(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


@pytest.mark.skipif(
    not os.environ.get("ELASTIC_CKPT_TEST_OPS"),
    reason="compiles two more of DeepSpeed's CPU kernels, which takes minutes: set ELASTIC_CKPT_TEST_OPS=1",
)
@cells(
    [loaded(setup, setup, 3, Exact()) for setup in (Setup(1, optimizer="cpulion"), Setup(3, optimizer="cpuadagrad"))]
)
def test_lion_and_adagrad_of_deepspeed_come_back_exactly(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


APEX, TORCH_ADAM = Setup(2, optimizer="apex"), Setup(1)


@cells([loaded(TORCH_ADAM, APEX, 3, Exact(1e-3)), loaded(APEX, TORCH_ADAM, 3, Exact(1e-3))])
def test_the_step_count_moves_between_state_and_param_group(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


def muon(source: Setup, target: Setup) -> Cell:
    # without ZeRO, DeepSpeed's Muon is another computation
    is_same = source.precision == target.precision and (source.stage == 0) == (target.stage == 0)
    expected = Exact(max(1e-4, rounding(target)) if is_same else 0.5)
    return loaded(source, target, 3, expected, trained=source != target)


@cells([muon(source, target) for target in MUON for source in MUON])
def test_muon_comes_back_exactly_in_every_stage(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


AGED = Save(ADAM8[1], 1, "optimizer_jobs.age", source=saved(ADAM8[1]))


@cells(
    [
        crossing(AGED, ADAM8[1], ranks, "optimizer_jobs.old_blocks", bounds)
        for ranks, bounds in ((2, {"state1": 0.0, "state2": 0.0}), (3, BOUNDS))
    ]
)
def test_files_of_older_bitsandbytes_are_read(cell: Cell, facts: list[Any]) -> None:
    """Flat layout and blocks of 2048: cut into 256 exactly, and a cut elsewhere within the bound."""
    for found in facts:
        assert found.drift <= cell.expected[found.key] * (1 + 1e-5) and found.padding_is_zero


# --- what cannot be restored ------------------------------------------------------------------------------------------

EIGHT, ADAMW, LEGACY = bnb("AdamW8bit", 2), Setup(1), replace(ADAM8[1], zero=(("elastic_checkpoint", True),))
PADDED = configured(DIARY, align_partitions=4096)
#: DeepSpeed's converter takes the padding of parameters for values.
PADDED_UNIVERSAL = saved(configured(Setup(3), align_partitions=64), converted=True)
#: What was saved, what happens to a copy of it, the live engine, the kind of error, and what it says.
REFUSED: dict[str, tuple[Setup | Save, Any, Setup, str, tuple[str, ...]]] = {
    "fp32 for 8 bits": (ADAMW, None, EIGHT, "MismatchError", ("torch.optim.AdamW", "AdamW8bit", '"convert_optimizer": true')),
    "8 bits for fp32": (EIGHT, None, ADAMW, "MismatchError", ("bitsandbytes", "torch.optim.adamw.AdamW", '"convert_optimizer": true')),
    "Lion for AdamW": (EIGHT, None, bnb("Lion8bit", 1), "MismatchError", ("state2", "Lion8bit")),
    "LAMB for AdamW": (EIGHT, None, bnb("LAMB8bit", 1), "MismatchError", ("unorm_vec",)),
    "RAdam for AdamW": (ADAMW, None, Setup(1, optimizer="radam"), "MismatchError", ("amsgrad", "RAdam")),
    "factors of matrices": (Setup(0, optimizer="adafactor"), None, Setup(1, optimizer="adafactor"), "MismatchError", ("row_var", "Adafactor")),
    "too few scales": (EIGHT, old_blocks.lose_scales, EIGHT, "DamagedError", ("state1", "scales")),
    "another map in one file": (EIGHT, old_blocks.flip_map, EIGHT, "DamagedError", ("qmap1", "in all files")),
    "no map": (EIGHT, old_blocks.lose_map, EIGHT, "DamagedError", ("qmap2", "in all files")),
    "nothing may change": (EIGHT, None, configured(bnb("AdamW8bit", 3), on_change="error"), "MismatchError", ("on_change",)),
    "legacy elastic": (LEGACY, None, EIGHT, "UnsupportedError", ("legacy zero_optimization.elastic_checkpoint",)),
    "unknown for AdamW": (ADAMW, None, Setup(2, optimizer="unknown", groups="split"), "MismatchError", ("another kind", "Wanderer")),
    "a list, padded now": (DIARY, None, PADDED, "UnsupportedError", ("diary",)),
    "a list, padded then": (PADDED, None, DIARY, "UnsupportedError", ("diary",)),
    "a map called elementwise": (EIGHT, None, configured(EIGHT, states={"qmap1": "elementwise"}), "MismatchError", ("qmap1", "states")),
    "scales called replicated": (EIGHT, None, configured(EIGHT, states={"absmax1": "replicated"}), "MismatchError", ("absmax1", "states")),
    "codes called replicated": (EIGHT, None, configured(EIGHT, states={"state1": "replicated"}), "MismatchError", ("state1", "states")),
    "moments called replicated": (ADAMW, None, configured(ADAMW, states={"exp_avg": "replicated"}), "MismatchError", ("exp_avg", "states")),
    "universal, of padded parameters": (PADDED_UNIVERSAL, None, Setup(1), "UnsupportedError", ("align_partitions", "native checkpoint")),
}  # fmt: skip


#: In the place of saves that no engine can load.
LOADABLE = [(LEGACY, EIGHT), (PADDED, DIARY), (PADDED_UNIVERSAL.setup, ADAMW)]


def refused(name: str, source: Setup | Save, change: Any, target: Setup, error: str, words: tuple[str, ...]) -> Cell:
    """A load that must fail; into an engine as it was saved from, it does not."""
    save = source if isinstance(source, Save) else saved(source)
    fits = next((other for setup, other in LOADABLE if setup == save.setup), save.setup)
    return Cell(
        name,
        save,
        "refusal_jobs.refuse",
        2,
        {"setup": target, "model": "WideLM"},
        change,
        expected=Refuses(error, words),
        fits=(saved(fits), {"setup": fits, "model": "WideLM"}),
    )


@cells([refused(name, *of) for name, of in REFUSED.items()])
def test_what_cannot_be_restored_is_refused(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)

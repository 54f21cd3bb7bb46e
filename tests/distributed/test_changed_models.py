"""Models and param groups that changed since the save: frozen parts, names, groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.model import Setup

BASE = [
    "back.weight",
    "embedding.weight",
    "gain",
    "hidden.bias",
    "hidden.weight",
    "never_used",
    "norm.bias",
    "norm.weight",
]
RENAME = [["^hidden\\.(.*)", "inner.\\1"], ["^norm\\.", "scale."], ["^trace$", "track"]]
NEW_NAMES = {
    "hidden.weight": "inner.weight",
    "hidden.bias": "inner.bias",
    "norm.weight": "scale.weight",
    "norm.bias": "scale.bias",
    "trace": "track",
}
PERSISTENT_NOTHING = ("stage3_param_persistence_threshold", 0)
DECAY = {"lr": 5e-3, "weight_decay": 0.1, "initial_lr": 1e-2, "betas": (0.9, 0.999)}
PLAIN = {"lr": 1.5e-3, "weight_decay": 0.0, "initial_lr": 3e-3, "betas": (0.8, 0.95)}

#: Parts of a model that are frozen: half of it, a LoRA's base, and a LoRA's base that is not saved.
HALF, LORA = {"model": "HalfFrozenLM"}, {"model": "LoraLM"}
BARE = {**LORA, "exclude_frozen": True}
GOES_ON = {"continue": True}
Z0, Z1, Z3 = map(Setup, (0, 1, 3))
BF16_2, BF16_3 = Setup(2, "bf16"), Setup(3, "bf16")


def with_options(setup: Setup, **options: Any) -> Setup:
    return replace(setup, config=(("elastic_checkpoint", options),))


def changed(
    save: Save, target: Setup, ranks: int = 3, expected: Resumes | None = None, note: str = "", **case: Any
) -> Cell:
    """A load into a model or param groups that are not those of the save."""
    return crossing(save, target, ranks, "changed", expected or Resumes(save.format, 1e-5), note, **case)


def frozen_parts() -> list[Cell]:
    """On one rank and on three; native checkpoints, and universal ones."""
    found = []
    for ranks, targets in ((1, [Z3]), (3, [Z0, Setup(2)])):
        crossings = [(Save(source), target) for source in (Z0, Z1, Z3) for target in targets]
        crossings += [(Save(source, converted=True), target) for source, target in ((Z1, Z3), (Z3, Setup(2)), (Z3, Z0))]
        for model in (HALF, LORA):
            for save, target in crossings:
                found.append(frozen_part(replace(save, more=model), target, ranks, **GOES_ON))
        found += [frozen_part(Save(a, more=LORA), b, ranks) for a, b in ((BF16_2, BF16_3), (BF16_3, BF16_2))]
    return found


def frozen_part(save: Save, target: Setup, ranks: int, **case: Any) -> Cell:
    expected = Resumes(save.format, 1e-5, says=("frozen parameters",))
    model = save.more["model"]
    return changed(save, target, ranks, expected, note=model, model=model, **case)


@cells(frozen_parts())
def test_a_frozen_base_comes_back_under_what_trains(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


#: Forward passes gather from the second partition, which DeepSpeed fills when it builds the engine.
HPZ = [Setup(3, zero=(("zero_hpz_partition_size", 2), *more)) for more in ((), (PERSISTENT_NOTHING,))]


@cells([frozen_part(Save(Z1, more=LORA), target, 4, **GOES_ON) for target in HPZ])
def test_a_frozen_base_comes_back_where_each_node_keeps_a_second_partition(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


#: DeepSpeed leaves out what is frozen by its first name, and below ZeRO-3 keeps the second name of the tied one.
ALL_BUT_TIED = [name for name in BASE if name != "embedding.weight"]
LEFT_OUT = {0: ALL_BUT_TIED, 1: ALL_BUT_TIED, 3: BASE}


@cells(
    [
        changed(Save(Setup(stage), more=BARE), target, fresh=names, **LORA)
        for stage, names in LEFT_OUT.items()
        for target in (Z0, Z1, Z3)
    ]
    + [
        changed(Save(source, more=BARE, converted=True), target, fresh=LEFT_OUT[source.stage], **LORA)
        for source, target in ((Z1, Z3), (Z3, Setup(2)), (Z3, Z0))
    ]
)
def test_a_base_that_was_left_out_of_the_save_stays_as_the_model_has_it(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    for load in facts:
        assert "frozen parameters " + ", ".join(cell.case["fresh"]) in load.text
        assert "exclude_frozen_parameters=True" in load.text
        assert "initialized by this run, not loaded" in load.text
        assert set(load.report.initialized) == set(cell.case["fresh"])


THAWED = Resumes(says=("optimizer states embedding.weight: it was frozen at save time",))


@cells(
    [
        changed(Save(source, more=HALF), target, expected=THAWED, stateless=["embedding.weight"])
        for source in (Z0, Z1, Z3)
        for target in (Z0, Z1, Z3)
    ]
    + [
        changed(
            Save(BF16_3, more=HALF), Setup(1, "bf16"), expected=THAWED, stateless=["embedding.weight"], trained=True
        )
    ]
)
def test_what_trains_now_and_was_frozen_starts_with_fresh_states(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


FROZEN = Resumes(says=("skipped", "optimizer states embedding.weight: frozen now"))


@cells(
    [changed(Save(source), target, expected=FROZEN, **HALF) for source in (Z1, Z3) for target in (Z0, Z1, Z3)]
    + [changed(Save(BF16_3), Setup(1, "bf16"), expected=FROZEN, trained=True, **HALF)]
)
def test_what_trained_and_is_frozen_now_keeps_its_weights(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@cells(
    [
        changed(Save(source), with_options(target, rename=RENAME), model="RenamedLM", names=NEW_NAMES, **GOES_ON)
        for source in (Z1, Z3)
        for target in (Z0, Setup(2), Z3)
    ]
)
def test_renamed_parameters_and_buffers_are_found(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@cells(
    [
        changed(Save(source), Setup(stage, groups=kind), groups=groups, **GOES_ON)
        for source in (Z1, Z3)
        for stage in (0, 1, 3)
        for kind, groups in (("reversed", [PLAIN, DECAY]), ("split", [DECAY, DECAY, PLAIN]))
    ]
)
def test_rebuilt_groups_take_hyperparameters_and_rates_by_membership(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


MIXED = [Setup(stage, groups="mixed") for stage in (0, 1, 3)]
NEEDS_A_WORD = Refuses("MismatchError", ("back.weight", "weight_decay", "0.1", "0.0", '"param_groups": "keep_live"'))


@cells(
    [
        replace(crossing(Save(Z1), target, 2, "refusal_jobs.refuse", NEEDS_A_WORD), fits=(Save(Z1), {"setup": Z1}))
        for target in MIXED
    ]
)
def test_groups_that_mix_different_hyperparameters_need_a_word_from_the_user(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


STAY = "hyperparameters of the live group stay, but for what the restored lr scheduler sets"


@cells(
    [
        # their own, whose lr the schedule halves after three steps
        changed(
            Save(Z1),
            with_options(target, param_groups="keep_live"),
            expected=Resumes(says=(f"param groups 0, 1: {STAY}",)),
            groups=[DECAY, PLAIN],
        )
        for target in MIXED
    ]
)
def test_by_that_word_mixed_groups_keep_the_live_hyperparameters(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)

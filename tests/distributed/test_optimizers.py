"""Optimizer states of every kind, on another topology: exact, or within the bound of 8-bit blocks that were cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Convert, Launch
from tests.distributed.model import Setup
from tests.distributed.old_blocks import flip_map, lose_map, lose_scales, to_flat_blocks_of_2048

SUB_GROUPS = (("sub_group_size", 5000),)
SCATTERED = (("reduce_scatter", False),)
#: Their updates are scaled by the norm of a flat partition, which a change of degree changes.
BY_NORM = ("bnb.LAMB", "adafactor")


def bnb(name: str, stage: int, **more: Any) -> Setup:
    return Setup(stage, optimizer=f"bnb.{name}", zero=SUB_GROUPS if stage == 3 else (), **more)


def configured(setup: Setup, **options: Any) -> Setup:
    return replace(setup, config=(("elastic_checkpoint", options),))


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
    Setup(1, optimizer="bnb.AdamW8bit", zero=(("offload_optimizer", {"device": "cpu"}),)),
]
THIRTY_TWO_BIT = [bnb("AdamW32bit", 1), bnb("Lion", 3), bnb("AdEMAMix", 2), bnb("LAMB", 2), bnb("PagedAdam32bit", 1)]
#: Partitions of two ranks have 8,600 elements, those of four 4,300: 8-bit on two, fp32 on four.
CROSSING = Setup(1, optimizer="bnb.AdamW8bit@6000")
OTHERS = [
    *[Setup(stage, optimizer="sgd") for stage in (0, 2, 3)],
    Setup(1, optimizer="sgd_plain"),
    Setup(2, optimizer="adagrad", groups="one"),
    Setup(3, optimizer="adagrad", groups="one"),
    *[Setup(stage, optimizer="rmsprop_centered") for stage in (1, 3)],
    Setup(2, optimizer="adadelta"),
    *[Setup(stage, optimizer="nadam") for stage in (0, 1)],
    Setup(3, optimizer="radam"),
    Setup(1, optimizer="adamax"),
    Setup(2, optimizer="rprop"),
    *[Setup(stage, optimizer="adafactor") for stage in (0, 1)],
    *[Setup(stage, optimizer="asgd") for stage in (0, 2)],
    Setup(0, optimizer="torch_muon"),
    Setup(1, optimizer="unknown"),
    Setup(3, optimizer="unknown", zero=SUB_GROUPS),
    *[Setup(stage, optimizer="apex") for stage in (0, 2)],
]
#: What only DeepSpeed's own loader takes.
DIARY = Setup(1, optimizer="diary")
#: Their kernels are compiled first.
COMPILED = [Setup(1, optimizer="cpulion"), Setup(3, optimizer="cpuadagrad")]
MUON = [
    Setup(1, optimizer="muon"),
    Setup(2, "bf16", optimizer="muon"),
    Setup(3, optimizer="muon", zero=SCATTERED),
    Setup(1, optimizer="muon", zero=(("offload_optimizer", {"device": "cpu"}),)),
    Setup(0, optimizer="muon"),
]
ALIGNED = [
    *[Setup(stage, optimizer="bnb.AdamW8bit") for stage in (1, 2, 3)],
    Setup(2, optimizer="bnb.AdEMAMix8bit"),
    Setup(3, optimizer="bnb.Adagrad8bit"),  # whose weight decay goes into the state: padding must be defined
]
Folder = Callable[[Setup, int], str]
#: Half the widest gap of bitsandbytes' maps: what requantizing may change, as a part of a block's largest value.
BOUNDS = {"state1": 0.9 / 128, "state2": 0.9 / 256}


def save(launch: Launch, folder: Path, setups: Iterable[Setup], degree: int = 2) -> Folder:
    values = {"folder": str(folder), "setups": list(setups)}
    launch(degree, "optimizer_jobs.save", values, timeout=590)  # some optimizers are compiled first
    return lambda setup, dp=degree: str(folder / f"{setup.name}-dp{dp}")


@pytest.fixture(scope="module")
def eight_bit(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return save(launch, tmp_path_factory.mktemp("eight_bit"), [*EIGHT_BIT, *THIRTY_TWO_BIT, CROSSING])


@pytest.fixture(scope="module")
def others(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return save(launch, tmp_path_factory.mktemp("others"), [*OTHERS, *MUON, DIARY, Setup(1), Setup(3)])


def load(launch: Launch, degree: int, targets: Sequence[tuple[Setup, Sequence[dict[str, Any]]]]) -> list[Any]:
    values = [{"setup": setup, "sources": list(sources)} for setup, sources in targets]
    return launch(degree, "optimizer_jobs.load", values, timeout=500)


def source(folder: str, loss: float = 1e-5, **more: Any) -> dict[str, Any]:
    """A checkpoint to load, and by which losses of the run that goes on may differ."""
    return {"folder": folder, "loss": loss, **more}


def assert_exact(found: Any) -> None:
    """Everything came back bit by bit: no block was requantized."""
    assert found.differences == {} and found.states == {}, found.where
    assert (found.requantized, found.reported_drift) == (0, 0.0), found.where
    assert found.loss_gap <= found.case["loss"], found.where


def assert_requantized(found: Any) -> None:
    """All but states came back bit by bit, they within their bounds; the report says how many, and how far off."""
    assert found.differences == {}, found.where
    assert all(drift <= BOUNDS.get(key, 0.0) * (1 + 1e-5) for key, drift in found.drift.items()), found
    assert found.requantized > 0 and found.reported_drift > 0.0, found.where
    assert found.reported_drift >= max(found.drift.values()) - 1e-6, found.where
    assert f"{found.requantized} of {found.blocks} requantized" in found.text
    assert found.loss_gap <= found.case["loss"], found.where


#: By which losses may differ after states were requantized.
LOOSE = 2e-2


def rounding(setup: Setup) -> float:
    """By how much losses differ where ranks add gradients up in another order."""
    return 1e-5 if setup.precision == "fp32" else 5e-3


def test_blocks_that_stay_whole_keep_their_bytes(launch: Launch, eight_bit: Folder) -> None:
    for found in load(launch, 2, [(setup, [source(eight_bit(setup))]) for setup in EIGHT_BIT]):
        assert_exact(found)


def test_blocks_that_are_cut_are_requantized_within_the_bound(launch: Launch, eight_bit: Folder) -> None:
    targets = [(setup, [source(eight_bit(setup), LOOSE)]) for setup in EIGHT_BIT if setup.stage > 0]
    every = [bnb("AdamW8bit", stage) for stage in (1, 2, 3)]
    targets += [(target, [source(eight_bit(setup), LOOSE) for setup in every]) for target in (every[0], every[2])]
    whole = [setup for setup in EIGHT_BIT if setup.stage == 0]
    unpartitioned = [(setup, [source(eight_bit(setup), rounding(setup), whole=True)]) for setup in whole]
    for found in load(launch, 3, [*targets, *unpartitioned]):
        assert_exact(found) if "whole" in found.case else assert_requantized(found)


def test_eight_bit_states_go_to_one_rank_and_to_four(launch: Launch, eight_bit: Folder) -> None:
    kinds = [bnb("AdamW8bit", 1), bnb("AdamW8bit", 3), bnb("AdEMAMix8bit", 2)]
    targets = [(setup, [source(eight_bit(setup), LOOSE)]) for setup in kinds]
    unpartitioned = [source(eight_bit(bnb("AdamW8bit", stage)), LOOSE) for stage in (1, 3)]
    facts = load(launch, 1, [*targets, (bnb("AdamW8bit", 0), unpartitioned)])
    for found in facts + load(launch, 4, targets[:2]):
        assert_requantized(found)


def test_thirty_two_bit_states_are_exact(launch: Launch, eight_bit: Folder) -> None:
    loss = {setup: 1.0 if setup.optimizer in BY_NORM else 1e-5 for setup in THIRTY_TWO_BIT}
    for found in load(launch, 3, [(setup, [source(eight_bit(setup), loss[setup])]) for setup in THIRTY_TWO_BIT]):
        assert_exact(found)


def test_states_change_their_kind_where_partitions_cross_the_smallest_size(
    launch: Launch, eight_bit: Folder, tmp_path: Path
) -> None:
    for found in load(launch, 4, [(CROSSING, [source(eight_bit(CROSSING), LOOSE)])]):
        assert_exact(found)  # fp32 holds every value of 8 bits
    on_four = save(launch, tmp_path, [CROSSING], degree=4)
    for found in load(launch, 2, [(CROSSING, [source(on_four(CROSSING), LOOSE)])]):
        assert_requantized(found)


def test_aligned_partitions_make_changes_of_degree_exact_for_good(launch: Launch, tmp_path: Path) -> None:
    """From two ranks to one, three and four, and back."""
    setups = [configured(setup, align_partitions=4096) for setup in ALIGNED]
    on_two = save(launch, tmp_path, setups)
    away = {degree: [str(tmp_path / f"{s.name}-dp{degree}") for s in setups] for degree in (1, 3, 4)}
    facts = []
    for degree, folders in away.items():
        there = [[source(on_two(setup), resave=folder)] for setup, folder in zip(setups, folders, strict=True)]
        facts += load(launch, degree, list(zip(setups, there, strict=True)))
    back = [[source(folders[number]) for folders in away.values()] for number in range(len(setups))]
    for found in facts + load(launch, 2, list(zip(setups, back, strict=True))):
        assert_exact(found)


def test_alignment_changes_nothing_about_training(launch: Launch, tmp_path: Path) -> None:
    setups = [Setup(stage, precision) for stage in (1, 3) for precision in ("fp32", "bf16")]
    setups.append(Setup(1, "bf16_fp32acc"))
    for degree in (3,):  # one rank trains on padded parameters in the test above
        plain = save(launch, tmp_path / "plain", setups, degree)
        aligned = save(launch, tmp_path / "aligned", [configured(s, align_partitions=64) for s in setups], degree)
        for setup in setups:
            a, b = (torch.load(Path(folder(setup)) / "truth.pt", weights_only=False) for folder in (plain, aligned))
            bound = 1e-6 if setup.precision == "fp32" else 5e-3  # memory that begins elsewhere adds up in other orders
            assert a["losses"] == pytest.approx(b["losses"], abs=bound), setup


def test_a_universal_checkpoint_of_padded_parameters_is_refused(
    launch: Launch, convert: Convert, tmp_path: Path
) -> None:
    """DeepSpeed's converter takes their padding for values."""
    padded = configured(Setup(3), align_partitions=64)
    save(launch, tmp_path / "native", [padded])
    (tmp_path / "universal").mkdir()
    convert(tmp_path / "native", tmp_path / "universal", [f"{padded.name}-dp2"])
    folder = str(tmp_path / "universal" / f"{padded.name}-dp2")
    (refused,) = launch(2, "refusal_jobs.refuse", [{"setup": Setup(1), "folder": folder, "model": "WideLM"}])
    (text,) = refused.texts
    assert refused.kinds and refused.changed == set(), text
    assert "align_partitions" in text and "native checkpoint" in text


def test_a_model_that_was_partitioned_otherwise_is_refused(launch: Launch) -> None:
    """Gradients would be cut elsewhere than parameters."""
    for error in launch(2, "optimizer_jobs.mismatched_init", [(256, 0), (256, 64), (0, 64)]):
        assert "align_partitions" in error and "zero.Init" in error


def test_adam_in_fp32_and_in_8_bits_become_each_other(launch: Launch, eight_bit: Folder, others: Folder) -> None:
    to_bnb = {"exp_avg": "state1", "exp_avg_sq": "state2"}
    from_bnb = {new: old for old, new in to_bnb.items()}
    loose = 0.5  # two implementations of Adam
    adamw = [source(others(Setup(stage)), loose, rename=to_bnb) for stage in (1, 3)]
    eight = [source(eight_bit(bnb("AdamW8bit", stage)), loose, rename=from_bnb) for stage in (1, 3)]
    convert = {"convert_optimizer": True}
    for found in load(launch, 3, [(configured(bnb("AdamW8bit", 2), **convert), adamw)]):
        assert_requantized(found)
    targets = [(Setup(2), eight), (Setup(3, optimizer="cpuadam"), eight[:1])]
    for found in load(launch, 3, [(configured(setup, **convert), sources) for setup, sources in targets]):
        assert_exact(found)


def test_other_optimizers_come_back_exactly(launch: Launch, others: Folder) -> None:
    kinds = {setup.optimizer for setup in OTHERS}
    targets = []
    for kind in sorted(kinds):
        setups = [setup for setup in OTHERS if setup.optimizer == kind]
        # Adafactor's factors of a matrix are no states of a flat partition
        sources = [[target] if kind == "adafactor" else setups for target in setups]
        targets += [
            (target, [source(others(s), 1.0 if kind in BY_NORM else 1e-5) for s in found])
            for target, found in zip(setups, sources, strict=True)
        ]
    for found in load(launch, 3, targets):
        assert_exact(found)


@pytest.mark.skipif(
    not os.environ.get("ELASTIC_CKPT_TEST_OPS"),
    reason="compiles two more of DeepSpeed's CPU kernels, which takes minutes: set ELASTIC_CKPT_TEST_OPS=1",
)
def test_lion_and_adagrad_of_deepspeed_come_back_exactly(launch: Launch, tmp_path: Path) -> None:
    saved = save(launch, tmp_path, COMPILED)
    for found in load(launch, 3, [(setup, [source(saved(setup))]) for setup in COMPILED]):
        assert_exact(found)


def test_the_step_count_moves_between_state_and_param_group(launch: Launch, others: Folder) -> None:
    apex, torch_adam = Setup(2, optimizer="apex"), Setup(1)
    targets = [(apex, [source(others(torch_adam), 1e-3)]), (torch_adam, [source(others(apex), 1e-3)])]
    for found in load(launch, 3, targets):
        assert_exact(found)


def test_muon_comes_back_exactly_in_every_stage(launch: Launch, others: Folder) -> None:
    def loss(target: Setup, setup: Setup) -> float:
        # without ZeRO, DeepSpeed's Muon is another computation
        is_same = setup.precision == target.precision and (setup.stage == 0) == (target.stage == 0)
        return max(1e-4, rounding(target)) if is_same else 0.5

    targets = [(target, [source(others(setup), loss(target, setup)) for setup in MUON]) for target in MUON]
    for found in load(launch, 3, targets):
        assert_exact(found)


def test_files_of_older_bitsandbytes_are_read(launch: Launch, eight_bit: Folder, tmp_path: Path) -> None:
    """Flat layout and blocks of 2048: cut into 256 exactly, and a cut elsewhere within the bound."""
    setup = bnb("AdamW8bit", 1)
    folder = to_flat_blocks_of_2048(Path(eight_bit(setup)), tmp_path / "old")
    for degree, bounds in ((2, {"state1": 0.0, "state2": 0.0}), (3, BOUNDS)):
        for found in launch(degree, "optimizer_jobs.old_blocks", {"setup": setup, "folder": str(folder)}):
            assert found.drift <= bounds[found.key] * (1 + 1e-5) and found.padding_is_zero


def test_what_cannot_be_restored_is_refused(launch: Launch, eight_bit: Folder, others: Folder, tmp_path: Path) -> None:
    adam8, adamw, legacy = bnb("AdamW8bit", 2), Setup(1), bnb("AdamW8bit", 1)
    legacy = replace(legacy, zero=(("elastic_checkpoint", True),))
    save(launch, tmp_path, [legacy])
    padded = configured(DIARY, align_partitions=4096)
    save(launch, tmp_path / "padded", [padded])

    def case(setup: Setup, folder: str, *words: str) -> dict[str, Any]:
        return {"setup": setup, "folder": folder, "words": words, "model": "WideLM"}

    def mislabelled(**schema: str) -> dict[str, Any]:
        (key,) = schema
        return case(configured(adam8, states=schema), eight_bit(adam8), key, "states")

    cases = [
        case(adam8, others(adamw), "torch.optim.AdamW", "AdamW8bit", '"convert_optimizer": true'),
        case(adamw, eight_bit(adam8), "bitsandbytes", "torch.optim.adamw.AdamW", '"convert_optimizer": true'),
        case(bnb("Lion8bit", 1), eight_bit(adam8), "state2", "Lion8bit"),
        case(bnb("LAMB8bit", 1), eight_bit(adam8), "unorm_vec"),
        case(Setup(1, optimizer="radam"), others(adamw), "amsgrad", "RAdam"),
        case(Setup(1, optimizer="adafactor"), others(Setup(0, optimizer="adafactor")), "row_var", "Adafactor"),
        case(adam8, str(lose_scales(Path(eight_bit(adam8)), tmp_path / "scales")), "state1", "scales"),
        case(adam8, str(flip_map(Path(eight_bit(adam8)), tmp_path / "flipped")), "qmap1", "in all files"),
        case(adam8, str(lose_map(Path(eight_bit(adam8)), tmp_path / "lost")), "qmap2", "in all files"),
        case(configured(bnb("AdamW8bit", 3), on_change="error"), eight_bit(adam8), "on_change"),
        case(adam8, str(tmp_path / f"{legacy.name}-dp2"), "legacy zero_optimization.elastic_checkpoint"),
        case(Setup(2, optimizer="unknown", groups="split"), others(Setup(1)), "another kind", "Wanderer"),
        case(padded, others(DIARY), "diary"),
        case(DIARY, str(tmp_path / "padded" / f"{padded.name}-dp2"), "diary"),
        mislabelled(qmap1="elementwise"),
        mislabelled(absmax1="replicated"),
        mislabelled(state1="replicated"),
        case(configured(adamw, states={"exp_avg": "replicated"}), others(adamw), "exp_avg", "states"),
    ]
    for refused in launch(2, "refusal_jobs.refuse", cases):
        (text,) = refused.texts
        assert refused.kinds and refused.changed == set(), text
        assert [word for word in refused.case["words"] if word not in text] == [], text

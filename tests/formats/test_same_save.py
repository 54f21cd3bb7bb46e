"""Counters against the optimizer's step counts, and masters against the weights beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.values import RecordedCounts
from elastic_ckpt.errors import DamagedError, MismatchError, MixedSavesError, UnsupportedError
from elastic_ckpt.formats.model_states import FUSED, PLAIN, UNFUSED
from elastic_ckpt.formats.same_save import (
    refuse_within_step,
    spot_check,
    steps_not_counted,
    with_progress_compared,
)
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from tests.simulation import TWO, saved


def at_steps(*steps: float) -> CheckpointMetadata:
    return saved(TWO, scalars={name: [("step", step)] for name, step in zip(TWO, steps * 2, strict=False)})


def model_of(
    steps: int,
    skipped: int = 0,
    kind: str | None = None,
    version: str = "0.19.8",
    ahead: Mapping[str, frozenset[int]] = MappingProxyType({}),
    at_save: bool = False,
    has_schedule: bool = False,
) -> Any:
    optimizer = None if kind is None else SimpleNamespace(kind=kind)
    counters = {"global_steps": steps, "skipped_steps": skipped}
    facts = {"optimizer": optimizer, "ds_version": version, "has_schedule": has_schedule}
    facts["counts"] = RecordedCounts(ahead, at_save)
    return SimpleNamespace(counters=counters, path="file", **facts)


def in_stage(stage: int, metadata: CheckpointMetadata) -> CheckpointMetadata:
    return replace(metadata, source=replace(metadata.source, zero_stage=stage))


def in_groups(metadata: CheckpointMetadata, **hyperparameters: Any) -> CheckpointMetadata:
    return replace(metadata, groups=tuple({**group, **hyperparameters} for group in metadata.groups))


def scaler(steps: int) -> Any:
    return SimpleNamespace(dynamic=True, cur_iter=steps)


def test_a_save_within_a_step_of_any_rank_is_refused_unless_bytes_alone_are_verified() -> None:
    whole, torn = model_of(4), model_of(4)
    torn.counts, torn.path = RecordedCounts(within_step=True), "torn"
    refuse_within_step([whole, whole], check_shards=True)
    refuse_within_step([whole, torn], check_shards=False)
    with pytest.raises(MixedSavesError, match="within a step") as caught:
        refuse_within_step([whole, torn], check_shards=True)
    assert caught.value.file == "torn" and not caught.value.proves_damage
    assert [each.config for each in caught.value.remedies] == [{}, {"verify": "bytes"}]


BESIDE = [None]
RECORDED = {"step": frozenset({-4}), "cur_iter": frozenset({-2})}


@pytest.mark.parametrize(
    ("stage", "metadata", "model", "scalers"),
    [
        (3, at_steps(7.0), model_of(8, skipped=1), BESIDE),
        (3, saved(TWO, states=()), model_of(7), BESIDE),
        (1, saved(TWO, states=(), hyperparameters=({"lr": 1.0},)), model_of(1), BESIDE),
        (1, at_steps(8.0), model_of(7, version="0.12.6"), BESIDE),
        (1, at_steps(7.0), model_of(7, version="9" * 5000), BESIDE),  # more digits than Python makes a number of
        (3, at_steps(3.0), model_of(7, ahead=RECORDED), BESIDE),
        (3, at_steps(3.0), model_of(7, ahead=RECORDED), [scaler(5)]),
        (0, at_steps(8.0), model_of(7, kind=FUSED), ()),
        (0, at_steps(7.0), model_of(7, kind=UNFUSED), ()),
        (0, at_steps(8.0), model_of(7, kind=UNFUSED), BESIDE),
        # apex's step is in the group, and counts each of its sub-groups
        (3, in_groups(at_steps(21.0), bias_correction=True), model_of(7), BESIDE),
    ],
)
def test_counts_that_are_explained_agree(stage: int, metadata: Any, model: Any, scalers: Any) -> None:
    metadata = in_stage(stage, metadata)
    assert with_progress_compared(metadata, model, True, scalers) is metadata


@pytest.mark.parametrize(
    ("stage", "metadata", "model", "scalers", "found"),
    [
        (3, at_steps(8.0), model_of(7), BESIDE, "step 8"),
        (1, at_steps(8.0), model_of(7), BESIDE, "step 8"),
        (2, at_steps(6.0), model_of(7), BESIDE, "step 6"),
        (3, at_steps(3.0), model_of(7), BESIDE, "step 3"),
        (1, at_steps(7.0, 8.0), model_of(7), BESIDE, "step 7, 8"),
        (1, at_steps(8.0), model_of(7, version="0.13.5"), BESIDE, "step 8"),
        (3, at_steps(4.0), model_of(7, ahead=RECORDED), BESIDE, "step 4"),
        (1, saved(TWO, states=()), model_of(1), BESIDE, "step 0"),
        (1, at_steps(7.0), model_of(8, skipped=1), [scaler(7)], "step 7"),
        (1, at_steps(7.0), model_of(7), [scaler(7), scaler(8)], "step 7, 8"),
        (3, in_groups(at_steps(22.0), bias_correction=True), model_of(7), BESIDE, "step 22"),
        (2, in_groups(at_steps(8.0), bias_correction=True), model_of(7), BESIDE, "step 8"),
        # the engine steps its schedule: an unfinished save over one from before the first step
        (3, at_steps(1.0), model_of(0, has_schedule=True), BESIDE, "step 1"),
    ],
)
def test_files_of_two_saves_are_refused(stage: int, metadata: Any, model: Any, scalers: Any, found: str) -> None:
    with pytest.raises(DamagedError, match="different steps") as caught:
        with_progress_compared(in_stage(stage, metadata), model, True, scalers)
    assert caught.value.file == "file" and str(caught.value.found).endswith(found)
    with_progress_compared(in_stage(stage, metadata), model, False, scalers)


@pytest.mark.parametrize(
    ("stage", "metadata", "model", "scalers"),
    [
        (2, at_steps(4.0), model_of(9), BESIDE),
        (3, at_steps(8.0), model_of(7), [scaler(7)]),
        (0, at_steps(8.0), model_of(7, kind=PLAIN), ()),
        (1, in_groups(at_steps(6.0), d0=1e-6), model_of(7), BESIDE),  # Prodigy counts no step of rate zero
        (3, in_groups(at_steps(0.0, 7.0), d=1e-6), model_of(7), BESIDE),  # nor does D-Adaptation's Adan
    ],
)
def test_what_weights_or_the_scaler_show_to_be_one_save_is_noted(
    stage: int, metadata: Any, model: Any, scalers: Any
) -> None:
    metadata = replace(in_stage(stage, metadata), notes=("before",))
    compared = with_progress_compared(metadata, model, True, scalers)
    assert compared.notes[0] == "before" and "as after a reset" in compared.notes[1]
    assert replace(compared, notes=metadata.notes) == metadata


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("scalers", [BESIDE, [scaler(0)], [scaler(7)]])
def test_a_count_that_no_step_has_touched_proves_nothing(stage: int, scalers: Any) -> None:
    """Lightning Fabric calls the optimizer's own step, and ``global_steps`` stays 0."""
    after_a_load = model_of(0, ahead={"step": frozenset({6})}, has_schedule=True)
    for steps, model in ((1.0, model_of(0)), (7.0, model_of(0)), (7.0, after_a_load)):
        compared = with_progress_compared(in_stage(stage, at_steps(steps)), model, True, scalers)
        (warning,) = compared.warnings
        assert "no step was counted" in warning and "older save" in warning


@given(
    stage=st.sampled_from([1, 2, 3]),
    counted=st.integers(1, 5),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    scaled=st.none() | st.integers(1, 9),
    has_schedule=st.booleans(),
    is_recorded=st.booleans(),
)
def test_counters_that_a_run_has_left_standing_prove_nothing(
    stage: int, counted: int, steps: list[int], scaled: int | None, has_schedule: bool, is_recorded: bool
) -> None:
    """A loop of the engine's own steps, then Lightning Fabric, without elastic_ckpt: all groups on all ranks go on."""
    scalers = BESIDE if scaled is None else [scaler(scaled)]
    ahead = {"step": frozenset({0})} if is_recorded else {}
    model = model_of(counted, ahead=ahead, has_schedule=has_schedule)
    found = in_stage(stage, at_steps(*map(float, steps)))
    goes_on = len(set(steps)) == 1 and steps[0] - counted > 1 and (scaled is None or scaled >= steps[0])
    if goes_on and not has_schedule and not is_recorded:
        (warning,) = with_progress_compared(found, model, True, scalers).warnings
        assert f"the last {steps[0] - counted}" in warning and "older save" in warning
    elif stage == 3 and {*steps} != {counted} and max(steps) != counted and scaled != counted:
        with pytest.raises(MixedSavesError, match="different steps"):
            with_progress_compared(found, model, True, scalers)


@given(
    stage=st.sampled_from([1, 2, 3]),
    counted=st.integers(0, 3),
    saves=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    scaled=st.booleans(),
    has_schedule=st.booleans(),
)
def test_counters_that_stand_still_are_no_damage_where_saves_state_it_and_two_saves_are(
    stage: int, counted: int, saves: tuple[int, int], scaled: bool, has_schedule: bool
) -> None:
    """As in a run that Lightning Fabric has continued: the counters are those of the load."""
    of_model, of_optimizer = saves
    ahead = {"step": frozenset({of_model - counted}), "cur_iter": frozenset({of_model - counted} if scaled else ())}
    model = model_of(counted, ahead=ahead, at_save=True, has_schedule=has_schedule)
    found = in_stage(stage, at_steps(float(of_optimizer)))
    scalers = [scaler(of_optimizer)] if scaled else BESIDE
    if of_model == of_optimizer:
        compared = with_progress_compared(found, model, True, scalers)
        assert not compared.warnings and all("something other than engine.step" in note for note in compared.notes)
        assert bool(compared.notes) == (steps_not_counted(found, model.counters) > 0)
    elif stage == 3 or abs(of_model - of_optimizer) == 1:
        with pytest.raises(MixedSavesError, match="different steps"):
            with_progress_compared(found, model, True, scalers)


@given(
    stage=st.sampled_from([1, 3]),
    began=st.lists(st.integers(1, 6), min_size=0, max_size=2),
    loaded_at=st.integers(7, 9),
    saves=st.tuples(st.integers(10, 20), st.integers(10, 20)),
    is_recorded=st.booleans(),
)
def test_groups_that_began_later_are_no_damage_and_two_saves_of_them_are(
    stage: int, began: list[int], loaded_at: int, saves: tuple[int, int], is_recorded: bool
) -> None:
    """``began``: after which step a group was added; the last load may have recorded how far counts are apart."""
    starts = (0, *began)
    ahead = {"step": frozenset(-start for start in starts)} if is_recorded and began else {}
    of_model, of_optimizer = saves
    found = in_stage(stage, at_steps(*(float(of_optimizer - start) for start in starts)))
    model = model_of(of_model, ahead=ahead, has_schedule=True)  # which stands still where the counters do
    checked = lambda: with_progress_compared(found, model, True, BESIDE)  # noqa: E731
    if of_model == of_optimizer:
        assert not any("reset" in note for note in checked().notes)
    elif stage == 3:
        with pytest.raises(MixedSavesError, match="different steps"):
            checked()


# --- masters against weights ------------------------------------------------------------------------------------


def checkpoint(
    folder: Path, stage: int, count: int, wrong: int | None
) -> tuple[CheckpointMetadata, str, dict[str, TensorRef]]:
    """Many parameters of 20 elements, bf16 weights in one file and fp32 masters in another."""
    masters = [torch.arange(20.0) + 100 * number for number in range(count)]
    weights = [master.bfloat16() for master in masters]
    if wrong is not None:
        masters[wrong] = masters[wrong] + 1000
    (folder / "masters").write_bytes(b"".join(master.numpy().tobytes() for master in masters))
    (folder / "weights").write_bytes(b"".join(weight.view(torch.int16).numpy().tobytes() for weight in weights))
    names = [f"p{number:02}" for number in range(count)]
    paths = [str(folder / "weights"), str(folder / "masters")]
    metadata = CheckpointMetadata(
        source=SourceFacts("native", str(folder), "tag", stage, 1, "0.19.8"),
        files=tuple(SourceFile(path, 0) for path in paths),
        parameters={name: SavedParameter((20,), 0, ()) for name in names},
        tensors={
            (name, MASTER): TensorMetadata(
                name, MASTER, (20,), "float32", chunks_of(StorageChunk(FlatRange(0, 20), 1, 80 * number))
            )
            for number, name in enumerate(names)
        },
        groups=({},),
    )
    refs = {name: TensorRef("bfloat16", (20,), (1,), 40 * number) for number, name in enumerate(names)}
    return metadata, paths[0], refs


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_masters_of_their_weights_pass(tmp_path: Path, stage: int) -> None:
    metadata, *weights = checkpoint(tmp_path, stage, 12, wrong=None)
    spot_check(metadata, *weights, {0, 1})


@pytest.mark.parametrize(
    ("stage", "error", "says"), [(0, MismatchError, "without names"), (1, MixedSavesError, "not those of the weights")]
)
def test_masters_of_other_weights_are_named(tmp_path: Path, stage: int, error: type[Exception], says: str) -> None:
    metadata, *weights = checkpoint(tmp_path, stage, 12, wrong=3)
    with pytest.raises(error, match=says) as caught:
        spot_check(metadata, *weights, {1})
    assert caught.value.parameter == "p03"
    assert caught.value.file == metadata.files[1].path
    spot_check(metadata, *weights, {0})


def test_without_partitions_all_parameters_are_compared(tmp_path: Path) -> None:
    """There, values also prove which parameter is which."""
    metadata, *weights = checkpoint(tmp_path, 0, 40, wrong=39)
    with pytest.raises(MismatchError) as caught:
        spot_check(metadata, *weights, {1})
    assert caught.value.parameter == "p39"
    spot_check(*checkpoint(tmp_path, 1, 40, wrong=39), {1})


def test_masters_of_a_schedule_free_optimizer_in_evaluation_mode_are_no_damage(tmp_path: Path) -> None:
    metadata, *weights = checkpoint(tmp_path, 1, 12, wrong=3)
    with pytest.raises(UnsupportedError, match="evaluation mode") as caught:
        spot_check(in_groups(metadata, train_mode=False), *weights, {1})
    assert caught.value.parameter == "p03" and "optimizer.train()" in str(caught.value.remedy)
    with pytest.raises(DamagedError):
        spot_check(in_groups(metadata, train_mode=True), *weights, {1})

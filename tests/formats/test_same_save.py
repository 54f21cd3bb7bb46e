"""Counters against the optimizer's step counts, and masters against the weights beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt.core.chunks import StorageChunk, listed
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.formats.model_states import FUSED, PLAIN, UNFUSED
from elastic_ckpt.formats.same_save import spot_check, with_progress_compared
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from tests.simulation import TWO, saved, unpartitioned


def at_steps(*steps: float) -> CheckpointMetadata:
    return saved(TWO, scalars={name: [("step", step)] for name, step in zip(TWO, steps * 2, strict=False)})


def model_of(kind: str | None, steps: int, skipped: int = 0) -> Any:
    optimizer = None if kind is None else SimpleNamespace(kind=kind)
    return SimpleNamespace(counters={"global_steps": steps, "skipped_steps": skipped}, path="file", optimizer=optimizer)


def in_stage(stage: int, metadata: CheckpointMetadata) -> CheckpointMetadata:
    return replace(metadata, source=replace(metadata.source, zero_stage=stage))


@pytest.mark.parametrize(("skipped", "agrees"), [(0, False), (1, True)])
def test_step_counts_are_compared_with_the_counters(skipped: int, agrees: bool) -> None:
    metadata, model = in_stage(3, at_steps(7.0)), model_of(None, 8, skipped)
    if agrees:
        assert with_progress_compared(metadata, model, check_shards=True) is metadata
        return
    assert "step 7" in with_progress_compared(metadata, model, check_shards=False).notes[-1]
    with pytest.raises(DamagedError, match="different steps") as caught:
        with_progress_compared(metadata, model, check_shards=True)
    assert caught.value.file == "file"


@pytest.mark.parametrize("refuse", [True, False])
def test_one_step_more_than_the_counters_is_a_note_at_most(refuse: bool) -> None:
    metadata = in_stage(3, at_steps(8.0))
    assert "one step ahead" in with_progress_compared(metadata, model_of(None, 9, 2), refuse).notes[-1]
    assert with_progress_compared(metadata, model_of(FUSED, 9, 2), refuse) is metadata


@pytest.mark.parametrize("steps", [(9.0,), (5.0,), (7.0, 8.0), (8.0, 9.0)])
def test_any_other_difference_is_an_error_with_all_steps_in_it(steps: tuple[float, ...]) -> None:
    with pytest.raises(DamagedError) as caught:
        with_progress_compared(in_stage(3, at_steps(*steps)), model_of(None, 7), check_shards=True)
    assert all(f"{step:g}" in str(caught.value.found) for step in steps)
    assert "step 7" in str(caught.value.expected)


def test_a_checkpoint_without_steps_agrees_with_any_counters() -> None:
    metadata = in_stage(3, saved(TWO, states=()))
    assert with_progress_compared(metadata, model_of(None, 7), check_shards=True) is metadata


@pytest.mark.parametrize(("stage", "check", "refused"), [(3, True, True), (3, False, False), (2, True, False)])
def test_only_zero3_refuses_and_only_where_shards_are_checked(stage: int, check: bool, refused: bool) -> None:
    metadata = replace(in_stage(stage, at_steps(4.0)), notes=("before",))
    if refused:
        with pytest.raises(DamagedError):
            with_progress_compared(metadata, model_of(None, 9), check)
        return
    compared = with_progress_compared(metadata, model_of(None, 9), check)
    assert compared.notes[0] == "before"
    assert len(compared.notes) == 2
    assert replace(compared, notes=()) == replace(metadata, notes=())


@pytest.mark.parametrize(("kind", "notes"), [(PLAIN, 1), (UNFUSED, 0), (FUSED, 0)])
def test_optimizers_that_step_once_when_built_count_one_more(kind: str, notes: int) -> None:
    assert len(with_progress_compared(unpartitioned(at_steps(4.0)), model_of(kind, 3), True).notes) == notes


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
                name, MASTER, (20,), "float32", listed(StorageChunk(FlatRange(0, 20), 1, 80 * number))
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
    ("stage", "error", "says"), [(0, MismatchError, "without names"), (1, DamagedError, "not those of the weights")]
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

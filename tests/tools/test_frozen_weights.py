"""Frozen weights that a save has left out: where that is certain, possible, or out of the question."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.core.metadata import FROZEN, MASTER, CheckpointMetadata, SavedParameter, SourceFacts, TensorMetadata
from elastic_ckpt.tools.frozen_weights import frozen_left_out

SOURCE = SourceFacts("native", "/ckpt/step7", "step7", 2, 1, "0.19.8", frozen_recorded=False)
LORA = ("m.0.q_proj.lora_A.default.weight", "m.0.q_proj.lora_B.default.weight")


def metadata_of(*trained: str, frozen: tuple[str, ...] = (), **source: Any) -> CheckpointMetadata:
    keys = {**dict.fromkeys(trained, MASTER), **dict.fromkeys(frozen, FROZEN)}
    tensors = {(name, key): TensorMetadata(name, key, (4,), "float32", ()) for name, key in keys.items()}
    parameters = {name: SavedParameter((4,), 0, ()) for name in trained}
    return CheckpointMetadata(
        source=replace(SOURCE, **source), files=(), parameters=parameters, groups=({},), tensors=tensors
    )


@pytest.mark.parametrize(
    ("metadata", "is_certain"),
    [
        (metadata_of(*LORA), True),
        (metadata_of(*LORA, zero_stage=1), True),
        (metadata_of(*LORA, "m.score.modules_to_save.default.weight"), True),
        (metadata_of(*LORA, frozen=("m.0.q_proj.base_layer.weight.absmax",)), True),
        (metadata_of("lora_A.weight", "lora_B.weight"), True),
        (metadata_of("a.weight"), False),
    ],
)
def test_frozen_weights_are_missing(metadata: CheckpointMetadata, is_certain: bool) -> None:
    found = frozen_left_out(metadata)
    assert found is not None and found.is_certain is is_certain
    assert "exclude_frozen_parameters=True" in str(found)
    assert ("if the model has any" in str(found)) is not is_certain


@pytest.mark.parametrize(
    "metadata",
    [
        metadata_of("a.weight", frozen_recorded=True),
        metadata_of("a.weight", zero_stage=1),
        metadata_of("a.weight", frozen=("b.weight",)),
        metadata_of(*LORA, frozen=("m.0.q_proj.base_layer.weight",)),
        metadata_of(*LORA, frozen=("m.0.q_proj.weight",), zero_stage=1),
        metadata_of("a.weight", foreign="safetensors"),
    ],
)
def test_no_frozen_weights_are_missing(metadata: CheckpointMetadata) -> None:
    assert frozen_left_out(metadata) is None


def test_an_adapter_in_a_folder_of_its_own_was_not_saved_by_an_engine() -> None:
    found = frozen_left_out(metadata_of(*LORA, foreign="safetensors", frozen_recorded=True))
    assert str(found) == "the frozen weights are not in this checkpoint"


def test_a_long_name_takes_memory_in_proportion_to_its_length() -> None:
    """Counted in bytes: all of its beginnings would be the square of that."""
    name = "a." * 5000 + "weight"
    metadata = metadata_of(*LORA, name)
    tracemalloc.start()
    try:
        frozen_left_out(metadata)
        _, most_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_nbytes < 50 * len(name)

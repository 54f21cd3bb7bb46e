"""Comparing checkpoints: values, and what cannot be compared; how it is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ckpt.cli.output import Answer, tell
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import ListedChunks, StorageChunk
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    TensorMetadata,
)
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.core.values import LeftInFile
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.compare_replicas import differences
from elastic_ckpt.tools.comparison import _not_understood
from elastic_ckpt.tools.logical import LogicalReader

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("left", "right", "differing", "at"),
    [
        ([2**60, 5], [2**60 + 1, 5], 1, None),  # the same as floats
        ([1 + 1j, 2j, 3], [1 + 1j, 2j, 4], 1, 2),
        ([INF, 1.0], [-INF, 1.0], 1, 0),
        ([0.0, NAN, -0.0], [-0.0, NAN, 0.0], 0, None),
        ([1.0, NAN], [1.0, 2.0], 1, 1),
        ([True, False], [True, True], 1, 1),
    ],
)
def test_elements_that_differ_are_counted_and_found(left: list, right: list, differing: int, at: int | None) -> None:
    same, apart = differences(torch.tensor(left), torch.tensor(right))
    assert int((~same).sum()) == differing
    assert at is None or int(apart.argmax()) == at


def with_opaque(**states: str) -> CheckpointMetadata:
    source = SourceFacts("native", "/ckpt", "step", 1, 2, "0.19.8")
    return CheckpointMetadata(source, (), {}, {}, (), states=StateFacts(states))


def test_states_of_unknown_layout_are_not_equal_in_silence() -> None:
    found, notes = _not_understood(with_opaque(odd="a list", mine="a dict"), with_opaque(odd="a list"))
    assert [(d.key, d.what) for d in found] == [("mine", "missing")] and "second" in found[0].detail
    assert len(notes) == 1 and "odd" in notes[0] and "not compared" in notes[0]


def test_hyperparameters_that_are_not_read_are_not_equal_in_silence() -> None:
    metadata = replace(with_opaque(), groups=({"lr": 0.1, "mine": [LeftInFile("a tensor")]},))
    found, notes = _not_understood(metadata, metadata)
    assert (found, notes) == ([], ["not compared: hyperparameter mine, a tensor"])


def test_a_vector_that_is_whole_by_its_shape_alone_is_no_drifted_copy(tmp_path: Any) -> None:
    """It may as well be each rank's own part; a rule makes it a copy."""
    path = tmp_path / "a"
    path.write_bytes(torch.tensor([1.0, 2.0, 1.0, 3.0]).numpy().tobytes())
    chunks = tuple(ListedChunks((StorageChunk(FlatRange(0, 2), 0, 8 * rank),)) for rank in (0, 1))
    tensors = {("b", "fp32"): TensorMetadata("b", "fp32", (2,), "float32", chunks, shards=((2,), (2,)))}
    source = SourceFacts("native", "/ckpt", "step", 1, 1, "0.19.8", tp=2)
    metadata = CheckpointMetadata(
        source, (SourceFile(str(path), 16),), {"b": SavedParameter((2,), 0, ())}, tensors, ({},)
    )
    with pytest.raises(MismatchError, match="by their shapes alone"):
        LogicalReader(metadata, ElasticConfig(replicated_params="first")).compare_copies()
    rules = [ShardSpec(pattern="b", kind="replicated")]
    reader = LogicalReader(metadata, ElasticConfig(replicated_params="first", tp_rules=rules))
    assert "the first was taken" in reader.compare_copies()[0]


def test_json_stays_json_and_text_stays_text(capsys: pytest.CaptureFixture[str]) -> None:
    tell(Answer({"max_abs": INF, "at": [NAN, 1.5], "none": None}, ()), as_json=True)
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {"max_abs": "inf", "at": ["nan", 1.5], "none": None}

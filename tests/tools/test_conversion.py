"""Writing universal checkpoints: names that lead nowhere else, what is refused, and objects of DeepSpeed's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    TensorMetadata,
)
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.core.values import PerRank
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.sharding.specs import known_specs
from elastic_ckpt.tools.conversion import _checked, notes_on, refuse_unconvertible, save, tp_entries
from elastic_ckpt.tools.logical import LogicalTensor


@pytest.mark.parametrize(
    "name", ["../escape", "a/b", "..", ".", "", ".hidden", "a\\b", "nul\0", "x" * 256, "\ud800", "a\nb"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be the name of a folder"):
        _checked(name, "/ckpt")


def test_names_of_parameters_pass() -> None:
    for name in ("a", "module.layers.0.weight", "tied_modules.embed.weight", "x" * 255, "a..b"):
        assert _checked(name, "/ckpt") == name


def metadata(**changes: Any) -> CheckpointMetadata:
    chunk = StorageChunk(FlatRange(0, 4), 0, 0)
    tensors = {("w", key): TensorMetadata("w", key, (4,), "float32", chunks_of(chunk)) for key in ("fp32", "exp_avg")}
    source = SourceFacts("native", "/ckpt", "step", 1, 2, "0.19.8")
    plain = CheckpointMetadata(
        source, (SourceFile("/ckpt/a", 99),), {"w": SavedParameter((4,), 0, (("step", 1.0),))}, tensors, ({},)
    )
    return replace(plain, **changes)


def test_what_the_format_has_no_place_for_is_named() -> None:
    refuse_unconvertible(metadata(saved_names={"w": "w"}))
    whole = TensorMetadata(
        "w", "row", (2,), "float32", chunks_of(StorageChunk(FlatRange(0, 2), 0, 0)), has_own_shape=True
    )
    cases: list[tuple[dict[str, Any], str]] = [
        ({"source": replace(metadata().source, zero_stage=0)}, "without ZeRO"),
        ({"source": replace(metadata().source, format="universal", by_rank=False)}, "already"),
        ({"saved_names": {"w": "old.w"}}, "copied as they are (w)"),
        (
            {
                "parameters": {"w._extra_state": metadata().parameters["w"]},
                "tensors": {
                    ("w._extra_state", key): replace(tensor, name="w._extra_state")
                    for (_, key), tensor in metadata().tensors.items()
                },
            },
            "in their extra state (w._extra_state)",
        ),
        ({"states": StateFacts(opaque={"odd": "a list"})}, "unknown layout (odd)"),
        ({"tensors": {**metadata().tensors, ("w", "row"): whole}}, "shape of their own (row)"),
        (
            {"parameters": {"w": SavedParameter((4,), 0, (("d", PerRank(((0, 0.5), (1, 0.25)))), ("step", 1.0)))}},
            "each rank has its own (d)",
        ),
        (
            {"parameters": {"w": SavedParameter((4,), 0, (), (ReplicatedState("t", "int8", (3,), 0, 8, 0, True),))}},
            "differ between ranks (t)",
        ),
    ]
    for changes, says in cases:
        with pytest.raises(UnsupportedError, match=re.escape(says)):
            refuse_unconvertible(metadata(**changes))


@pytest.mark.parametrize("where", ["tensors", "scalars", "replicated"])
def test_states_with_a_dot_in_their_names_have_no_place_among_nested_keys(where: str) -> None:
    """As a path, the name would be that of a collection; it can be the name of a file."""
    replicated = ReplicatedState("odd.x", "int8", (3,), 0, 8, 0)
    tensor = replace(metadata().tensors["w", "exp_avg"], key="odd.x")
    changes: dict[str, dict[str, Any]] = {
        "tensors": {"tensors": {**metadata().tensors, ("w", "odd.x"): tensor}},
        "scalars": {"parameters": {"w": SavedParameter((4,), 0, (("odd.x", 1.0), ("step", 1.0)))}},
        "replicated": {"parameters": {"w": SavedParameter((4,), 0, (("step", 1.0),), (replicated,))}},
    }
    refuse_unconvertible(metadata(**changes[where]))
    with pytest.raises(UnsupportedError, match=re.escape("have a dot, which is between keys in this layout (odd.x)")):
        refuse_unconvertible(metadata(**changes[where]), "dcp")


def test_unknown_states_are_refused_with_the_lines_that_settle_them() -> None:
    states = StateFacts(opaque={"odd": "float32 of shape (256,) for a partition of 318", "other": "a list"})
    with pytest.raises(UnsupportedError) as caught:
        refuse_unconvertible(metadata(states=states))
    settled = [each.config["states"] for each in caught.value.remedies if each.config]
    assert settled == [{"odd": word, "other": word} for word in ("replicated", "elementwise", "fresh")]
    assert "--config" in caught.value.remedy and "odd: float32 of shape (256,)" in caught.value.found


def test_damage_is_what_a_load_says_of_it() -> None:
    states = StateFacts(opaque={"odd": "a list"}, damaged={"absmax1": "cut"})
    with pytest.raises(DamagedError, match="'absmax1' does not have the scales") as caught:
        refuse_unconvertible(metadata(states=states))
    assert "as it is" not in caught.value.remedy


def test_files_that_are_missing_are_named_before_anything_else() -> None:
    states = StateFacts(opaque={"odd": "a list"}, missing={"zero/*/odd.pt": ("w",)})
    with pytest.raises(DamagedError, match=r"(?s)is missing.*/zero/w/odd\.pt"):
        refuse_unconvertible(metadata(states=states))


def test_parts_whose_widths_the_run_says_are_noted_in_numbers() -> None:
    """DeepSpeed cuts by what is noted: without it, queries would be taken for keys."""
    name = "layer.query_key_value.weight"
    shards = ((32, 8), (32, 8))
    tensors = {(name, "fp32"): TensorMetadata(name, "fp32", (32, 8), "float32", (), shards=shards)}
    book = ShardingRules((ShardSpec(pattern=".*query_key_value.*", kind="column", sub_parameters="qkv"),))
    run = {"num_attention_heads": 8, "num_query_groups": 4}
    described = metadata(tensors=tensors, parameters={name: SavedParameter((32, 8), 0, ())}, run=run)
    noted = tp_entries(known_specs(described, [name], book)[name], LogicalTensor(name, "fp32", (64, 8), "float32"))
    assert noted.keys() == {"sub_param_shape"}
    assert (noted["sub_param_shape"].shape, noted["sub_param_shape"].partition_dim) == (((32, 16, 16), 8), 0)
    with pytest.raises(MismatchError, match="how many attention heads"):
        known_specs(replace(described, run={}), [name], book)


def test_what_deepspeed_will_not_restore_is_noted() -> None:
    assert list(notes_on(metadata(), {})) == []
    frozen = TensorMetadata("f", "frozen", (4,), "float32", chunks_of(StorageChunk(FlatRange(0, 4), 0, 0)))
    described = metadata(tensors={**metadata().tensors, ("f", "frozen"): frozen})
    (note,) = notes_on(described, {})
    assert "only elastic_ckpt" in note
    (note,) = notes_on(replace(described, files=(SourceFile("/ckpt/layer_03-model_states.pt", 9),)), {})
    assert note.endswith("are lost: f")
    table = ReplicatedState("my_map", "float32", (256,), 0, 8, 0)
    saved = SavedParameter((4,), 0, (("count", 3.0), ("step", 1.0)), (table,))
    (note,) = notes_on(metadata(parameters={"w": saved}), {})
    assert note.endswith("one for all parameters: count, my_map")
    (note,) = notes_on(metadata(source=replace(metadata().source, zero_stage=3, tp=2)), {})
    assert "only for AutoTP" in note


def test_stand_ins_are_written_as_objects_of_the_classes_that_they_stand_for(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2**16, 5, 1, 1, False)
    tree = {
        "stage": ZeroStageEnum.weights,
        "scaler": scaler,
        "address": fragment_address(numel=3, start=4),
        "x": [torch.ones(2)],
    }
    torch.save(tree, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    save({**file.tree, "x": torch.ones(2)}, tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    assert again["stage"] is ZeroStageEnum.weights and again["address"] == tree["address"]
    assert type(again["scaler"]) is DynamicLossScaler and vars(again["scaler"]).keys() == vars(scaler).keys()
    assert again["scaler"].cur_scale == 2**16 and again["x"].tolist() == [1, 1]

"""What ranks would hold where there is no live model, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import LiveShards
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.shard_specs import BY_SHAPES
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError
from elastic_ckpt.sharding.rules import ShardingRules, tensor_of
from elastic_ckpt.sharding.specs import BY_DEFAULT, Shardings, virtual_layouts
from tests.resolving import checkpoint, numbered, rules

ROWS = {"parameter_with_row_parallelism_patterns": ["^narrow$"]}
Shapes = tuple[tuple[int, ...], ...]


def shapes(metadata: CheckpointMetadata, name: str, tp: int, book: ShardingRules | None = None) -> Shapes:
    return virtual_layouts(metadata, [name], tp, book or ShardingRules())[name].shapes


def test_another_number_of_ranks_holds_what_the_rule_cuts() -> None:
    metadata = checkpoint({"w": numbered(8, 6).chunk(2)})
    assert shapes(metadata, "w", 4, rules("w", kind="column")) == ((2, 6),) * 4
    assert shapes(metadata, "w", 1, rules("w", kind="row")) == ((4, 12),)
    assert shapes(metadata, "w", 3, rules("w", kind="replicated")) == ((4, 6),) * 3
    assert shapes(metadata, "w", 3, rules("w", kind="vocabulary")) == ((3, 6),) * 3  # padded to 9 rows
    assert shapes(metadata, "w", 2) == ((4, 6),) * 2  # as it was saved: no rule is needed
    with pytest.raises(MismatchError, match="does not divide"):
        shapes(metadata, "w", 3, rules("w", kind="column"))


def test_vectors_are_taken_for_replicated_and_matrices_are_refused() -> None:
    metadata = checkpoint({"v": [numbered(4)] * 2, "w": numbered(8, 6).chunk(2)})
    assert shapes(metadata, "v", 3) == ((4,),) * 3
    errors: dict[str, ElasticCkptError] = {}
    layouts = virtual_layouts(metadata, ["v", "w"], 1, ShardingRules(), errors)
    assert set(layouts) == {"v"} and "none of these" in str(errors["w"].found)  # type: ignore[attr-defined]


def test_what_no_declared_pattern_names_is_cut_along_dimension_0_unless_it_was_called_fused() -> None:
    metadata = checkpoint({"w": numbered(8, 6).chunk(2)}, info=ROWS)
    layout = virtual_layouts(metadata, ["w"], 1, ShardingRules())["w"]
    assert (layout.shapes, layout.dim, layout.origin) == (((8, 6),), 0, BY_DEFAULT)
    renamed = dataclasses.replace(metadata, saved_names={"w": "attention.qkv.weight"})
    with pytest.raises(MismatchError, match="made of several"):
        shapes(renamed, "w", 1)


@pytest.mark.parametrize(("shape", "kind"), [((6,), "row"), ((), "column"), ((), "row")])
def test_a_rule_for_a_dimension_that_is_not_there_is_refused(shape: tuple[int, ...], kind: str) -> None:
    whole = torch.ones(shape)
    for saved in ([whole], [whole, whole, whole]):
        with pytest.raises(MismatchError) as caught:
            shapes(checkpoint({"v": saved}), "v", 2, rules("v", kind=kind))
        assert caught.value.parameter == "v"


def test_offline_decisions_are_no_guesses() -> None:
    metadata = checkpoint({"w": [numbered(4, 6)] * 2})
    tensor = tensor_of(metadata, "w")
    assert tensor is not None
    shardings = Shardings(metadata, ShardingRules())
    with shardings.of(tensor, LiveShards(())) as live, shardings.of(tensor) as offline:
        assert live.chosen is not None and live.chosen.origin == BY_SHAPES
        assert offline.chosen is None


def test_a_renamed_parameter_is_still_known_not_to_be_fused_by_its_counterpart() -> None:
    shards = {
        "l.mlp.linear_fc1.weight": numbered(16, 16).chunk(2),
        "l.mlp.linear_fc2.weight": numbered(16, 16).chunk(2, 1),
    }
    metadata = checkpoint(shards, info={"parameter_with_row_parallelism_patterns": [".*fc2.weight"]})
    for each in (metadata, rename_saved(metadata, [("^", "m.")])):
        layouts = virtual_layouts(each, list(each.parameters), 1, ShardingRules())
        assert [layout.shapes for layout in layouts.values()] == [((16, 16),), ((16, 16),)]


def test_a_parameter_without_weights_is_named() -> None:
    metadata = checkpoint({"a.weight": [numbered(8, 4)], "b.weight": [numbered(8, 4)]})
    left = {key: tensor for key, tensor in metadata.tensors.items() if key[0] != "b.weight"}
    with pytest.raises(DamagedError, match="no weights of it") as caught:
        virtual_layouts(dataclasses.replace(metadata, tensors=left), ["a.weight", "b.weight"], 1, ShardingRules())
    assert caught.value.parameter == "b.weight"

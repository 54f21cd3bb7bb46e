"""What shapes say of a fused layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastic_ckpt.core.metadata import MASTER, TensorMetadata
from elastic_ckpt.sharding.rules import ModelShapes


def structure(shards: dict[str, list[tuple[int, ...]]]) -> ModelShapes:
    """Of a metadata that holds these, by the shape of each tensor-parallel shard."""
    tensors = {
        (name, MASTER): TensorMetadata(name, MASTER, shapes[0], "float32", (), shards=tuple(shapes))
        for name, shapes in shards.items()
    }
    metadata: Any = SimpleNamespace(tensors=tensors, run={})
    return ModelShapes(metadata)


def test_a_layer_is_not_its_own_counterpart() -> None:
    """Its shards are square, so that by their shapes alone it could take its own output."""
    found = structure({"block.mlp.up.weight": [(4, 4), (4, 4)], "block.mlp.down.weight": [(4, 2), (4, 2)]})
    assert found.is_fused("block.mlp.up.weight")
    assert not found.is_fused("block.mlp.down.weight")


def test_a_parameter_of_equal_shape_is_a_counterpart() -> None:
    found = structure({f"block.mlp.{name}.weight": [(4, 4), (4, 4)] for name in ("up", "down")})
    assert not found.is_fused("block.mlp.up.weight")


def test_layers_of_other_modules_and_at_the_root_say_nothing() -> None:
    shapes = [(4, 4), (4, 4)]
    assert not structure({"a.m.up.weight": shapes, "b.m.down.weight": [(4, 2), (4, 2)]}).is_fused("a.m.up.weight")
    assert not structure({"up.weight": shapes, "down.weight": [(4, 2), (4, 2)]}).is_fused("up.weight")

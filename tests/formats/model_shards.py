"""Model shards of tensor- and pipeline-parallel ranks, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.core.values import Features
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.saved_config import StatedDegrees
from elastic_ckpt.formats.torch_archive.tensors import TensorRef


def model(
    names: Sequence[str] = (),
    degrees: tuple[int, int] | None = None,
    weights: Sequence[str] = (),
    mp: int | None = None,
) -> ModelShard:
    refs = {name: TensorRef("float32", (1,), (1,), 0) for name in weights}
    shapes = (tuple((name, (1,)) for name in names),) if names else ()
    return ModelShard(
        "/ckpt/mp_rank.pt", 1, shapes, refs, (), 0, (), {}, True, {}, {}, "0.19.8", {}, 1, Features(), None, stated=StatedDegrees(degrees, mp)
    )  # fmt: skip

"""Models of jobs too big to run here, and what is known of their places."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from benchmarks.scale_models import ScaleModel, scale_metadata
from elastic_ckpt.core.metadata import CheckpointMetadata


@lru_cache
def catalog_of(name: str) -> CheckpointMetadata:
    """Of a ready model."""
    return scale_metadata(ScaleModel.load(name))


SMALL: dict[str, Any] = {
    "name": "small",
    "description": "Like the big ones.",
    "parameters": 12 * 4 + 5 * 4 + 4 + 2 * (12 * 16 + 13 * 4) + 2 * 4,
    "saved": {
        "tag": "step3",
        "step": 3,
        "ds_version": "0.19.8",
        "tp": 2,
        "dp": 3,
        "stages": [0, 3],
        "optimizer": "DeepSpeedZeroOptimizer",
        "weights_dtype": "bfloat16",
    },
    "universal_checkpoint_info": {"vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"]},
    "arguments": {"num_attention_heads": 2, "swiglu": False, "glu_activation": None},
    "sizes": {"h": 4, "v": 12, "s": 5},
    "states": ["exp_avg", "exp_avg_sq"],
}


def small_model(optimizer: str = "DeepSpeedZeroOptimizer") -> ScaleModel:
    big = ScaleModel.load("104b").model_dump()
    embed, blocks, norm = big["layers"]
    first_only = {"name": "word_embeddings.norm.weight", "shape": ["h"], "first_only": True}
    embed = {**embed, "again": [5], "parameters": [*embed["parameters"], first_only]}
    layers = [embed, {**blocks, "count": 2}, {**norm, "first": 4}]
    step_free = [{**group, "hyperparameters": {**group["hyperparameters"], "step": 3}} for group in big["groups"]]
    saved = {**SMALL["saved"], "optimizer": optimizer}
    return ScaleModel(**{**SMALL, "saved": saved, "layers": layers, "groups": step_free})


def described(metadata: CheckpointMetadata, run: Iterable[str] = ()) -> dict[str, Any]:
    """All that a checkpoint's metadata says but where tensors start in their files."""
    names = [os.path.basename(file.path) for file in metadata.files]
    every = {**{place: (tensor,) for place, tensor in metadata.tensors.items()}}
    every |= {(name, key, "replica"): copies for (name, key), copies in metadata.replicas.items()}  # type: ignore[misc]
    return {
        "tensors": {
            place: [
                (t.shape, t.dtype, t.shards, [[(e.range, names[e.file]) for e in shard] for shard in t.sources])
                for t in tensors
            ]
            for place, tensors in every.items()
        },
        "parameters": dict(metadata.parameters),
        "names": sorted(names),
        "groups": [{**group, "betas": tuple(group["betas"])} for group in metadata.groups],
        "stages": dict(metadata.stages),
        "declared": metadata.declared,
        "run": {key: metadata.run.get(key) for key in run},
        "source": (
            metadata.source.zero_stage,
            metadata.source.partition_degree,
            metadata.source.tp,
            metadata.source.pp,
        ),
        "ep": metadata.source.ep,
    }


def check_places(imagined: CheckpointMetadata, real: CheckpointMetadata) -> None:
    """In each file, tensors are in the same order, each aligned as ``torch.save`` aligns it."""
    for place, tensor in imagined.tensors.items():
        for chunk, other in zip(tensor.chunks, real.tensors[place].chunks, strict=True):
            assert (chunk.byte_offset - other.byte_offset) % 64 == 0
    orders = []
    for metadata in (imagined, real):
        where: dict[str, list[tuple[int, Any]]] = {}
        for place, tensor in metadata.tensors.items():
            for chunk in tensor.chunks:
                name = os.path.basename(metadata.files[chunk.file].path)
                where.setdefault(name, []).append((chunk.byte_offset, (place, chunk.range.start)))
        orders.append({name: [what for _, what in sorted(found)] for name, found in where.items()})
    assert orders[0] == orders[1]

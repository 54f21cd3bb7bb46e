"""Metadata of a few names, and the names in it."""

from __future__ import annotations

from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata

WHOLES = {("mask", BUFFER): ((2,), "int64"), ("old.bias", FROZEN): ((4,), "float32")}


def names_in(metadata: CheckpointMetadata) -> set[str]:
    assert all(name == tensor.name for (name, _), tensor in metadata.tensors.items()), "a tensor kept its old name"
    return {*metadata.parameters, *(name for name, _ in metadata.tensors), *metadata.aliases}

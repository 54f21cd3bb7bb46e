"""Does an optimizer shard belong to the weights beside it?

ZeRO-1/2 save the low-precision weights whole in the model-states file, and DeepSpeed always makes them by rounding
the fp32 masters. So a few elements of each shard, rounded, must equal the weights at the same place: a shard of
another run, with the same shapes and the same number of steps, does not. ZeRO-3 saves no such weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata, StorageChunk, TensorMetadata
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.formats.pickled import TensorRef

_ELEMENTS = 16
_PARAMETERS = 8


@dataclass(frozen=True)
class SavedWeights:
    """Low-precision weights beside the masters: a file, and what of it is which parameter."""

    path: str
    weights: Mapping[str, TensorRef]


def spot_check(metadata: CheckpointMetadata, model: SavedWeights, files: Collection[int]) -> None:
    """Compare a few masters in each of some files with the weights in the model-states file. Local.

    Universal checkpoints made from stages 1 and 2 keep the same weights beside them, and are checked alike.

    Args:
        metadata: the checkpoint.
        model: the weights saved beside it; nothing is compared where it holds no weights (ZeRO-3).
        files: indices of the files in ``metadata.files`` to look into.

    Raises:
        DamagedError: they differ.
        MismatchError: they differ in a checkpoint without ZeRO, where parameters are matched by their order.
    """
    checked: Counter[int] = Counter()
    # without partitions, values also prove which parameter is which: look at all of them
    most = _PARAMETERS if metadata.source.zero_stage else len(metadata.parameters)
    for name in metadata.parameters:
        weight, tensor = model.weights.get(name), metadata.tensors.get((name, MASTER))
        if weight is None or tensor is None or weight.shape != tensor.shape or not weight.is_contiguous:
            continue
        for chunk in tensor.chunks:
            if chunk.file in files and checked[chunk.file] < most:
                checked[chunk.file] += 1
                _compare(metadata, model, tensor, chunk)


def _compare(metadata: CheckpointMetadata, model: SavedWeights, tensor: TensorMetadata, chunk: StorageChunk) -> None:
    weight = model.weights[tensor.name]
    count = min(_ELEMENTS, chunk.range.numel)
    masters = _read(metadata.files[chunk.file].path, chunk.byte_offset, count, tensor.dtype)
    weight_offset = weight.byte_offset + chunk.range.start * ITEMSIZE[weight.dtype]
    weights = _read(model.path, weight_offset, count, weight.dtype)
    if not torch.equal(masters.to(weights.dtype).nan_to_num(), weights.nan_to_num()):
        if metadata.source.zero_stage == 0:
            raise _other_order(tensor.name, metadata.files[chunk.file].path, weights, masters)
        raise DamagedError(
            "the fp32 masters in this file are not those of the weights saved beside it",
            parameter=tensor.name,
            file=metadata.files[chunk.file].path,
            expected=f"{_first(weights)} ... from element {chunk.range.start} on, as in {model.path}",
            found=f"{_first(masters)} ...",
            remedy=(
                "the file is of another run, or weights were changed by hand before the save; "
                'if that was meant: "elastic_checkpoint": {"check_shards": false}'
            ),
        )


def _other_order(name: str, file: str, weights: torch.Tensor, masters: torch.Tensor) -> MismatchError:
    return MismatchError(
        "without ZeRO, DeepSpeed saves masters without names, and this parameter's are not those of its weights",
        parameter=name,
        file=file,
        expected=f"{_first(weights)} ...",
        found=f"{_first(masters)} ...",
        remedy=(
            "build the live param groups with the parameters of the saved ones, in their order; if they are, the file "
            "is damaged: take another tag"
        ),
    )


def _first(values: torch.Tensor) -> str:
    return ", ".join(f"{value:.5g}" for value in values[:4].tolist())


def _read(path: str, offset: int, numel: int, dtype: str) -> torch.Tensor:
    with open(path, "rb") as stream:
        raw = os.pread(stream.fileno(), numel * ITEMSIZE[dtype], offset)
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))

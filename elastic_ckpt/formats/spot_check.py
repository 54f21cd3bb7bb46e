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
from elastic_ckpt.core.metadata import MASTER, Catalog, Extent, LogicalTensor
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.formats.pickled import TensorRef

_ELEMENTS = 16
_PARAMETERS = 8


@dataclass(frozen=True)
class SavedWeights:
    """Low-precision weights beside the masters: a file, and what of it is which parameter."""

    path: str
    weights: Mapping[str, TensorRef]


def spot_check(catalog: Catalog, model: SavedWeights, files: Collection[int]) -> None:
    """Compare a few masters in each of some files with the weights in the model-states file. Local.

    Universal checkpoints made from stages 1 and 2 keep the same weights beside them, and are checked alike.

    Args:
        catalog: the checkpoint.
        model: the weights saved beside it; nothing is compared where it holds no weights (ZeRO-3).
        files: indices of the files in ``catalog.files`` to look into.

    Raises:
        DamagedError: they differ.
        MismatchError: they differ in a checkpoint without ZeRO, where parameters are matched by their order.
    """
    checked: Counter[int] = Counter()
    # without partitions, values also prove which parameter is which: look at all of them
    most = _PARAMETERS if catalog.source.zero_stage else len(catalog.parameters)
    for name in catalog.parameters:
        weight, tensor = model.weights.get(name), catalog.tensors.get((name, MASTER))
        if weight is None or tensor is None or weight.shape != tensor.shape or not weight.is_contiguous:
            continue
        for extent in tensor.extents:
            if extent.file in files and checked[extent.file] < most:
                checked[extent.file] += 1
                _compare(catalog, model, tensor, extent)


def _compare(catalog: Catalog, model: SavedWeights, tensor: LogicalTensor, extent: Extent) -> None:
    weight = model.weights[tensor.name]
    count = min(_ELEMENTS, extent.range.numel)
    masters = _read(catalog.files[extent.file].path, extent.byte_offset, count, tensor.dtype)
    weight_offset = weight.byte_offset + extent.range.start * ITEMSIZE[weight.dtype]
    weights = _read(model.path, weight_offset, count, weight.dtype)
    if not torch.equal(masters.to(weights.dtype).nan_to_num(), weights.nan_to_num()):
        if catalog.source.zero_stage == 0:
            raise _other_order(tensor.name, catalog.files[extent.file].path, weights, masters)
        raise DamagedError(
            "the fp32 masters in this file are not those of the weights saved beside it",
            parameter=tensor.name,
            file=catalog.files[extent.file].path,
            expected=f"{_first(weights)} ... from element {extent.range.start} on, as in {model.path}",
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

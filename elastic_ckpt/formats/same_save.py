"""Checks whether a checkpoint's model-states files and optimizer shards belong to the same save.

A job that dies while it overwrites a tag leaves model-states files of one step beside optimizer shards of another; step
counts show it. A shard of another run may have the same shapes and step count. ZeRO-1/2 saves the low-precision weights
whole in the model-states file, and DeepSpeed always makes them by rounding the fp32 masters, so a few elements of each
shard, rounded, must equal them. ZeRO-3 saves none: only step counts are compared.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, CheckpointMetadata
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.formats.model_states import PLAIN, ModelShard
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.values import agrees_when_rounded, to_numbers
from elastic_ckpt.storage.local import open_descriptor

if TYPE_CHECKING:
    import numpy as np

_ONE_MORE = (
    "optimizer states are one step ahead of the counters, as after a phase without ZeRO in fp16 or bf16, whose "
    "optimizer steps once when it is built"
)
#: Error, problem and remedy where masters are not those of their weights.
_OTHER_RUN = (
    DamagedError,
    "the fp32 masters in this file are not those of the weights saved beside it",
    "the file is of another run, or weights were changed by hand before the save; "
    'if that was meant: "elastic_checkpoint": {"check_shards": false}',
)
_OTHER_ORDER = (
    MismatchError,
    "without ZeRO, DeepSpeed saves masters without names, and this parameter's are not those of its weights",
    "build the live param groups with the parameters of the saved ones, in their order; if they are, the file is "
    "damaged: take another tag",
)
#: Numbers of elements and parameters compared in each file.
_ELEMENTS = 16
_PARAMETERS = 8


def with_progress_compared(metadata: CheckpointMetadata, model: ModelShard, check_shards: bool) -> CheckpointMetadata:
    """The metadata, with a note if the optimizer's ``step`` is not ``global_steps - skipped_steps``.

    Under ZeRO-3 with ``check_shards``, any difference but one step more is a :class:`DamagedError`.
    """
    steps = {value for saved in metadata.parameters.values() for key, value in saved.scalars if key == "step"}
    expected = int(model.counters["global_steps"]) - int(model.counters["skipped_steps"])
    if not steps or steps == {expected}:
        return metadata
    found = ", ".join(f"{step:g}" for step in sorted(steps))
    note = f"optimizer states are at step {found}, counters at {expected}: as after a reset of the optimizer"
    if steps == {expected + 1}:
        # FP16_Optimizer and FP16_UnfusedOptimizer step once, on zero gradients, when they are built
        if model.optimizer is not None and model.optimizer.kind != PLAIN:
            return metadata
        note = _ONE_MORE
    elif check_shards and metadata.source.zero_stage == 3:
        raise DamagedError(
            "optimizer states and counters are of different steps: files of two saves may be mixed in this folder",
            file=model.path,
            expected=f"optimizer step {expected}, from global_steps and skipped_steps",
            found=f"optimizer step {found}",
            remedy=(
                "take another tag; if the optimizer was reset during the run, which explains it: "
                '"elastic_checkpoint": {"check_shards": false}'
            ),
        )
    return replace(metadata, notes=(*metadata.notes, note))


def spot_check(
    metadata: CheckpointMetadata, path: str, weights: Mapping[str, TensorRef], files: Collection[int]
) -> None:
    """Compare a few masters in each of some files with the low-precision weights saved beside them. Local.

    ``files`` are indices in ``metadata.files``. ``weights`` are the entries of ``path`` by parameter, as in the
    universal checkpoints of stages 1 and 2 too; ZeRO-3 has none, and nothing is compared.

    Raises:
        DamagedError: they differ.
        MismatchError: they differ without ZeRO, where parameters are matched by their order.
    """
    checked: Counter[int] = Counter()
    # without partitions, values also prove which parameter is which: compare all of them
    most = _PARAMETERS if metadata.source.zero_stage else len(metadata.parameters)
    for name, weight in weights.items():
        tensor = metadata.tensors.get((name, MASTER)) if name in metadata.parameters else None
        if tensor is None or weight.shape != tensor.shape:
            continue
        for chunk in tensor.chunks_in(files):
            if checked[chunk.file] >= most or not weight.is_contiguous:
                continue
            checked[chunk.file] += 1
            count, start, file = min(_ELEMENTS, chunk.range.numel), chunk.range.start, metadata.files[chunk.file].path
            masters = _read(file, chunk.byte_offset, count, tensor.dtype)
            saved = _read(path, weight.byte_offset + start * ITEMSIZE[weight.dtype], count, weight.dtype)
            if agrees_when_rounded(masters, saved, weight.dtype):
                continue
            is_partitioned = metadata.source.zero_stage > 0
            error, problem, remedy = _OTHER_RUN if is_partitioned else _OTHER_ORDER
            where = f" from element {start} on, as in {path}" if is_partitioned else ""
            raise error(
                problem,
                parameter=name,
                file=file,
                expected=f"{_first(saved)} ...{where}",
                found=f"{_first(masters)} ...",
                remedy=remedy,
            )


def _first(values: np.ndarray[Any, Any]) -> str:
    return ", ".join(f"{value:.5g}" for value in values[:4].tolist())


def _read(path: str, offset: int, numel: int, dtype: str) -> np.ndarray[Any, Any]:
    descriptor = open_descriptor(path)
    try:
        return to_numbers(dtype, os.pread(descriptor, numel * ITEMSIZE[dtype], offset))
    finally:
        os.close(descriptor)

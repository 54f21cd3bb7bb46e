"""Metadata of a large model's checkpoint, without tensors or files. Pure.

Only the contents of files are simulated; :func:`elastic_ckpt.formats.assembling.assemble` joins them as in a load.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence

from elastic_ckpt.core.declared import declared_by
from elastic_ckpt.core.metadata import ITEMSIZE, CheckpointMetadata
from elastic_ckpt.core.training_state import Features
from elastic_ckpt.formats.assembling import Kind, assemble
from elastic_ckpt.formats.base import Found, MetadataOptions
from elastic_ckpt.formats.degrees import StatedDegrees
from elastic_ckpt.formats.layers import LayerShard
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import TensorRef
from elastic_ckpt.formats.saved_states import StatesOfOne
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard
from elastic_ckpt.tools.virtual.job import START_ALIGNMENT
from elastic_ckpt.tools.virtual.scale_config import Parameter, ScaleModel, Shape

#: Folder of such a checkpoint.
FOLDER = "/virtual"
_FP32 = "float32"
#: ``torch.save`` aligns every tensor to this many bytes, behind a header of its zip archive.
_ALIGNMENT_NBYTES, _HEADER_NBYTES = 64, 64
#: Typical sizes of the pickled object before the tensors, and of the archive's directory behind them.
_PICKLE_NBYTES, _DIRECTORY_NBYTES = 1 << 14, 1 << 12

#: Names and shapes of the parameters of each param group, on one rank.
Shapes = tuple[tuple[tuple[str, Shape], ...], ...]


def scale_metadata(model: ScaleModel) -> CheckpointMetadata:
    """Metadata of a large model's checkpoint. Raises :class:`ElasticCkptError` if no such checkpoint can exist."""
    folder, tp, dp = os.path.join(FOLDER, model.name, model.saved.tag), model.saved.tp, model.saved.dp
    parameters = list(model.every_parameter())
    kinds: list[Kind] = []
    indexed: list[ModelShard | OptimizerShard | LayerShard] = []
    for mp in range(len(model.saved.stages) * tp):
        shapes = _shapes(model, parameters, mp // tp)
        kinds += [(mp, 0, "model"), *((mp, rank, "optimizer") for rank in range(dp))]
        indexed.append(_model_shard(model, folder, mp, shapes))
        indexed += [_optimizer_shard(model, folder, mp, rank, shapes) for rank in range(dp)]
    layers: dict[int, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        layers[parameter.layer].append(parameter)
    for layer in sorted(layers):
        kinds += [(layer, rank, "layer") for rank in range(tp)]
        indexed += [_layer_shard(model, folder, layer, rank, layers[layer]) for rank in range(tp)]
    files = sort_names([os.path.basename(item.path) for item in indexed], is_universal=False)
    return assemble(Found("native", folder, model.saved.tag, files), kinds, indexed, MetadataOptions()).metadata


class _File:
    """A file of consecutive tensors, as ``torch.save`` writes it; ``nbytes``: its size so far."""

    def __init__(self) -> None:
        self.nbytes = _PICKLE_NBYTES + _DIRECTORY_NBYTES

    def tensor(self, shape: Shape, dtype: str) -> TensorRef:
        after_header = self.nbytes - _DIRECTORY_NBYTES + _HEADER_NBYTES
        start = -(-after_header // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        self.nbytes = start + math.prod(shape) * ITEMSIZE[dtype] + _DIRECTORY_NBYTES
        return TensorRef(dtype, shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), start)


def _shapes(model: ScaleModel, parameters: Sequence[Parameter], stage: int) -> Shapes:
    groups: list[list[tuple[str, Shape]]] = [[] for _ in model.groups]
    for parameter in parameters:
        if stage in parameter.stages:
            groups[model.group_of(parameter)].append((parameter.name, parameter.shard_shape(model.saved.tp)))
    return tuple(map(tuple, groups))


def _model_shard(model: ScaleModel, folder: str, mp: int, shapes: Shapes) -> ModelShard:
    saved = model.saved
    return ModelShard(
        path=os.path.join(folder, f"mp_rank_{mp:02d}_model_states.pt"),
        nbytes=_PICKLE_NBYTES + _DIRECTORY_NBYTES,
        dp_rank=0,
        param_shapes=shapes,
        weights={},
        buffers=(),
        buffers_crc32=0,
        frozen_shapes=(),
        frozen_fragments={},
        frozen_recorded=False,
        shared={},
        counters={
            "global_steps": saved.step,
            "global_samples": saved.step,
            "skipped_steps": 0,
            "dp_world_size": saved.dp,
            "mp_world_size": saved.tp,
        },
        ds_version=saved.ds_version,
        zero={"stage": saved.zero_stage},
        alignment=1,
        features=Features(),
        optimizer=None,
        stated=StatedDegrees((saved.tp, len(saved.stages)), saved.tp, saved.dp),
        declared=declared_by(model.universal_checkpoint_info),
        run=model.arguments,
    )


def _optimizer_shard(model: ScaleModel, folder: str, mp: int, dp: int, shapes: Shapes) -> OptimizerShard:
    saved, file = model.saved, _File()
    saves_padding = saved.optimizer == "BF16_Optimizer"
    numels = [sum(math.prod(shape) for _, shape in group) for group in shapes]
    unit = saved.dp * START_ALIGNMENT
    partitions = [-(-numel // unit) * unit // saved.dp for numel in numels]
    # the base optimizer's state is pickled before the masters
    states = [StatesOfOne({key: file.tensor((size,), _FP32) for key in model.states}) for size in partitions]
    flats = []
    for numel, partition, mine in zip(numels, partitions, states, strict=True):
        master = partition if saves_padding else min(max(numel - dp * partition, 0), partition)
        flats.append(FlatShard(file.tensor((master,), _FP32), partition, mine))
    name = f"{'bf16_' if saves_padding else ''}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
    return OptimizerShard(
        path=os.path.join(folder, name),
        nbytes=file.nbytes,
        dp_rank=dp,
        partition_count=(saved.dp,) * len(flats),
        zero_stage=saved.zero_stage,
        ds_version=saved.ds_version,
        flats=tuple(flats),
        groups=tuple(group.hyperparameters for group in model.groups),
        flat_groups=tuple(range(len(flats))),
        loss_scaler=None,
        loss_scale=None,
        overflow=False,
        features=Features(),
    )


def _layer_shard(model: ScaleModel, folder: str, layer: int, tp: int, parameters: Sequence[Parameter]) -> LayerShard:
    file, saved = _File(), model.saved
    weights = {each.key: file.tensor(each.shard_shape(saved.tp), saved.weights_dtype) for each in parameters}
    path = os.path.join(folder, f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
    return LayerShard(path, file.nbytes, layer, tp, weights)

"""The checkpoint that a big model would have been saved in, without a tensor and without a file. Pure.

Everything behind the opening of files is that of a real load: here the contents of each file are made up, and
:func:`elastic_ckpt.formats.assembling.assemble` makes a metadata of them, as it does of real ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property

from elastic_ckpt.core.declared import declared_by
from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.features import Features
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.formats.assembling import Kind, assemble
from elastic_ckpt.formats.base import Found, MetadataOptions
from elastic_ckpt.formats.degrees import StatedDegrees
from elastic_ckpt.formats.layers import LayerShard
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import TensorRef
from elastic_ckpt.formats.saved_states import StatesOfOne
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard
from elastic_ckpt.tools.virtual.scale_config import Parameter, ScaleModel, Shape

#: Folder that such a checkpoint claims to lie in.
FOLDER = "/virtual"
_FP32 = "float32"
#: ``torch.save`` starts every tensor at a multiple of so many bytes, behind a header of its zip archive.
_ALIGNMENT_NBYTES, _HEADER_NBYTES = 64, 64
#: The pickled object before the tensors, and the directory of the archive behind them: about as long as real ones.
_PICKLE_NBYTES, _DIRECTORY_NBYTES = 1 << 14, 1 << 12
#: Stages 1 and 2 pad each group to a multiple of so many elements a rank (``nccl_start_alignment_factor``).
_START_ALIGNMENT = 2

Shapes = tuple[tuple[tuple[str, Shape], ...], ...]


def scale_metadata(model: ScaleModel) -> CheckpointMetadata:
    """What the checkpoint of a big model holds.

    Raises:
        ElasticCkptError: such a checkpoint could not be.
    """
    return _Imagined(model).metadata()


class _File:
    """Lays tensors out one behind the other, as ``torch.save`` does."""

    def __init__(self) -> None:
        self._position = _PICKLE_NBYTES

    def tensor(self, shape: Shape, dtype: str) -> TensorRef:
        """The next tensor."""
        after_header = self._position + _HEADER_NBYTES
        start = -(-after_header // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        self._position = start + math.prod(shape) * ITEMSIZE[dtype]
        return TensorRef(dtype, shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), start)

    @property
    def nbytes(self) -> int:
        """Size of the file, if nothing more comes."""
        return self._position + _DIRECTORY_NBYTES


class _Imagined:
    """The files of one checkpoint."""

    def __init__(self, model: ScaleModel) -> None:
        self._model = model
        self._saved = model.saved
        self._folder = os.path.join(FOLDER, model.name, model.saved.tag)
        self._parameters = list(model.every_parameter())
        self._declared = declared_by(model.universal_checkpoint_info)

    @property
    def _pp(self) -> int:
        return len(self._saved.stages)

    def metadata(self) -> CheckpointMetadata:
        """The metadata of all files."""
        kinds: list[Kind] = []
        indexed: list[ModelShard | OptimizerShard | LayerShard] = []
        for mp in range(self._pp * self._saved.tp):
            shapes = self._shapes(mp // self._saved.tp)
            kinds.append((mp, 0, "model"))
            indexed.append(self._model_shard(mp, shapes))
            kinds += [(mp, dp, "optimizer") for dp in range(self._saved.dp)]
            indexed += [self._optimizer_shard(mp, dp, shapes) for dp in range(self._saved.dp)]
        for layer, parameters in self._layers.items():
            kinds += [(layer, tp, "layer") for tp in range(self._saved.tp)]
            indexed += [self._layer_shard(layer, tp, parameters) for tp in range(self._saved.tp)]
        names = [os.path.basename(item.path) for item in indexed]
        files = sort_names(names, is_universal=False)
        found = Found("native", self._folder, self._saved.tag, files)
        return assemble(found, kinds, indexed, MetadataOptions()).metadata

    @cached_property
    def _layers(self) -> Mapping[int, Sequence[Parameter]]:
        layers: dict[int, list[Parameter]] = {}
        for parameter in self._parameters:
            layers.setdefault(parameter.layer, []).append(parameter)
        return dict(sorted(layers.items()))

    def _shapes(self, stage: int) -> Shapes:
        """Names and shapes of each param group of one pipeline stage, on each of its tensor-parallel ranks."""
        groups: list[list[tuple[str, Shape]]] = [[] for _ in self._model.groups]
        for parameter in self._parameters:
            if stage in parameter.stages:
                groups[self._model.group_of(parameter)].append((parameter.name, parameter.shard_shape(self._saved.tp)))
        return tuple(map(tuple, groups))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _model_shard(self, mp: int, shapes: Shapes) -> ModelShard:
        saved = self._saved
        return ModelShard(
            path=self._path(f"mp_rank_{mp:02d}_model_states.pt"),
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
            stated=StatedDegrees((saved.tp, self._pp), saved.tp, saved.dp),
            declared=self._declared,
            run=self._model.arguments,
        )

    def _optimizer_shard(self, mp: int, dp: int, shapes: Shapes) -> OptimizerShard:
        saved, file = self._saved, _File()
        partitions, masters = [], []
        for group in shapes:
            numel = sum(math.prod(shape) for _, shape in group)
            unit = saved.dp * _START_ALIGNMENT
            partition = -(-numel // unit) * unit // saved.dp
            held = min(max(numel - dp * partition, 0), partition)
            partitions.append(partition)
            masters.append(partition if saved.optimizer == "BF16_Optimizer" else held)
        # the base optimizer's state is pickled before the masters
        states = [
            StatesOfOne({key: file.tensor((partition,), _FP32) for key in self._model.states})
            for partition in partitions
        ]
        flats = tuple(
            FlatShard(file.tensor((master,), _FP32), partition, held)
            for master, partition, held in zip(masters, partitions, states, strict=True)
        )
        prefix = "bf16_" if saved.optimizer == "BF16_Optimizer" else ""
        return OptimizerShard(
            path=self._path(f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"),
            nbytes=file.nbytes,
            dp_rank=dp,
            partition_count=(saved.dp,) * len(flats),
            zero_stage=saved.zero_stage,
            ds_version=saved.ds_version,
            flats=flats,
            groups=tuple(group.hyperparameters for group in self._model.groups),
            flat_groups=tuple(range(len(flats))),
            loss_scaler=None,
            loss_scale=None,
            overflow=False,
            features=Features(),
        )

    def _layer_shard(self, layer: int, tp: int, parameters: Sequence[Parameter]) -> LayerShard:
        file, dtype = _File(), self._saved.weights_dtype
        weights = {parameter.key: file.tensor(parameter.shard_shape(self._saved.tp), dtype) for parameter in parameters}
        path = self._path(f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
        return LayerShard(path, file.nbytes, layer, tp, weights)

"""Checkpoints of large models, without tensors or files, as the JSON files in ``benchmarks/models`` describe them.

Only the contents of files are simulated; :mod:`elastic_ckpt.formats` reads and joins them as in a load.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from elastic_ckpt.core.flat_ranges import per_parameter_numel
from elastic_ckpt.core.fqn import EXPERTS
from elastic_ckpt.core.metadata import ITEMSIZE, CheckpointMetadata
from elastic_ckpt.formats.assembling import assemble
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.merging import ExpertShard, LayerShard
from elastic_ckpt.formats.model_states import ModelShard, model_indexer
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import StatesOfOne
from elastic_ckpt.formats.shards import FlatShard, OptimizerShard, build_shard
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.planning.live_names import name_states
from elastic_ckpt.tools.virtual import START_ALIGNMENT

Shape = tuple[int, ...]
Positive = Annotated[int, Field(gt=0, le=1 << 50)]
#: A multiple of a named size: ``h``, ``4h``.
_SIZE = re.compile(r"([1-9]\d{0,3})?([a-z]+)")
_DIMS = {"column": 0, "row": 1}
MODELS = Path(__file__).parent / "models"
#: Folder of such a checkpoint.
FOLDER = "/virtual"
_FP32 = "float32"
#: ``torch.save`` aligns every tensor to this many bytes, behind a header of its zip archive.
_ALIGNMENT_NBYTES, _HEADER_NBYTES = 64, 64
#: Typical sizes of the pickled object before the tensors, and of the archive's directory behind them.
_PICKLE_NBYTES, _DIRECTORY_NBYTES = 1 << 14, 1 << 12
#: Most elements in a param group of experts (``split_params_into_different_moe_groups_for_optimizer``).
_EXPERT_GROUP_NUMEL = 178_956_971
Indexed = ModelShard | OptimizerShard | LayerShard | ExpertShard


class ParameterTemplate(BaseModel, extra="forbid", frozen=True):
    """A parameter of a layer, of a logical shape such as ``["3h", "h"]``.

    ``column`` shards dimension 0, ``row`` dimension 1. ``first_only``: only a tied layer's first occurrence has it.
    """

    name: str
    shape: Annotated[list[str], Field(min_length=1, max_length=4)]
    cut: Literal["column", "row", "replicated"] = "replicated"
    first_only: bool = False


class LayerTemplate(BaseModel, extra="forbid", frozen=True):
    """``count`` consecutive layers of the same parameters, from layer ``first`` of the pipeline on.

    Their parameters are named ``<prefix>.*``, where the layer's number replaces ``{}``. A layer with the key ``tied``
    has parameters named ``tied_modules.<key>.*``, and occurs ``again`` at other layers. ``experts``: each is the
    ``MoE`` layer at ``<prefix>``, and the parameters are those of each of so many experts.
    """

    prefix: str = "{}"
    first: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(gt=0, le=10_000)] = 1
    tied: str | None = None
    again: list[int] = []
    experts: Annotated[int, Field(ge=0, le=1024)] = 0
    parameters: Annotated[list[ParameterTemplate], Field(min_length=1)]

    @model_validator(mode="after")
    def _ties_are_of_one_layer(self) -> LayerTemplate:
        if self.tied is None and (self.again or any(parameter.first_only for parameter in self.parameters)):
            raise ValueError('"again" and "first_only" belong to a tied layer')
        if self.tied is not None and self.count > 1:
            raise ValueError("a tied layer is one layer")
        return self


class SavedAs(BaseModel, extra="forbid", frozen=True):
    """The run that saved it; ``stages``: first layer of each pipeline stage.

    ZeRO stage 1 with a pipeline's files, or of a model with experts, which ``ep`` ranks divide; or stage 3 without
    model parallelism and with one sub-group per param group. Of the ``optimizer`` classes of stage 1,
    ``BF16_Optimizer`` saves the padding of its partitions.
    """

    tag: str
    step: Positive
    ds_version: str
    tp: Annotated[int, Field(gt=0, le=1024)]
    dp: Annotated[int, Field(gt=0, le=4096)]
    ep: Annotated[int, Field(gt=0, le=4096)] = 1
    stages: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=1024)]
    zero_stage: Literal[1, 3] = 1
    optimizer: Literal["BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"]
    weights_dtype: Literal["bfloat16", "float16", "float32"]

    @model_validator(mode="after")
    def _stages_ascend(self) -> SavedAs:
        if self.stages[0] != 0 or sorted(set(self.stages)) != self.stages:
            raise ValueError('"stages" are the first layers of the stages: 0, and then ascending')
        is_zero3 = self.zero_stage == 3
        if is_zero3 != self.optimizer.endswith("3") or (is_zero3 and self.tp * len(self.stages) > 1):
            raise ValueError("ZeRO-3 has an optimizer of its own, and no model parallelism here")
        return self


class GroupTemplate(BaseModel, extra="forbid", frozen=True):
    """A param group: all vectors or all matrices, and their hyperparameters; of experts, as many as DeepSpeed makes."""

    holds: Literal["matrices", "vectors", "experts"]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model, of logical ``shape``.

    Attributes:
        name, key: name in DeepSpeed's pipeline, and within its layer.
        dim: the sharded dimension, or ``None`` if replicated.
        layer, stages: first occurrence of its layer; pipeline stages that have it.
        expert, ep_rank: whose it is in an ``MoE`` layer, and which expert-parallel rank has it; 0: every one.
    """

    name: str
    shape: Shape
    dim: int | None
    layer: int
    key: str
    stages: tuple[int, ...]
    expert: int | None = None
    ep_rank: int = 0

    def shard_shape(self, tp: int) -> Shape:
        """Shape of each of ``tp`` shards."""
        return tuple(size // tp if dim == self.dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class _FlatGroup:
    """A param group on expert-parallel rank 0.

    Attributes:
        hyperparameters, shapes: of the group; names and shapes of its parameters.
        numel, partition: elements of all parameters, and of each rank's partition.
        partitions: the ranks that divide it.
    """

    hyperparameters: Mapping[str, Any]
    shapes: tuple[tuple[str, Shape], ...]
    numel: int
    partition: int
    partitions: int


class ScaleModel(BaseModel, extra="forbid", frozen=True):
    """A model and its checkpoint.

    Attributes:
        parameters: number of elements, tied ones counted once; verified.
        preset: tensor-parallel rules, unless the checkpoint declares them.
        arguments: Megatron's ``args`` that rules refer to.
        sizes, layers: named sizes for the shapes of templates; the pipeline's layers with parameters.
        states: the optimizer's tensor states, fp32.
    """

    name: str
    description: str
    parameters: Positive
    saved: SavedAs
    preset: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    universal_checkpoint_info: dict[str, Any] = Field(default_factory=dict)
    sizes: dict[str, Positive]
    states: list[str]
    groups: Annotated[list[GroupTemplate], Field(min_length=1)]
    layers: Annotated[list[LayerTemplate], Field(min_length=1)]

    @classmethod
    def names(cls) -> list[str]:
        """The models in ``benchmarks/models``."""
        return sorted(path.stem for path in MODELS.glob("*.json"))

    @classmethod
    def load(cls, name: str) -> ScaleModel:
        """One of them."""
        return cls.model_validate_json((MODELS / f"{name}.json").read_bytes())

    @model_validator(mode="after")
    def _fits_together(self) -> ScaleModel:
        every = self.every_parameter()
        for parameter in every:
            self.group_of(parameter)
            if parameter.dim is not None and (
                len(parameter.shape) <= parameter.dim or parameter.shape[parameter.dim] % self.saved.tp
            ):
                raise ValueError(f"{parameter.name} {parameter.shape} does not divide by {self.saved.tp} ranks")
        if len({parameter.name for parameter in every}) < len(every):
            raise ValueError("two layers have the same number")
        count = sum(math.prod(parameter.shape) for parameter in every)
        if count != self.parameters:
            raise ValueError(f'the layers have {count} parameters, and "parameters" says {self.parameters}')
        saved, experts = self.saved, {layer.experts for layer in self.layers if layer.experts}
        if any(each % saved.ep for each in (saved.dp, *experts)) or (saved.ep > 1 and not experts):
            raise ValueError(f"{saved.ep} expert-parallel ranks do not divide {saved.dp} ranks and {experts} experts")
        if experts and (saved.zero_stage == 3 or saved.tp * len(saved.stages) > 1):
            raise ValueError("experts are saved with ZeRO-1, and without model parallelism here")
        return self

    def every_parameter(self) -> list[Parameter]:
        """All parameters: tied ones first, as a ``PipelineModule`` lists them, then layer by layer."""
        layers = sorted(self.layers, key=lambda layer: (layer.tied is None, layer.first))
        numbered = ((layer, number) for layer in layers for number in range(layer.first, layer.first + layer.count))
        return list(chain.from_iterable(self._of_layer(*each) for each in numbered))

    def _of_layer(self, layer: LayerTemplate, number: int) -> Iterator[Parameter]:
        made = [self._parameter(layer, number, template) for template in layer.parameters]
        if not layer.experts:
            yield from made
        prefix = f"{layer.prefix.format(number)}.{EXPERTS}"
        for expert, each in product(range(layer.experts), made):
            name, ep_rank = f"{prefix}{expert}.{each.key}", expert * self.saved.ep // layer.experts
            yield Parameter(name, each.shape, each.dim, number, each.key, each.stages, expert, ep_rank)

    def _parameter(self, layer: LayerTemplate, number: int, template: ParameterTemplate) -> Parameter:
        prefix = layer.prefix.format(number) if layer.tied is None else f"tied_modules.{layer.tied}"
        numbers = [number, *([] if template.first_only else layer.again)]
        stages = tuple(sorted({bisect_right(self.saved.stages, at) - 1 for at in numbers}))
        shape = tuple(self._size(size) for size in template.shape)
        return Parameter(f"{prefix}.{template.name}", shape, _DIMS.get(template.cut), number, template.name, stages)

    def _size(self, text: str) -> int:
        match = _SIZE.fullmatch(text)
        if match is None or match[2] not in self.sizes:
            raise ValueError(f"{text!r} is no size: give a number of one of {', '.join(self.sizes)}, such as 4h")
        return int(match[1] or 1) * self.sizes[match[2]]

    def group_of(self, parameter: Parameter) -> int:
        """Index of a parameter's param group. Raises :class:`ValueError` if it has none."""
        kind = "matrices" if len(parameter.shape) > 1 else "vectors"
        kind = kind if parameter.expert is None else "experts"
        for number, group in enumerate(self.groups):
            if group.holds == kind:
                return number
        raise ValueError(f"no param group holds {kind}, such as {parameter.name}")


def scale_metadata(model: ScaleModel) -> CheckpointMetadata:
    """Metadata of a large model's checkpoint. Raises :class:`ElasticCkptError` if no such checkpoint can exist."""
    return assemble(*scale_files(model), MetadataOptions(), name_states).metadata


def scale_files(model: ScaleModel) -> tuple[CheckpointInfo, list[int], list[Indexed]]:
    """The folder of a large model's checkpoint, and the model-parallel rank and contents of each file."""
    folder, tp, dp = os.path.join(FOLDER, model.name, model.saved.tag), model.saved.tp, model.saved.dp
    parameters = model.every_parameter()
    mp_ranks: list[int] = []
    indexed: list[Indexed] = []
    for mp in range(len(model.saved.stages) * tp):
        groups = _flat_groups(model, parameters, mp // tp)
        models = _model_shards(model, folder, mp, parameters, groups)
        mp_ranks += [mp] * (len(models) + dp)
        indexed += [*models, *(_optimizer_shard(model, folder, mp, rank, groups) for rank in range(dp))]
    experts = list(_expert_shards(model, folder, parameters))
    layers: dict[int, list[Parameter]] = defaultdict(list)
    for parameter in parameters if model.saved.zero_stage < 3 and not experts else ():
        layers[parameter.layer].append(parameter)
    for layer in sorted(layers):
        mp_ranks += [-1] * tp
        indexed += [_layer_shard(model, folder, layer, rank, layers[layer]) for rank in range(tp)]
    mp_ranks += [0] * len(experts)
    indexed += experts
    files = sort_names([os.path.basename(item.path) for item in indexed], is_universal=False)
    return CheckpointInfo("native", folder, model.saved.tag, files), mp_ranks, indexed


class _File:
    """A file of consecutive tensors, as ``torch.save`` writes it; ``nbytes``: its size so far."""

    def __init__(self) -> None:
        self.nbytes = _PICKLE_NBYTES + _DIRECTORY_NBYTES

    def tensor(self, shape: Shape, dtype: str) -> TensorRef:
        after_header = self.nbytes - _DIRECTORY_NBYTES + _HEADER_NBYTES
        start = -(-after_header // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        self.nbytes = start + math.prod(shape) * ITEMSIZE[dtype] + _DIRECTORY_NBYTES
        return TensorRef(dtype, shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), start)


def _flat_groups(model: ScaleModel, parameters: Sequence[Parameter], stage: int) -> list[_FlatGroup]:
    saved, found = model.saved, []
    for number, group in enumerate(model.groups):
        runs: list[list[tuple[str, Shape]]] = [[]]
        numel, most = 0, _EXPERT_GROUP_NUMEL if group.holds == "experts" else math.inf
        for each in parameters:
            if stage in each.stages and each.ep_rank == 0 and model.group_of(each) == number:
                shape = each.shard_shape(saved.tp)
                numel += math.prod(shape)
                if numel > most and runs[-1]:
                    runs.append([])
                    numel = math.prod(shape)
                runs[-1].append((each.name, shape))
        ep = saved.ep if group.holds == "experts" else 1
        more = {"moe": True, "name": f"ep_size_{ep}"} if group.holds == "experts" else {}
        for run in runs:
            numels, dp = [math.prod(shape) for _, shape in run], saved.dp // ep
            partition = -(-sum(numels) // (dp * START_ALIGNMENT)) * START_ALIGNMENT
            if saved.zero_stage == 3:
                partition = sum(per_parameter_numel(numel, saved.dp) for numel in numels)
            found.append(_FlatGroup({**group.hyperparameters, **more}, tuple(run), sum(numels), partition, dp))
    return found


def _model_shards(
    model: ScaleModel, folder: str, mp: int, parameters: Sequence[Parameter], groups: Sequence[_FlatGroup]
) -> list[ModelShard]:
    """Of ZeRO-1 a single file, of ZeRO-3 one of each rank."""
    saved, index, simulated = model.saved, model_indexer(), _File()
    experts = [layer.experts for layer in model.layers if layer.experts for _ in range(layer.count)]
    dense = [each for each in parameters if each.expert is None] if experts else []
    tree = {
        "module": {each.name: simulated.tensor(each.shape, saved.weights_dtype) for each in dense} or None,
        "buffer_names": [],
        "param_shapes": [dict(group.shapes) for group in groups],
        "global_steps": saved.step,
        "global_samples": saved.step,
        "skipped_steps": 0,
        "dp_world_size": saved.dp,
        "mp_world_size": saved.tp,
        "checkpoint_parallel_dimensions": {"tp_degree": saved.tp, "pp_degree": len(saved.stages)},
        "ds_version": saved.ds_version,
        "ds_config": {"zero_optimization": {"stage": saved.zero_stage}},
        "universal_checkpoint_info": model.universal_checkpoint_info,
        "args": model.arguments,
        "num_experts": experts,
    }
    names = [f"mp_rank_{mp:02d}_model_states.pt"]
    if saved.zero_stage == 3:
        names = [f"zero_pp_rank_{rank}_{names[0]}" for rank in range(saved.dp)]
    files = [PickledFile(os.path.join(folder, name), simulated.nbytes, tree) for name in names]
    return list(map(index, files))


def _optimizer_shard(model: ScaleModel, folder: str, mp: int, dp: int, groups: Sequence[_FlatGroup]) -> OptimizerShard:
    saved, simulated = model.saved, _File()
    saves_padding = saved.optimizer != "DeepSpeedZeroOptimizer"
    # the base optimizer's state is pickled before the masters
    states = [StatesOfOne({key: simulated.tensor((g.partition,), _FP32) for key in model.states}) for g in groups]
    flats = []
    for group, mine in zip(groups, states, strict=True):
        partition, first = group.partition, dp // (saved.dp // group.partitions) * group.partition
        master = partition if saves_padding else min(max(group.numel - first, 0), partition)
        flats.append(FlatShard(simulated.tensor((master,), _FP32), partition, mine))
    prefix = "bf16_" if saved.weights_dtype == "bfloat16" else ""
    name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
    counts = {"partition_count": [group.partitions for group in groups]}
    tree = {"ds_version": saved.ds_version, "optimizer_state_dict": counts}
    file = PickledFile(os.path.join(folder, name), simulated.nbytes, tree)
    hyperparameters = [group.hyperparameters for group in groups]
    return build_shard(file, saved.zero_stage, flats, hyperparameters, list(range(len(flats))))


def _expert_shards(model: ScaleModel, folder: str, parameters: Sequence[Parameter]) -> Iterator[ExpertShard]:
    of_experts = (each for each in parameters if each.expert is not None)
    layers = groupby(of_experts, key=lambda each: each.layer)
    for layer, (_, members) in enumerate(layers):
        for expert, mine in groupby(members, key=lambda each: each.expert or 0):
            file = _File()
            weights = {each.name: file.tensor(each.shape, model.saved.weights_dtype) for each in mine}
            path = os.path.join(folder, f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
            yield ExpertShard(path, file.nbytes, layer, expert, weights)


def _layer_shard(model: ScaleModel, folder: str, layer: int, tp: int, parameters: Sequence[Parameter]) -> LayerShard:
    file, saved = _File(), model.saved
    weights = {each.key: file.tensor(each.shard_shape(saved.tp), saved.weights_dtype) for each in parameters}
    path = os.path.join(folder, f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
    return LayerShard(path, file.nbytes, layer, tp, weights)

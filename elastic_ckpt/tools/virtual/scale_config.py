"""The JSON files in ``configs/scale``: checkpoints of large models, by parameter templates. Pure."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from elastic_ckpt.sharding.book import ReadyConfig

Shape = tuple[int, ...]
Positive = Annotated[int, Field(gt=0, le=1 << 50)]
#: A multiple of a named size: ``h``, ``4h``.
_SIZE = re.compile(r"([1-9]\d{0,3})?([a-z]+)")
_DIMS = {"column": 0, "row": 1}


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

    A layer with the key ``tied`` has parameters named ``tied_modules.<key>.*``, and occurs ``again`` at other layers.
    """

    first: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(gt=0, le=10_000)] = 1
    tied: str | None = None
    again: list[int] = []
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

    Only ZeRO stage 1 is supported, since others lay out files differently. Of the ``optimizer`` classes,
    ``BF16_Optimizer`` saves the padding of its partitions.
    """

    tag: str
    step: Positive
    ds_version: str
    tp: Annotated[int, Field(gt=0, le=1024)]
    dp: Annotated[int, Field(gt=0, le=4096)]
    stages: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=1024)]
    zero_stage: Literal[1] = 1
    optimizer: Literal["BF16_Optimizer", "DeepSpeedZeroOptimizer"]
    weights_dtype: Literal["bfloat16", "float16", "float32"]

    @model_validator(mode="after")
    def _stages_ascend(self) -> SavedAs:
        if self.stages[0] != 0 or sorted(set(self.stages)) != self.stages:
            raise ValueError('"stages" are the first layers of the stages: 0, and then ascending')
        return self


class GroupTemplate(BaseModel, extra="forbid", frozen=True):
    """A param group: all vectors or all matrices, and their hyperparameters."""

    holds: Literal["matrices", "vectors"]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model, of logical ``shape``.

    Attributes:
        name, key: name in DeepSpeed's pipeline, and within its layer.
        dim: the sharded dimension, or ``None`` if replicated.
        layer, stages: first occurrence of its layer; pipeline stages that have it.
    """

    name: str
    shape: Shape
    dim: int | None
    layer: int
    key: str
    stages: tuple[int, ...]

    def shard_shape(self, tp: int) -> Shape:
        """Shape of each of ``tp`` shards."""
        return tuple(size // tp if dim == self.dim else size for dim, size in enumerate(self.shape))


class ScaleModel(ReadyConfig):
    """A model and its checkpoint.

    Attributes:
        parameters: number of elements, tied ones counted once; verified.
        preset: tensor-parallel rules, unless the checkpoint declares them.
        arguments: Megatron's ``args`` that rules refer to.
        sizes, layers: named sizes for the shapes of templates; the pipeline's layers with parameters.
        states: the optimizer's tensor states, fp32.
    """

    FOLDER = "scale"
    CALLED = "model"
    UNREADABLE = "this file does not describe a model"
    EXPECTED = "what the files in configs/scale say"
    REMEDY = "--model {name}"

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

    @model_validator(mode="after")
    def _fits_together(self) -> ScaleModel:
        every = list(self.every_parameter())
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
        return self

    def every_parameter(self) -> Iterator[Parameter]:
        """All parameters: tied ones first, as a ``PipelineModule`` lists them, then layer by layer."""
        for layer in sorted(self.layers, key=lambda layer: (layer.tied is None, layer.first)):
            for number in range(layer.first, layer.first + layer.count):
                for template in layer.parameters:
                    yield self._parameter(layer, number, template)

    def _parameter(self, layer: LayerTemplate, number: int, template: ParameterTemplate) -> Parameter:
        prefix = str(number) if layer.tied is None else f"tied_modules.{layer.tied}"
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
        for number, group in enumerate(self.groups):
            if group.holds == kind:
                return number
        raise ValueError(f"no param group holds {kind}, such as {parameter.name}")

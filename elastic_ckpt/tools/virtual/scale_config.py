"""The JSON files in ``configs/scale``: what the checkpoint of a big model holds, by parameter templates. Pure."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from elastic_ckpt.sharding.presets import ReadyConfig

Shape = tuple[int, ...]
Positive = Annotated[int, Field(gt=0, le=1 << 50)]
#: A size in terms of a named one: ``h``, ``4h``.
_SIZE = re.compile(r"([1-9]\d{0,3})?([a-z]+)")
_DIMS = {"column": 0, "row": 1}


class ParameterTemplate(BaseModel, extra="forbid", frozen=True):
    """A parameter of a layer.

    Attributes:
        name: within the layer.
        shape: of the whole parameter: ``["3h", "h"]``.
        cut: how tensor-parallel ranks hold it: ``column`` cuts the first dimension, ``row`` the second.
        first_only: whether only the first occurrence of a tied layer has it.
    """

    name: str
    shape: Annotated[list[str], Field(min_length=1, max_length=4)]
    cut: Literal["column", "row", "replicated"] = "replicated"
    first_only: bool = False


class LayerTemplate(BaseModel, extra="forbid", frozen=True):
    """Consecutive layers of the same parameters.

    Attributes:
        first, count: number of the first one in the pipeline, and of layers.
        tied: key of a tied layer, whose parameters are called ``tied_modules.<key>.*``.
        again: numbers of its further occurrences.
        parameters: of each layer, in the order of the module.
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
    """The run that saved it.

    Attributes:
        tp, dp: tensor- and data-parallel degree.
        stages: number of the first layer of each pipeline stage.
        zero_stage: 1; files of other stages are laid out otherwise.
        optimizer: DeepSpeed's class: ``BF16_Optimizer`` saves the padding of its partitions.
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
    """A param group: the parameters of one dimension, or of several, and their hyperparameters."""

    holds: Literal["matrices", "vectors"]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model.

    Attributes:
        name, key: in DeepSpeed's pipeline, and within its layer.
        shape: of the whole.
        dim: the sharded dimension; ``None``: replicated.
        layer: number of its layer's first occurrence.
        stages: pipeline stages that hold it.
    """

    name: str
    shape: Shape
    dim: int | None
    layer: int
    key: str
    stages: tuple[int, ...]

    def shard_shape(self, tp: int) -> Shape:
        """What one of ``tp`` ranks holds."""
        return tuple(size // tp if dim == self.dim else size for dim, size in enumerate(self.shape))


class ScaleModel(ReadyConfig):
    """A model, and the checkpoint of it that is imagined.

    Attributes:
        parameters: number of elements, tied ones counted once; checked.
        preset: rules of tensor parallelism that fit it, where the checkpoint itself declares none.
        arguments: Megatron's ``args``, as far as rules ask for them.
        sizes: named sizes, which the shapes of templates refer to.
        states: tensor states of the optimizer, fp32.
        layers: of the pipeline; those without parameters are left out.
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
        """All parameters of the model: tied ones first, as a ``PipelineModule`` lists them, then layer by layer."""
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
        """The param group that holds a parameter.

        Raises:
            ValueError: none does.
        """
        kind = "matrices" if len(parameter.shape) > 1 else "vectors"
        for number, group in enumerate(self.groups):
            if group.holds == kind:
                return number
        raise ValueError(f"no param group holds {kind}, such as {parameter.name}")

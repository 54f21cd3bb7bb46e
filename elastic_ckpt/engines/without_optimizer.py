"""Live engines without an optimizer, as made for evaluation: nothing owns their parameters, so all count as frozen.

Private attributes used, all of DeepSpeed 0.19: ``partition_all_parameters`` and ``persistent_parameters`` of
``DeepSpeedZeRoOffload``, the engine's ``seq_data_parallel_group``, and ``ds_tensor.final_location`` of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from elastic_ckpt.core.local_state import LocalState, WholeTensor
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.engines.base import FlatOptimizer, ReadPart
from elastic_ckpt.engines.state_schema import StateSchema
from elastic_ckpt.engines.zero3 import Zero3Adapter, gather_anew, partition_group
from elastic_ckpt.errors import UnsupportedError


def _without_masters(engine: Any, schema: StateSchema, dp_group: Any) -> dict[str, Any]:
    """Arguments of :class:`FlatOptimizer` where there is no optimizer."""
    return {
        "module": engine.module,
        "param_names": engine.param_names,
        "base": SimpleNamespace(param_groups=[], defaults={}, state={}),
        "schema": schema,
        "masters": (),
        "groups": (),
        "dp_group": dp_group,
    }


def _marked(adapter: FlatOptimizer, weights: Iterable[WholeTensor]) -> list[WholeTensor]:
    """The same, of which each says whether it is frozen because the model says so."""
    trains = {name: param.requires_grad for param, name in adapter.param_names.items()}
    return [replace(weight, trains=trains[weight.name]) for weight in weights]


class WholeWeightsAdapter(FlatOptimizer):
    """Adapter of an engine without ZeRO: every rank holds all parameters.

    In bf16 DeepSpeed makes a ``BF16_Optimizer`` around a dummy all the same; its masters are never stepped on.
    """

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        super().__init__(**_without_masters(engine, schema, engine.seq_data_parallel_group))

    def _weights(self) -> Mapping[str, torch.Tensor]:
        return {name: param.data for param, name in self.param_names.items()}

    def local_state(self) -> LocalState:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        return self.describe(0, (), (), _marked(self, self.whole_frozen(self._weights())), ())

    def fill(self, plan: ReadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        return self.fill_at_once(plan, read, self._weights())

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
        """Nothing to do: the weights are what was read. Local."""


class PartitionedWeightsAdapter(Zero3Adapter):
    """Adapter of ``DeepSpeedZeRoOffload``, which is ZeRO-3 without an optimizer."""

    def __init__(self, engine: Any, schema: StateSchema) -> None:
        named: Mapping[Any, str] = engine.param_names
        swapped = [name for param, name in named.items() if param.ds_tensor.final_location == OffloadDeviceEnum.nvme]
        if swapped:
            raise UnsupportedError(
                "the live engine has no optimizer and keeps its parameters on NVMe, which is not supported yet",
                parameter=swapped[0],
                expected="parameters on the accelerator, or in host memory",
                found='"offload_param": {"device": "nvme"}',
                remedy='"offload_param": {"device": "cpu"}',
            )
        self._offload = engine.optimizer
        FlatOptimizer.__init__(self, **_without_masters(engine, schema, partition_group(engine)))

    def local_state(self) -> LocalState:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        return self.describe(3, (), (), _marked(self, self._whole_frozen(dist.get_rank(group=self.dp_group))), ())

    def _frozen_params(self) -> Mapping[str, Any]:
        return {name: param for param, name in self.param_names.items()}

    def fill(self, plan: ReadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`.

        Partitions all parameters first: a gathered one would otherwise keep its old values.
        """
        self._offload.partition_all_parameters()
        return self.fill_at_once(plan, read, self._frozen_memory(plan))

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
        """See :class:`elastic_ckpt.engines.base.EngineAdapter`."""
        persistent = self._offload.persistent_parameters
        gather_anew(self.param_names, persistent)
        if persistent:
            persistent[0].all_gather(persistent)  # what is left

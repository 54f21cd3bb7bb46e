"""The adapter of a module before it has an engine, built under ``deepspeed.zero.Init`` or whole on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

from elastic_ckpt.core.flat_ranges import Placement
from elastic_ckpt.core.read_plan import LoadPlan, Parts
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.optimizers import StateSchema
from elastic_ckpt.engines.zero import refuse_unwritable
from elastic_ckpt.errors import UnsupportedError

#: What can be loaded into, for those who give a module on the meta device.
_ELSEWHERE = (
    "the DeepSpeed configuration as ds_config, and buffers with memory, as accelerate.init_empty_weights has them"
)


class ModuleAdapter(EngineAdapter):
    """Adapter of a module, whose parameters no optimizer owns yet; ``ds_config``: of those on the meta device.

    What gives these memory is undone by ``undo``.
    Raises :class:`UnsupportedError` for parameters without memory, or in memory that cannot be written, for a process
    without process group, and for DeepSpeed's experts, which an engine distributes.
    """

    def __init__(self, module: torch.nn.Module, ds_config: Mapping[str, Any] | None, undo: ExitStack) -> None:
        if ds_config is not None and dist.is_initialized():
            _allocate_partitions(module, ds_config, undo)
        params = {param: name for name, param in module.named_parameters()}
        without = [name for name, each in (*module.named_parameters(), *module.named_buffers()) if each.is_meta]
        for present, what, expected in (
            (not dist.is_initialized(), "a module in a process without process group", "deepspeed.init_distributed()"),
            (without, "tensors on the meta device", _ELSEWHERE),
            (any(isinstance(each, MoE) for each in module.modules()), "DeepSpeed's MoE layers", "their engine"),
        ):
            if present:
                problem = f"pretrained weights cannot be loaded into {what}"
                names = ", ".join(without[:3])
                raise UnsupportedError(problem, None, expected, parameter=names or None, remedy=f"give {expected}")
        self._partitioned: list[Any] = [param for param in params if hasattr(param, "ds_tensor")]
        group = next((param.ds_process_group for param in self._partitioned), dist.group.WORLD)
        engine = SimpleNamespace(module=module, optimizer=None, param_names=params, has_moe_layers=False, mpu=None)
        engine.mp_world_size = engine.sequence_parallel_size = 1
        stage = 3 if self._partitioned else 0
        super().__init__(engine, StateSchema(None, known=()), stage, (), (), (), (), group)
        refuse_unwritable(self.frozen, trains=False)

    def placements(self, flat: int) -> Iterable[Placement]:
        return ()

    def fill(self, plan: LoadPlan, tensors: dict[int, torch.Tensor]) -> Parts:
        """Partitions what is gathered first, which would otherwise keep its old values."""
        gathered = [param for param in self._partitioned if param.ds_status == ZeroParamStatus.AVAILABLE]
        if gathered:
            gathered[0].partition(gathered, has_been_updated=False)
        return super().fill(plan, tensors)

    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        for param in self._partitioned:  # hpZ's, from which the next forward pass would gather
            param.ds_secondary_tensor = None


def _allocate_partitions(module: torch.nn.Module, ds_config: Mapping[str, Any], undo: ExitStack) -> None:
    """Give parameters on the meta device memory for this rank's partition, as :class:`Init` would divide whole ones."""
    init = Init(config_dict_or_path=dict(ds_config))
    for param in [param for param in module.parameters() if param.is_meta]:
        dtype = init.dtype if param.is_floating_point() else param.dtype
        value = torch.empty(1, dtype=dtype, device=init.local_device)
        attributes = dict(vars(param))
        other = torch.nn.Parameter(value.expand(param.shape), param.requires_grad)
        torch.utils.swap_tensors(param, other)
        undo.callback(torch.utils.swap_tensors, param, other)
        vars(param).update(attributes)
        init._convert_to_deepspeed_param(param)
        # DeepSpeed divides a copy of the whole parameter: of one value, which is everywhere in it
        param.contiguous = partial(value.expand, param.numel())  # type: ignore[method-assign]
        param.partition()  # type: ignore[attr-defined]
        del param.contiguous

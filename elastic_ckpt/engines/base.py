"""What every live engine provides: its Destinations, the memory behind them, and a commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER
from elastic_ckpt.destinations import Destinations, WholeTensor
from elastic_ckpt.geometry import FlatRange
from elastic_ckpt.plan import Plan, Slot
from elastic_ckpt.states.schema import StateSchema


class EngineAdapter(Protocol):
    """One kind of live ZeRO optimizer."""

    def destinations(self) -> Destinations:
        """Describe what this rank holds. Local, changes nothing."""

    def prepare(self, plan: Plan) -> list[torch.Tensor]:
        """A 1-D tensor for every slot of the plan, allocated where the engine has none yet. Local."""

    def set_scalars_and_groups(self, plan: Plan) -> None:
        """Set scalar states and hyperparameters, where the plan restores them. Local."""

    def refresh_weights(self, plan: Plan, exact_masters: bool) -> None:
        """Derive the low-precision weights from the masters just read. Collective.

        Args:
            plan: the plan that was executed.
            exact_masters: keep the masters that were read; if not, round them through the low-precision
                weights, which is what DeepSpeed does with ``load_optimizer_states=False``.
        """


class FlatOptimizer:
    """What the ZeRO stages share: a base optimizer that steps on a few flat fp32 tensors.

    Args:
        module: the live module.
        param_names: DeepSpeed's map from parameter to name.
        base: the base optimizer.
        schema: which states it keeps.
        masters: the flat fp32 tensors, one a flat partition.
        groups: per flat partition, the index of its param group in ``base.param_groups``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        param_names: Mapping[torch.nn.Parameter, str],
        base: torch.optim.Optimizer,
        schema: StateSchema,
        masters: Sequence[torch.Tensor],
        groups: Sequence[int],
    ) -> None:
        self.module = module
        self.param_names = param_names
        self.base = base
        self.schema = schema
        self.masters = masters
        self.groups = groups

    def ties(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> the other names that the module has for it."""
        names: dict[int, list[str]] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        found = {self.param_names[param]: names.get(id(param), []) for param in self.param_names}
        return {name: tuple(other for other in all_ if other != name) for name, all_ in found.items() if len(all_) > 1}

    def group_hyperparameters(self, number: int) -> dict[str, Any]:
        """Hyperparameters of one live group; DeepSpeedCPUAdam's kind of weight decay is told as torch tells it."""
        group = {key: value for key, value in self.base.param_groups[number].items() if key != "params"}
        if hasattr(self.base, "adam_w_mode"):
            group["decoupled_weight_decay"] = bool(self.base.adam_w_mode)
        return group

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers of the module, by the name they have in its state dict."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.module.named_buffers(remove_duplicate=False) if name in saved}

    def whole_buffers(self) -> list[WholeTensor]:
        """The buffers as destinations."""
        return [
            WholeTensor(name, BUFFER, tuple(b.shape), FlatRange(0, b.numel()), str(b.dtype).removeprefix("torch."))
            for name, b in self.buffers().items()
        ]

    def memory(self, plan: Plan, frozen: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """A tensor for every slot; new optimizer states are allocated, gaps in states are zeroed.

        Args:
            plan: the plan to prepare for.
            frozen: live memory of frozen parameters, by name.
        """
        buffers = self.buffers()
        tensors = []
        for slot in plan.slots:
            if slot.key == MASTER:
                tensors.append(self.masters[slot.flat].data)
            elif slot.key == BUFFER:
                tensors.append(buffers[slot.name].data)
            elif slot.key == FROZEN:
                tensors.append(frozen[slot.name])
            else:
                tensors.append(self._state(slot))
        return tensors

    def _state(self, slot: Slot) -> torch.Tensor:
        master = self.masters[slot.flat]
        state = self.base.state[master]
        tensor = state.get(slot.key)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != master.shape or tensor.dtype != master.dtype:
            state[slot.key] = torch.zeros_like(master.data, memory_format=torch.preserve_format)
            return state[slot.key]
        for gap in slot.gaps:
            tensor[gap.start : gap.stop].zero_()
        return tensor

    def set_scalars_and_groups(self, plan: Plan) -> None:
        """Scalar states of every flat tensor, each an object of its own, and hyperparameters of every group."""
        if not plan.restores_states:
            return
        for number, values in enumerate(plan.hyperparameters):
            set_hyperparameters(self.base.param_groups[number], values)
        for flat, scalars in enumerate(plan.scalars):
            master = self.masters[flat]
            if scalars is None:
                self.base.state.pop(master, None)
                continue
            group = self.base.param_groups[self.groups[flat]]
            for key, value in scalars.items():
                self.base.state[master][key] = self.schema.make_scalar(value, group, master)


def set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set saved values in a live group; a live tensor (a capturable ``lr``) is filled, not replaced."""
    for key, value in values.items():
        live = group.get(key)
        if isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
            live.fill_(value)
        else:
            group[key] = value

"""The states that live base optimizers keep for one flat tensor, and how to allocate and set them.

Optimizers are recognised by class. Their states follow ``torch/optim/*.py`` (2.13),
``deepspeed/ops/{adam,lion,adagrad}``, ``deepspeed/runtime/zero/muon``, and NVIDIA apex's
``apex/optimizers/fused_adam.py``; for bitsandbytes see :mod:`elastic_ckpt.engines.bitsandbytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from elastic_ckpt.core.read_plan import Slot
from elastic_ckpt.core.state_kinds import ELEMENTWISE, TOUCHED, WHOLE, LiveState
from elastic_ckpt.core.values import TensorValue

Group = Mapping[str, Any]
_MASTER_DTYPE = "float32"
#: Where the step count is kept: a tensor or an int in each state, or an int in the param group.
TENSOR, INT, IN_GROUP = "tensor", "int", "group"


def class_name(optimizer: Any) -> str:
    """Module and name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype, as the metadata spells it."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Stepped:
    """One tensor that a base optimizer updates.

    Attributes:
        master, numel: the tensor, empty while swapped out; its elements, padding included.
        group, position: index of its param group, and in the group's ``params`` during a step.
        keeps_touched: whether DeepSpeed keeps whole Muon momenta of all parameters in it.
    """

    master: torch.Tensor
    numel: int
    group: int
    position: int
    keeps_touched: bool = False


Describe = Callable[[Group, Stepped], tuple[LiveState, ...]]


class StateSchema:
    """The states of a live optimizer. This base class adopts those of the checkpoint, or none.

    Args:
        base: the live optimizer.
        known: states and scalars of every tensor: ``None`` if unknown; ``()`` to leave them alone.

    Attributes:
        optimizer: class name.
        family: optimizers that keep the same states under other names or in other formats.
        decoupled: whether weight decay is decoupled, if param groups do not record it.
    """

    family: str | None = None
    decoupled: bool | None = None

    def __init__(self, base: Any, known: tuple[()] | None = None) -> None:
        self._base = base
        self._known = known
        self.optimizer = class_name(base)

    def states(self, stepped: Stepped) -> tuple[LiveState, ...] | None:
        """The tensor states of one flat tensor, or ``None`` if unknown. Changes nothing."""
        return self._known

    def scalars(self, stepped: Stepped) -> tuple[str, ...] | None:
        """The sorted scalar states of one flat tensor (``step``), or ``None`` if unknown."""
        return self._known

    def allocate(self, stepped: Stepped, slots: Sequence[Slot]) -> None:
        """Give the optimizer's state one live tensor per slot, and no other; a tensor that fits is kept.

        Tensors of the master's size are not filled: each element of a slot is read or in a gap, and writing zeros first
        would write each page twice.
        """
        master, state = stepped.master, self._base.state[stepped.master]
        for key in set(state) - {slot.key for slot in slots}:
            del state[key]
        for slot in slots:
            rows = (slot.rows,) if slot.rows > 1 else ()
            shape = rows + tuple(master.shape) if slot.layout == ELEMENTWISE else slot.shape
            dtype: torch.dtype = getattr(torch, slot.dtype)
            live = state.get(slot.key)
            if isinstance(live, torch.Tensor) and tuple(live.shape) == shape and live.dtype == dtype:
                continue
            if shape == tuple(master.shape):
                state[slot.key] = torch.empty_like(master.data, dtype=dtype, memory_format=torch.preserve_format)
            else:
                state[slot.key] = torch.zeros(shape, dtype=dtype, device=master.device)

    def set_scalars(self, stepped: Stepped, values: Mapping[str, Any]) -> None:
        """Set scalar states as they were saved, each a separate object, since optimizers update them in place."""
        group, state = self._base.param_groups[stepped.group], self._base.state[stepped.master]
        for key, value in values.items():
            state[key] = value
            if isinstance(value, TensorValue):  # as torch.optim.Optimizer.load_state_dict places them
                is_on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
                state[key] = tensor_of(value, "cpu" if is_on_host else stepped.master.device)


def tensor_of(value: TensorValue, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor with a saved one's dtype, shape and elements."""
    return torch.tensor(value.elements, dtype=getattr(torch, value.dtype), device=device).reshape(value.shape)


class ListedSchema(StateSchema):
    """States of an optimizer that this module lists.

    Args:
        base: the live optimizer.
        describe: (param group, flat tensor) -> its tensor states.
        step: :data:`TENSOR`, :data:`INT`, :data:`IN_GROUP`, or ``None`` if it counts no steps.
        scalars: scalar states beside ``step``.
        family: see :class:`StateSchema`.
        wide: whether states are always float32; otherwise they have the updated tensor's dtype.
        steps_in_group: whether each param group also has a ``step`` entry, which stays 0.
    """

    def __init__(
        self,
        base: Any,
        describe: Describe,
        step: str | None = TENSOR,
        scalars: tuple[str, ...] = (),
        family: str | None = None,
        wide: bool = False,
        steps_in_group: bool = False,
    ) -> None:
        super().__init__(base)
        self.family = family
        # the attribute of DeepSpeed's and apex's optimizers
        self.decoupled = bool(base.adam_w_mode) if hasattr(base, "adam_w_mode") else None
        self._describe, self._step, self._scalars, self._steps_in_group = describe, step, scalars, steps_in_group
        # optional in DeepSpeed's CPU optimizers, always so in apex's
        self._wide = wide or getattr(base, "fp32_optimizer_states", False)

    def states(self, stepped: Stepped) -> tuple[LiveState, ...] | None:
        states = self._describe(self._base.param_groups[stepped.group], stepped)
        if self._wide:
            return states
        dtype = dtype_name(stepped.master)
        return tuple(replace(state, dtype=dtype) if state.dtype == _MASTER_DTYPE else state for state in states)

    def scalars(self, stepped: Stepped) -> tuple[str, ...] | None:
        uncounted = self._step is None or bool(self._base.param_groups[stepped.group].get("use_muon"))
        return tuple(sorted((*self._scalars, *(() if uncounted else ("step",)))))

    def set_scalars(self, stepped: Stepped, values: Mapping[str, Any]) -> None:
        group = self._base.param_groups[stepped.group]
        if self._steps_in_group:
            group.setdefault("step", 0)
        for key, value in values.items():
            if value is None:
                self._base.state[stepped.master][key] = None
            elif self._step == IN_GROUP:
                group[key] = int(value)
            elif self._step == INT:
                self._base.state[stepped.master][key] = int(value)
            else:
                self._base.state[stepped.master][key] = _scalar_tensor(value, group, stepped.master)


def _scalar_tensor(value: Any, group: Group, master: torch.Tensor) -> torch.Tensor:
    """As in ``torch.optim.adam._init_group``: on the parameter's device only if capturable or fused."""
    on_device = group.get("capturable") or group.get("fused")
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    dtype = torch.float64 if wide else torch.float32
    return torch.tensor(float(value), dtype=dtype, device=master.device if on_device else "cpu")


def _plain(*always: str, **conditional: str) -> Describe:
    """Elementwise states, kept always or if a hyperparameter is true (``key="hyperparameter"``)."""

    def describe(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
        added = [key for key, option in conditional.items() if group.get(option)]
        return tuple(LiveState(key, _MASTER_DTYPE) for key in (*always, *added))

    return describe


def _adagrad(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    return (LiveState("sum", _MASTER_DTYPE, initial=float(group.get("initial_accumulator_value", 0.0))),)


def _rprop(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    return LiveState("prev", _MASTER_DTYPE), LiveState("step_size", _MASTER_DTYPE, initial=float(group["lr"]))


def _adafactor(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    """Factors of a matrix's rows and columns need the whole matrix; a flat tensor has none."""
    shape = tuple(stepped.master.shape)
    if len(shape) < 2:
        return (LiveState("variance", _MASTER_DTYPE),)
    factors = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return tuple(LiveState(key, _MASTER_DTYPE, WHOLE, shape=factor) for key, factor in factors.items())


def _deepspeed_muon(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    if not group["use_muon"]:
        return _PLAIN_ADAM(group, stepped)
    # the dtype follows the gradients; a restored buffer keeps the saved one until the next step
    touched = LiveState("momentum_buffer", "", TOUCHED)
    return (touched if stepped.keeps_touched else LiveState("momentum_buffer", _MASTER_DTYPE),)


_PLAIN_ADAM = _plain("exp_avg", "exp_avg_sq")
_adam = partial(ListedSchema, describe=_plain("exp_avg", "exp_avg_sq", max_exp_avg_sq="amsgrad"), family="adam")
_flat_adam = partial(ListedSchema, describe=_PLAIN_ADAM, family="adam")
_rmsprop = _plain("square_avg", momentum_buffer="momentum", grad_avg="centered")
#: Class name -> its schema.
KNOWN: dict[str, Callable[[Any], StateSchema]] = {
    "torch.optim.adam.Adam": _adam,
    "torch.optim.adamw.AdamW": _adam,
    "torch.optim.nadam.NAdam": partial(ListedSchema, describe=_PLAIN_ADAM, scalars=("mu_product",)),
    "torch.optim.radam.RAdam": partial(ListedSchema, describe=_PLAIN_ADAM),
    "torch.optim.adamax.Adamax": partial(ListedSchema, describe=_plain("exp_avg", "exp_inf")),
    "torch.optim.sgd.SGD": partial(ListedSchema, describe=_plain(momentum_buffer="momentum"), step=None),
    "torch.optim.adagrad.Adagrad": partial(ListedSchema, describe=_adagrad),
    "torch.optim.rmsprop.RMSprop": partial(ListedSchema, describe=_rmsprop),
    "torch.optim.adadelta.Adadelta": partial(ListedSchema, describe=_plain("square_avg", "acc_delta")),
    "torch.optim.rprop.Rprop": partial(ListedSchema, describe=_rprop),
    "torch.optim.Adafactor": partial(ListedSchema, describe=_adafactor),
    "torch.optim.Muon": partial(ListedSchema, describe=_plain("momentum_buffer"), step=None),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": partial(_flat_adam, step=INT),
    "deepspeed.ops.adam.fused_adam.FusedAdam": partial(_flat_adam, step=INT, steps_in_group=True),
    # CPULion keeps a second tensor that it never uses
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": partial(ListedSchema, describe=_PLAIN_ADAM, step=INT),
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": partial(
        ListedSchema, describe=_plain("exp_avg_sq"), step=INT
    ),
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": partial(
        ListedSchema, describe=_deepspeed_muon, step=INT
    ),
    "apex.optimizers.fused_adam.FusedAdam": partial(_flat_adam, step=IN_GROUP, wide=True),
}

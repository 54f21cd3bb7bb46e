"""The states that live base optimizers keep for one flat tensor, and how to allocate and set them.

Optimizers are recognised by class. Their states follow ``torch/optim/*.py`` (2.13),
``deepspeed/ops/{adam,lion,adagrad}``, ``deepspeed/runtime/zero/muon``, and NVIDIA apex's
``apex/optimizers/fused_adam.py``; for bitsandbytes see :mod:`elastic_ckpt.engines.bitsandbytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from elastic_ckpt.core.read_plan import Slot
from elastic_ckpt.core.state_kinds import ELEMENTWISE, PER_PARAMETER, TOUCHED, LiveState
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


class OptimizerParam(NamedTuple):
    """One tensor that a base optimizer updates, empty while swapped out, and its elements, padding included.

    ``group``, ``position``: index of its param group, and in the group's ``params`` during a step; ``keeps_touched``:
    whether DeepSpeed keeps whole Muon momenta of all parameters in it.
    """

    master: torch.Tensor
    numel: int
    group: int
    position: int
    keeps_touched: bool = False


Describe = Callable[[Group, OptimizerParam], tuple[LiveState, ...]]


class StateSchema:
    """The states of a live optimizer: those that ``describe`` lists; without it, those of the checkpoint, or none.

    Args:
        describe: (param group, flat tensor) -> its tensor states.
        step: :data:`TENSOR`, :data:`INT`, :data:`IN_GROUP`, or ``None`` if it counts no steps.
        scalars: scalar states beside ``step``.
        family: optimizers that keep the same states under other names or in other formats.
        wide: whether states are always float32; otherwise they have the updated tensor's dtype.
        steps_in_group: whether each param group also has a ``step`` entry, which stays 0.
        known: what states and scalars are without ``describe``: ``None`` if unknown; ``()`` to leave them alone.

    Attributes:
        optimizer: class name.
        decoupled: whether weight decay is decoupled, if param groups do not record it.
    """

    def __init__(
        self,
        base: Any,
        describe: Describe | None = None,
        step: str | None = TENSOR,
        scalars: tuple[str, ...] = (),
        family: str | None = None,
        wide: bool = False,
        steps_in_group: bool = False,
        known: tuple[()] | None = None,
    ) -> None:
        self._base, self._describe, self._known, self.family = base, describe, known, family
        self._step, self._scalars, self._steps_in_group = step, scalars, steps_in_group
        self.optimizer = class_name(base)
        # the attribute of DeepSpeed's and apex's optimizers
        self.decoupled = bool(base.adam_w_mode) if describe and hasattr(base, "adam_w_mode") else None
        # optional in DeepSpeed's CPU optimizers, always so in apex's
        self._wide = wide or getattr(base, "fp32_optimizer_states", False)

    def states(self, param: OptimizerParam) -> tuple[LiveState, ...] | None:
        """The tensor states of one flat tensor, or ``None`` if unknown. Changes nothing."""
        if self._describe is None:
            return self._known
        states, dtype = self._describe(self._base.param_groups[param.group], param), dtype_name(param.master)
        if self._wide:
            return states
        return tuple(replace(state, dtype=dtype) if state.dtype == _MASTER_DTYPE else state for state in states)

    def scalars(self, param: OptimizerParam) -> tuple[str, ...] | None:
        """The sorted scalar states of one flat tensor (``step``), or ``None`` if unknown."""
        if self._describe is None:
            return self._known
        uncounted = self._step is None or bool(self._base.param_groups[param.group].get("use_muon"))
        return tuple(sorted((*self._scalars, *(() if uncounted else ("step",)))))

    def allocate(self, param: OptimizerParam, slots: Sequence[Slot]) -> None:
        """Give the optimizer's state one live tensor per slot, and no other; a tensor that fits is kept.

        Tensors of the master's size are not filled: each element of a slot is read or in a gap, and writing zeros first
        would write each page twice.
        """
        master, state = param.master, self._base.state[param.master]
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

    def set_scalars(self, param: OptimizerParam, values: Mapping[str, Any]) -> None:
        """Set scalar states, each a separate object, since optimizers update them in place; unlisted ones as saved."""
        group, state = self._base.param_groups[param.group], self._base.state[param.master]
        if self._steps_in_group:
            group.setdefault("step", 0)
        on_device = group.get("capturable") or group.get("fused")  # as in torch.optim.adam._init_group
        for key, value in values.items():
            if self._describe is None:
                is_on_host = key == "step" and not on_device  # as torch.optim.Optimizer.load_state_dict places them
                device = "cpu" if is_on_host else param.master.device
                state[key] = tensor_of(value, device) if isinstance(value, TensorValue) else value
            elif value is None:
                state[key] = None
            elif self._step == TENSOR or self._step is None:
                wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
                dtype, device = torch.float64 if wide else torch.float32, param.master.device if on_device else "cpu"
                state[key] = torch.tensor(float(value), dtype=dtype, device=device)
            else:
                (group if self._step == IN_GROUP else state)[key] = int(value)


def tensor_of(value: TensorValue, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor with a saved one's dtype, shape and elements."""
    return torch.tensor(value.elements, dtype=getattr(torch, value.dtype), device=device).reshape(value.shape)


def _plain(*always: str, **conditional: str) -> Describe:
    """Elementwise states, kept always or if a hyperparameter is true (``key="hyperparameter"``)."""

    def describe(group: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
        added = [key for key, option in conditional.items() if group.get(option)]
        return tuple(LiveState(key, _MASTER_DTYPE) for key in (*always, *added))

    return describe


def _initial(*zero: str, **hyperparameters: str) -> Describe:
    """Elementwise states, and those that begin with a hyperparameter (``key="hyperparameter"``)."""

    def describe(group: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
        begin = {key: float(group.get(option, 0.0)) for key, option in hyperparameters.items()}
        return tuple(LiveState(key, _MASTER_DTYPE, initial=begin.get(key, 0.0)) for key in (*zero, *begin))

    return describe


def _adafactor(group: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
    """Factors of a matrix's rows and columns need the whole matrix; a flat tensor has none."""
    shape = tuple(param.master.shape)
    if len(shape) < 2:
        return (LiveState("variance", _MASTER_DTYPE),)
    factors = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return tuple(LiveState(key, _MASTER_DTYPE, PER_PARAMETER, shape=factor) for key, factor in factors.items())


def _deepspeed_muon(group: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
    if not group["use_muon"]:
        return _PLAIN_ADAM(group, param)
    # the dtype follows the gradients; a restored buffer keeps the saved one until the next step
    touched = LiveState("momentum_buffer", "", TOUCHED)
    return (touched if param.keeps_touched else LiveState("momentum_buffer", _MASTER_DTYPE),)


def _listed(describe: Describe, **more: Any) -> Callable[[Any], StateSchema]:
    return partial(StateSchema, describe=describe, **more)


_PLAIN_ADAM = _plain("exp_avg", "exp_avg_sq")
_adam = _listed(_plain("exp_avg", "exp_avg_sq", max_exp_avg_sq="amsgrad"), family="adam")
#: Class name -> its schema.
KNOWN: dict[str, Callable[[Any], StateSchema]] = {
    "torch.optim.adam.Adam": _adam,
    "torch.optim.adamw.AdamW": _adam,
    "torch.optim.nadam.NAdam": _listed(_PLAIN_ADAM, scalars=("mu_product",)),
    "torch.optim.radam.RAdam": _listed(_PLAIN_ADAM),
    "torch.optim.adamax.Adamax": _listed(_plain("exp_avg", "exp_inf")),
    "torch.optim.sgd.SGD": _listed(_plain(momentum_buffer="momentum"), step=None),
    "torch.optim.adagrad.Adagrad": _listed(_initial(sum="initial_accumulator_value")),
    "torch.optim.rmsprop.RMSprop": _listed(_plain("square_avg", momentum_buffer="momentum", grad_avg="centered")),
    "torch.optim.adadelta.Adadelta": _listed(_plain("square_avg", "acc_delta")),
    "torch.optim.rprop.Rprop": _listed(_initial("prev", step_size="lr")),
    "torch.optim.Adafactor": _listed(_adafactor),
    "torch.optim.Muon": _listed(_plain("momentum_buffer"), step=None),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _listed(_PLAIN_ADAM, family="adam", step=INT),
    "deepspeed.ops.adam.fused_adam.FusedAdam": _listed(_PLAIN_ADAM, family="adam", step=INT, steps_in_group=True),
    # CPULion keeps a second tensor that it never uses
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": _listed(_PLAIN_ADAM, step=INT),
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": _listed(_plain("exp_avg_sq"), step=INT),
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": _listed(_deepspeed_muon, step=INT),
    "apex.optimizers.fused_adam.FusedAdam": _listed(_PLAIN_ADAM, family="adam", step=IN_GROUP, wide=True),
}

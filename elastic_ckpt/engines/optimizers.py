"""Known optimizers, but for those of bitsandbytes: class -> the states that it keeps, from reading its source.

Sources: ``torch/optim/*.py`` (2.13), ``deepspeed/ops/{adam,lion,adagrad}``, ``deepspeed/runtime/zero/muon``, and NVIDIA
apex's ``apex/optimizers/fused_adam.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic_ckpt.core.read_plan import Slot
from elastic_ckpt.core.state_kinds import TOUCHED, WHOLE, LiveState
from elastic_ckpt.engines.bitsandbytes import BitsAndBytesSchema, is_bitsandbytes
from elastic_ckpt.engines.state_schema import StateSchema, Stepped, UnknownSchema, allocate_plain, class_name
from elastic_ckpt.errors import UnsupportedError

Group = Mapping[str, Any]
Describe = Callable[[Group, Stepped], tuple[LiveState, ...]]
_MASTER_DTYPE = "float32"
#: Where the step count lives: a tensor or an int in each state, or an int in the param group.
TENSOR, INT, IN_GROUP = "tensor", "int", "group"


@dataclass(frozen=True)
class _Kind:
    """One kind of optimizer.

    Attributes:
        states: (param group, flat tensor) -> its tensor states.
        step: :data:`TENSOR`, :data:`INT`, :data:`IN_GROUP`; ``None``: it counts no steps.
        scalars: scalar states beside ``step``.
        steps_in_group: whether it keeps an entry ``step`` in each param group besides, which stays 0.
        wide: whether states are float32 whatever the dtype of the tensor stepped on; if not, they have that dtype.
        family: see :class:`elastic_ckpt.engines.state_schema.StateSchema`.
    """

    states: Describe
    step: str | None = TENSOR
    scalars: tuple[str, ...] = ()
    family: str | None = None
    wide: bool = False
    steps_in_group: bool = False


def _fixed(*keys: str) -> Describe:
    return lambda group, stepped: tuple(LiveState(key, "float32") for key in keys)


def _when(*always: str, **conditional: str) -> Describe:
    """States that are always there, and those that a true hyperparameter adds (``state="hyperparameter"``)."""

    def states(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
        added = [key for key, option in conditional.items() if group.get(option)]
        return tuple(LiveState(key, "float32") for key in (*always, *added))

    return states


def _adagrad(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    return (LiveState("sum", "float32", initial=float(group.get("initial_accumulator_value", 0.0))),)


def _rprop(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    return (LiveState("prev", "float32"), LiveState("step_size", "float32", initial=float(group["lr"])))


def _adafactor(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    """A matrix has the means of its rows and columns, which only the whole matrix has; a flat tensor has neither."""
    shape = tuple(stepped.master.shape)
    if len(shape) < 2:
        return (LiveState("variance", "float32"),)
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return (LiveState("row_var", "float32", WHOLE, shape=rows), LiveState("col_var", "float32", WHOLE, shape=columns))


def _deepspeed_muon(group: Group, stepped: Stepped) -> tuple[LiveState, ...]:
    if not group["use_muon"]:
        return _fixed("exp_avg", "exp_avg_sq")(group, stepped)
    # the dtype follows the gradients; a restored buffer keeps the saved one until the next step
    touched = LiveState("momentum_buffer", "", TOUCHED)
    return (touched if stepped.keeps_touched else LiveState("momentum_buffer", "float32"),)


_ADAM = _when("exp_avg", "exp_avg_sq", max_exp_avg_sq="amsgrad")
_PLAIN_ADAM = _fixed("exp_avg", "exp_avg_sq")
_KINDS: dict[str, _Kind] = {
    "torch.optim.adam.Adam": _Kind(_ADAM, family="adam"),
    "torch.optim.adamw.AdamW": _Kind(_ADAM, family="adam"),
    "torch.optim.nadam.NAdam": _Kind(_PLAIN_ADAM, scalars=("mu_product",)),
    "torch.optim.radam.RAdam": _Kind(_PLAIN_ADAM),
    "torch.optim.adamax.Adamax": _Kind(_fixed("exp_avg", "exp_inf")),
    "torch.optim.sgd.SGD": _Kind(_when(momentum_buffer="momentum"), step=None),
    "torch.optim.adagrad.Adagrad": _Kind(_adagrad),
    "torch.optim.rmsprop.RMSprop": _Kind(_when("square_avg", momentum_buffer="momentum", grad_avg="centered")),
    "torch.optim.adadelta.Adadelta": _Kind(_fixed("square_avg", "acc_delta")),
    "torch.optim.rprop.Rprop": _Kind(_rprop),
    "torch.optim.Adafactor": _Kind(_adafactor),
    "torch.optim.Muon": _Kind(_fixed("momentum_buffer"), step=None),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _Kind(_PLAIN_ADAM, INT, family="adam"),
    "deepspeed.ops.adam.fused_adam.FusedAdam": _Kind(_PLAIN_ADAM, INT, family="adam", steps_in_group=True),
    # CPULion keeps a second tensor that it never uses
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": _Kind(_PLAIN_ADAM, INT),
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": _Kind(_fixed("exp_avg_sq"), INT),
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": _Kind(_deepspeed_muon, INT),
    "apex.optimizers.fused_adam.FusedAdam": _Kind(_PLAIN_ADAM, IN_GROUP, family="adam", wide=True),
}


def schema_of(base: torch.optim.Optimizer) -> StateSchema:
    """The schema of a live base optimizer. Changes nothing.

    Raises:
        UnsupportedError: it keeps its states in a form that cannot be cut.
    """
    if class_name(base).startswith("torchao."):
        raise UnsupportedError(
            "torchao's optimizers keep their states in tensor classes of their own, which cannot be cut exactly",
            expected="bitsandbytes' 8-bit optimizers, or states in plain tensors",
            found=class_name(base),
            remedy="load at the topology it was saved with, or with load_optimizer_states=False",
        )
    if is_bitsandbytes(base):
        return BitsAndBytesSchema(base)
    kind = _KINDS.get(class_name(base))
    return UnknownSchema(base) if kind is None else _ListedSchema(base, kind)


class _ListedSchema:
    """States of an optimizer in this module's list (:class:`elastic_ckpt.engines.state_schema.StateSchema`)."""

    def __init__(self, base: Any, kind: _Kind) -> None:
        self._base = base
        self._kind = kind
        self.optimizer = class_name(base)
        self.family = kind.family
        # apex calls it as DeepSpeed does
        self.decoupled: bool | None = bool(base.adam_w_mode) if hasattr(base, "adam_w_mode") else None

    def states(self, stepped: Stepped) -> tuple[LiveState, ...] | None:
        """See :class:`elastic_ckpt.engines.state_schema.StateSchema`."""
        states = self._kind.states(self._base.param_groups[stepped.group], stepped)
        # DeepSpeed's optimizers for the CPU have an option for what apex always does
        if self._kind.wide or getattr(self._base, "fp32_optimizer_states", False):
            return states
        dtype = str(stepped.master.dtype).removeprefix("torch.")
        return tuple(replace(state, dtype=dtype) if state.dtype == _MASTER_DTYPE else state for state in states)

    def scalars(self, stepped: Stepped) -> tuple[str, ...] | None:
        """See :class:`elastic_ckpt.engines.state_schema.StateSchema`."""
        uncounted = self._kind.step is None or bool(self._base.param_groups[stepped.group].get("use_muon"))
        return tuple(sorted((*self._kind.scalars, *(() if uncounted else ("step",)))))

    def allocate(self, stepped: Stepped, slots: Sequence[Slot]) -> None:
        """See :class:`elastic_ckpt.engines.state_schema.StateSchema`."""
        allocate_plain(self._base, stepped, slots)

    def set_scalars(self, stepped: Stepped, values: Mapping[str, float], forms: Mapping[str, str]) -> None:
        """See :class:`elastic_ckpt.engines.state_schema.StateSchema`."""
        group = self._base.param_groups[stepped.group]
        if self._kind.steps_in_group:
            group.setdefault("step", 0)
        for key, value in values.items():
            if self._kind.step == IN_GROUP:
                group[key] = int(value)
            elif self._kind.step == INT:
                self._base.state[stepped.master][key] = int(value)
            else:
                self._base.state[stepped.master][key] = _scalar_tensor(value, group, stepped.master)


def _scalar_tensor(value: float, group: Group, master: torch.Tensor) -> torch.Tensor:
    """As ``torch.optim.adam._init_group`` makes it: on the parameter's device only for capturable and fused."""
    on_device = group.get("capturable") or group.get("fused")
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    dtype = torch.float64 if wide else torch.float32
    return torch.tensor(float(value), dtype=dtype, device=master.device if on_device else "cpu")

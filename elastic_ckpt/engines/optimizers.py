"""The states that live base optimizers keep for one flat tensor, and how to allocate and set them.

Optimizers are recognised by class. Their states follow ``torch/optim/*.py`` (2.13),
``deepspeed/ops/{adam,lion,adagrad}``, ``deepspeed/runtime/zero/muon``, and NVIDIA apex's
``apex/optimizers/fused_adam.py``.

bitsandbytes itself decides which states it keeps: a shallow copy of the live optimizer makes those of a tensor of the
right size on device ``meta``, so that its class, version, ``min_8bit_size`` and overrides count; none of its rules is
copied here. Attributes of ``bitsandbytes.optim.optimizer.Optimizer8bit`` used: ``init_state``, ``name2qmap``,
``is_paged``, ``initialized``, ``check_overrides``, ``get_config``, ``mng`` (``pid2config``,
``module_weight_config_triple``), ``optimizer_name``.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from elastic_ckpt.core import state_kinds
from elastic_ckpt.core.read_plan import TargetTensor
from elastic_ckpt.core.state_kinds import COMPANIONS, LiveState
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, WITHOUT_STATES, UnsupportedError

Group = Mapping[str, Any]
_MASTER_DTYPE = "float32"
#: The step count is a tensor in each state.
TENSOR = "tensor"
#: It is an int in each state.
INT = "int"
#: It is an int in the param group.
IN_GROUP = "group"


def class_name(optimizer: Any) -> str:
    """Module and name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype, as the metadata spells it."""
    return str(tensor.dtype).removeprefix("torch.")


class OptimizerParam(NamedTuple):
    """One tensor that a base optimizer updates."""

    master: torch.Tensor  # empty while swapped out
    numel: int  # padding included
    group: int  # index of its param group
    position: int  # in the group's ``params`` during a step
    keeps_touched: bool = False  # whether DeepSpeed keeps whole Muon momenta of all parameters in it


#: (param group, flat tensor) -> its tensor states.
Describe = Callable[[Group, OptimizerParam], tuple[LiveState, ...]]


class StateSchema:
    """The states of a live optimizer: those that ``describe`` lists; without it, those of the checkpoint, or none."""

    def __init__(
        self,
        base: Any,
        describe: Describe | None = None,
        step: str | None = TENSOR,  # or INT, IN_GROUP; ``None`` if it counts no steps
        scalars: tuple[str, ...] = (),  # scalar states beside ``step``
        family: str | None = None,  # of optimizers that keep the same states under other names or in other formats
        wide: bool = False,  # whether states are always float32, whatever the updated tensor's dtype
        steps_in_group: bool = False,  # whether each param group also has a ``step`` entry, which stays 0
        known: tuple[()] | None = None,  # states and scalars without ``describe``: unknown, or ``()`` to be left alone
    ) -> None:
        self._base = base
        self.describe = describe
        self._known = known
        self.family = family
        self.step = step
        self._scalars = scalars
        self._steps_in_group = steps_in_group
        self.optimizer = class_name(base)
        #: Whether weight decay is decoupled, if param groups do not record it: of DeepSpeed's and apex's optimizers.
        self.decoupled = bool(base.adam_w_mode) if describe and hasattr(base, "adam_w_mode") else None
        # optional in DeepSpeed's CPU optimizers, always so in apex's
        self._wide = wide or getattr(base, "fp32_optimizer_states", False)
        #: By updated tensor, the scalar states that :meth:`allocate` has removed, whose types are the live optimizer's.
        self._removed: dict[torch.Tensor, dict[str, Any]] = {}

    def states(self, param: OptimizerParam) -> tuple[LiveState, ...] | None:
        """The tensor states of one flat tensor, or ``None`` if unknown. Changes nothing."""
        if self.describe is None:
            return self._known
        states = self.describe(self._base.param_groups[param.group], param)
        dtype = _MASTER_DTYPE if self._wide else dtype_name(param.master)
        return tuple(replace(state, dtype=dtype) if state.dtype == _MASTER_DTYPE else state for state in states)

    def scalars(self, param: OptimizerParam) -> tuple[str, ...] | None:
        """The sorted scalar states of one flat tensor (``step``), or ``None`` if unknown."""
        if self.describe is None:
            return self._known
        uncounted = self.step is None or self._base.param_groups[param.group].get("use_muon")
        return tuple(sorted((*self._scalars, *(() if uncounted else ("step",)))))

    def allocate(self, param: OptimizerParam, targets: Sequence[TargetTensor]) -> None:
        """Give the optimizer's state one live tensor per target, and no other; a tensor that fits is kept.

        Tensors of the master's size are not filled: each element of a target is read or in a gap, and writing zeros
        first would write each page twice.
        """
        master = param.master
        state = self._base.state[param.master]
        removed = {key: state.pop(key) for key in set(state) - {target.key for target in targets}}
        self._removed[master] = {key: value for key, value in removed.items() if getattr(value, "numel", int)() <= 1}
        for target in targets:
            planes = (target.planes,) if target.planes > 1 else ()
            shape = planes + tuple(master.shape) if target.layout == state_kinds.ELEMENTWISE else target.shape
            dtype: torch.dtype = getattr(torch, target.dtype)
            live = state.get(target.key)
            if isinstance(live, torch.Tensor) and tuple(live.shape) == shape and live.dtype == dtype:
                continue
            if shape == tuple(master.shape):
                state[target.key] = torch.empty_like(master.data, dtype=dtype, memory_format=torch.preserve_format)
            else:
                state[target.key] = torch.zeros(shape, dtype=dtype, device=master.device)

    def set_scalars(self, param: OptimizerParam, values: Mapping[str, Any]) -> None:
        """Set scalar states, each a separate object, since optimizers update them in place.

        Each has the type of the live one; where there is none, that which the live optimizer is known to make; of an
        unknown optimizer, the saved one.
        """
        group = self._base.param_groups[param.group]
        state = self._base.state[param.master]
        live = {**self._removed.pop(param.master, {}), **state}
        if self._steps_in_group:
            group.setdefault("step", 0)
        on_device = group.get("capturable") or group.get("fused")  # as in torch.optim.adam._init_group
        for key, value in values.items():
            if self.step != IN_GROUP and (same := _of_same_type(live.get(key), value)) is not None:
                state[key] = same
            elif self.describe is None:
                is_on_host = key == "step" and not on_device  # as torch.optim.Optimizer.load_state_dict places them
                device = "cpu" if is_on_host else param.master.device
                state[key] = tensor_of(value, device) if isinstance(value, TensorValue) else value
            elif value is None:
                state[key] = None
            elif self.step == TENSOR or self.step is None:
                wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
                dtype = torch.float64 if wide else torch.float32
                device = param.master.device if on_device else "cpu"
                state[key] = torch.tensor(float(value), dtype=dtype, device=device)
            else:
                (group if self.step == IN_GROUP else state)[key] = int(value)


def _of_same_type(live: Any, saved: Any) -> Any:
    """A saved number as the live optimizer keeps it; ``None`` where it keeps none, or of a type that cannot hold it."""
    if saved is None or (isinstance(saved, TensorValue) and saved.shape):
        return None
    number = saved.elements[0] if isinstance(saved, TensorValue) else saved
    if isinstance(number, complex) or not math.isfinite(number):
        return None
    if isinstance(live, torch.Tensor) and not live.dim():
        if live.dtype.is_floating_point:
            return torch.tensor(float(number), dtype=live.dtype, device=live.device)
        same = torch.tensor(number).to(live.dtype)
        return same.to(live.device) if same.item() == number else None
    if type(live) in (int, float):
        same = type(live)(number)
        return same if same == number else None
    return None


def tensor_of(value: TensorValue, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor with a saved one's dtype, shape and elements."""
    return torch.tensor(value.elements, dtype=getattr(torch, value.dtype), device=device).reshape(value.shape)


def _plain(*always: str, begin: Mapping[str, str] = MappingProxyType({}), **conditional: str) -> Describe:
    """Elementwise states: kept always; if a hyperparameter is true (``key="hyperparameter"``); ``begin`` as one."""

    def describe(group: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
        added = [key for key, option in conditional.items() if group.get(option)]
        initial = {key: float(group.get(option, 0.0)) for key, option in begin.items()}
        keys = (*always, *added, *initial)
        return tuple(LiveState(key, _MASTER_DTYPE, initial=initial.get(key, 0.0)) for key in keys)

    return describe


def _adafactor(group: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
    """Factors of a matrix's rows and columns need the whole matrix; a flat tensor has none."""
    shape = tuple(param.master.shape)
    if len(shape) < 2:
        return (LiveState("variance", _MASTER_DTYPE),)
    factors = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return tuple(
        LiveState(key, _MASTER_DTYPE, state_kinds.PER_PARAMETER, shape=factor) for key, factor in factors.items()
    )


def _deepspeed_muon(base: Any) -> StateSchema:
    """DeepSpeed's Muon, whose auxiliary Adam updates the other param groups, with the same ``state``.

    Adam is an optimizer of its own since DeepSpeed 0.19 (``"torch_adam"`` chooses which), else a part of Muon's step.
    """
    auxiliary = getattr(base, "aux_optimizer", None)
    if auxiliary is not None and class_name(auxiliary) not in KNOWN:
        problem = "Muon's auxiliary optimizer is unknown"
        name = class_name(auxiliary)
        raise UnsupportedError(problem, None, "torch's Adam or AdamW, FusedAdam or DeepSpeedCPUAdam", name)
    of_auxiliary = None if auxiliary is None else KNOWN[class_name(auxiliary)](base)
    describe_auxiliary = _PLAIN_ADAM if of_auxiliary is None else of_auxiliary.describe
    assert describe_auxiliary is not None, "all known optimizers are described"

    def describe(group: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
        if not group["use_muon"]:
            return describe_auxiliary(group, param)
        # the dtype follows the gradients; a restored buffer keeps the saved one until the next step
        touched = LiveState("momentum_buffer", "", state_kinds.TOUCHED)
        return (touched if param.keeps_touched else LiveState("momentum_buffer", _MASTER_DTYPE),)

    wide = getattr(auxiliary, "fp32_optimizer_states", False)
    return StateSchema(base, describe, step=INT if of_auxiliary is None else of_auxiliary.step, wide=wide)


#: Makes a schema of a base optimizer, by these arguments.
_listed = partial(partial, StateSchema)
_PLAIN_ADAM = _plain("exp_avg", "exp_avg_sq")
_adam = _listed(describe=_plain("exp_avg", "exp_avg_sq", max_exp_avg_sq="amsgrad"), family="adam")
#: Class name -> its schema.
KNOWN: dict[str, Callable[[Any], StateSchema]] = {
    "torch.optim.adam.Adam": _adam,
    "torch.optim.adamw.AdamW": _adam,
    "torch.optim.nadam.NAdam": _listed(describe=_PLAIN_ADAM, scalars=("mu_product",)),
    "torch.optim.radam.RAdam": _listed(describe=_PLAIN_ADAM),
    "torch.optim.adamax.Adamax": _listed(describe=_plain("exp_avg", "exp_inf")),
    "torch.optim.sgd.SGD": _listed(describe=_plain(momentum_buffer="momentum"), step=None),
    "torch.optim.adagrad.Adagrad": _listed(describe=_plain(begin={"sum": "initial_accumulator_value"})),
    "torch.optim.rmsprop.RMSprop": _listed(
        describe=_plain("square_avg", momentum_buffer="momentum", grad_avg="centered")
    ),
    "torch.optim.adadelta.Adadelta": _listed(describe=_plain("square_avg", "acc_delta")),
    "torch.optim.rprop.Rprop": _listed(describe=_plain("prev", begin={"step_size": "lr"})),
    "torch.optim.Adafactor": _listed(describe=_adafactor),
    "torch.optim.Muon": _listed(describe=_plain("momentum_buffer"), step=None),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _listed(describe=_PLAIN_ADAM, family="adam", step=INT),
    "deepspeed.ops.adam.fused_adam.FusedAdam": _listed(
        describe=_PLAIN_ADAM, family="adam", step=INT, steps_in_group=True
    ),
    # CPULion keeps a second tensor that it never uses
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": _listed(describe=_PLAIN_ADAM, step=INT),
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": _listed(describe=_plain("exp_avg_sq"), step=INT),
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": _deepspeed_muon,
    "apex.optimizers.fused_adam.FusedAdam": _listed(describe=_PLAIN_ADAM, family="adam", step=IN_GROUP, wide=True),
}


def is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes', which is not imported."""
    module = sys.modules.get("bitsandbytes.optim.optimizer")
    return module is not None and isinstance(optimizer, module.Optimizer8bit)


class BitsAndBytesSchema(StateSchema):
    """States of a live bitsandbytes optimizer. All its Adam and AdamW classes decouple weight decay."""

    def __init__(self, base: Any) -> None:
        family = "adam" if getattr(base, "optimizer_name", None) == "adam" else None
        super().__init__(base, self._made, step=INT, family=family, wide=True)
        self.decoupled = True
        self._codebooks: dict[str, state_kinds.Codebook] = {}

    def _made(self, _: Group, param: OptimizerParam) -> tuple[LiveState, ...]:
        master = param.master
        shape = (param.numel,) if master.dim() == 1 else tuple(master.shape)
        probe, made = self._probe(torch.empty(shape, device="meta", dtype=master.dtype), param)
        quantized = {key for key in COMPANIONS if key in made and made[key].dtype == torch.uint8}
        if quantized and not master.is_contiguous():
            problem = "8-bit states of a parameter that is not contiguous have another order than its elements"
            found = f"shape {tuple(master.shape)}, strides {master.stride()}"
            remedy = "ZeRO stage 1, 2 or 3"
            raise UnsupportedError(problem, expected="a contiguous parameter", found=found, remedy=remedy)
        if not {COMPANIONS[key][1] for key in quantized} <= self._codebooks.keys():
            least = probe.get_config(param.group, param.position, probe.param_groups[param.group])["min_8bit_size"]
            _, tables = self._probe(torch.zeros(max(1, min(least, param.numel))), param)
            maps = {name: table.float().cpu().tolist() for name, table in tables.items() if name[:4] == "qmap"}
            self._codebooks |= {name: state_kinds.codebook(tuple(values)) for name, values in maps.items()}
        companions = {name for key in quantized for name in COMPANIONS[key]}
        states: list[LiveState] = []
        for key, value in made.items():
            if not isinstance(value, torch.Tensor) or key in companions:
                continue
            if key not in COMPANIONS:  # each step writes unorm_vec before it reads it
                layout = state_kinds.SCRATCH if key == "unorm_vec" else state_kinds.REPLICATED
                states.append(LiveState(key, dtype_name(value), layout, shape=tuple(value.shape)))
                continue
            planes = value.numel() // max(param.numel, 1) or 1
            blocks = None
            if key in quantized:
                scales, qmap = COMPANIONS[key]
                block_numel = state_kinds.block_numel_of(param.numel, made[scales].numel() // planes)
                assert block_numel is not None, f"{made[scales].numel()} scales of {param.numel} elements"
                blocks = state_kinds.BlockFormat(block_numel, scales, self._codebooks[qmap])
            states.append(LiveState(key, dtype_name(value), planes=planes, blocks=blocks))
        return tuple(states)

    def _probe(self, tensor: torch.Tensor, param: OptimizerParam) -> tuple[Any, dict[str, Any]]:
        """A shallow copy of the live optimizer, and the state that it makes for a tensor in place of the master."""
        probe = object.__new__(type(self._base))
        probe.__dict__.update(self._base.__dict__)  # copy.copy would leave out what torch does not pickle
        probe.state = defaultdict(dict)
        probe.name2qmap = {}
        probe.is_paged = False
        probe.param_groups = [dict(group) for group in self._base.param_groups]
        # get_config looks up overrides by them
        probe.param_groups[param.group]["params"] = [param.master] * (param.position + 1)
        probe.mng = copy.copy(self._base.mng)
        probe.mng.pid2config = dict(self._base.mng.pid2config)
        for module, name, override in self._base.mng.module_weight_config_triple:
            if getattr(module, name) is param.master:  # bitsandbytes applies these in the first step
                probe.mng.pid2config[id(param.master)] = override
        probe.init_state(probe.param_groups[param.group], tensor, param.group, param.position)
        return probe, probe.state[tensor]

    def allocate(self, param: OptimizerParam, targets: Sequence[TargetTensor]) -> None:
        """Has bitsandbytes make the tensors, which shares its codebooks."""
        state = self._base.state[param.master]
        group = self._base.param_groups[param.group]
        live = [(state.get(target.key), target) for target in targets]
        if all(isinstance(it, torch.Tensor) and (it.numel(), dtype_name(it)) == (s.numel, s.dtype) for it, s in live):
            return
        state.clear()
        if not self._base.initialized:
            self._base.check_overrides()
        params = group["params"]
        group["params"] = [param.master] * (param.position + 1)  # empty between two steps of ZeRO-3
        try:
            self._base.init_state(group, param.master, param.group, param.position)
        finally:
            group["params"] = params


def schema_of(base: torch.optim.Optimizer) -> StateSchema:
    """The schema of a live base optimizer; raises :class:`UnsupportedError` if its states cannot be resharded."""
    if class_name(base).startswith("torchao."):
        problem = "torchao's optimizers keep their states in tensor classes of their own, which cannot be resharded"
        remedy = WITHOUT_STATES, AT_ITS_TOPOLOGY
        raise UnsupportedError(problem, found=class_name(base), remedy=remedy)
    if is_bitsandbytes(base):
        return BitsAndBytesSchema(base)
    return KNOWN.get(class_name(base), StateSchema)(base)

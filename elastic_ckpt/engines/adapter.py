"""What every live engine provides: its LocalState, the memory behind it, and a commit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from elastic_ckpt.core.chunks import parameter_rules, placements
from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.core.flat_ranges import FlatRange, Placement
from elastic_ckpt.core.fqn import ExpertSlice, slices
from elastic_ckpt.core.local_state import (
    FlatPartition,
    Fragment,
    LiveGroup,
    LocalState,
    QuantizationEntry,
    WholeTensor,
)
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, WEIGHTS
from elastic_ckpt.core.quantized_weights import described_weights
from elastic_ckpt.core.read_plan import LoadPlan, Parts, ReadPlan, TargetTensor
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.distributed import can_broadcast
from elastic_ckpt.engines.compat import base_optimizer, has_optimizer, sharded_base_weights
from elastic_ckpt.engines.coordinates import LiveFQNs, model_of, stacked_experts
from elastic_ckpt.engines.extra_states import takers
from elastic_ckpt.engines.optimizers import OptimizerParam, StateSchema, dtype_name, tensor_of
from elastic_ckpt.engines.quantization import loaded_by_modules, quantization_entries
from elastic_ckpt.errors import UnsupportedError

Params = Sequence[Sequence[torch.nn.Parameter]]


class EngineAdapter(ABC):
    """One kind of live optimizer: a base optimizer that updates a few flat fp32 tensors, or none at all.

    Parameters that no optimizer owns are frozen; without an optimizer, all are.
    """

    #: Whether every data-parallel rank holds each whole master.
    replicated = False
    #: See :class:`elastic_ckpt.engines.optimizers.OptimizerParam`.
    keeps_touched = False

    def __init__(
        self,
        engine: Any,
        schema: StateSchema,
        zero_stage: int,
        masters: Sequence[torch.Tensor],  # the fp32 tensor of each flat partition
        groups: Sequence[int],  # the index of each one's param group in ``base.param_groups``
        members: Params,  # the parameters in each in flat order, on this rank or not
        numbered: Params,  # the parameters of each param group, in ``torch.optim``'s order
        dp_group: Any,
    ) -> None:
        self._engine = engine
        self.schema = schema
        self.zero_stage = zero_stage
        self.dp_group = dp_group
        self.masters = masters
        self.groups = groups
        self.members = members
        self._numbered = numbered
        self.optimizer = engine.optimizer
        self.has_optimizer = has_optimizer(engine)
        without = SimpleNamespace(param_groups=[], defaults={}, state={})
        self.base = base_optimizer(engine) if self.has_optimizer else without
        self._fqns = LiveFQNs(engine)
        self._stacked = stacked_experts(engine)
        self.param_names: Mapping[torch.nn.Parameter, str] = {
            param: self._fqns.of(name) for param, name in engine.param_names.items()
        }
        saved = engine.module.state_dict(keep_vars=True)
        buffers = dict(engine.module.named_buffers(remove_duplicate=False))
        named = buffers.keys() | dict(engine.module.named_parameters(remove_duplicate=False)).keys()
        entries = set(map(without_hidden, named))
        self._others = frozenset(name for name in saved if name not in entries and not is_extra_state(name))
        self.extra_states = takers(engine.module, self._fqns.of, saved)  # by FQN
        #: Persistent buffers by FQN. Of one that is a parameter, ZeRO-3 saves nothing under the buffer's name.
        self.buffers = {
            self._fqns.of(name): torch.empty(0, dtype=buffer.dtype) if hasattr(buffer, "ds_id") else buffer
            for name, buffer in buffers.items()
            if without_hidden(name) in saved
        }
        #: The experts' slices of stacked parameters; of any other, all of it.
        self._parts: dict[torch.nn.Parameter, list[ExpertSlice]] = {}
        self.frozen: dict[str, Any] = {}
        fqns_of_experts = set(self._fqns.experts.values())
        owned = set(chain(*members))
        for param, name in self.param_names.items():
            shape = tuple(getattr(param, "ds_shape", param.shape))
            is_stacked = name in self._stacked
            parts = [ExpertSlice(name, shape, FlatRange(0, math.prod(shape)))]
            if is_stacked:
                parts = list(slices(name, shape, self._stacked[name]))
                fqns_of_experts.update(part.name for part in parts)
            self._parts[param] = parts
            if param not in owned:
                if is_stacked and zero_stage == 3:
                    problem = "frozen experts of AutoEP are not supported in ZeRO-3, whose checkpoints lack them"
                    raise UnsupportedError(problem, parameter=name, expected="experts that train, or ZeRO-0, 1 or 2")
                tensors: Iterable[Any] = param if is_stacked else [param]
                self.frozen |= {part.name: each for part, each in zip(parts, tensors, strict=True)}
        self._fqns_of_experts = frozenset(fqns_of_experts)
        self.quantization: tuple[QuantizationEntry, ...] = ()
        if zero_stage < 3:
            described = described_weights(self._others, self.frozen)
            self.quantization, in_memory = quantization_entries(engine.module, described, saved)
            self.buffers |= in_memory
        # ZeRO-3 puts one master at a time into its param group, and now none
        self._positions = {id(p): at for group in self.base.param_groups for at, p in enumerate(group["params"])}

    @abstractmethod
    def placements(self, flat: int) -> Iterable[Placement]:
        """The elements of its members in one flat partition of this rank, in flat order."""

    def local_state(self) -> LocalState:
        """Describe what this rank holds. Local; changes nothing."""
        flats: list[FlatPartition] = []
        fragments: list[Fragment] = []
        for index, params in enumerate(self.members):
            names = self._names_of(params)
            param = self.param(index)
            states = self.schema.states(param)
            scalars = self.schema.scalars(param)
            dtype = dtype_name(param.master)
            replicated = self.replicated and self._can_send(param.master, *names)
            flats.append(FlatPartition(index, param.group, param.numel, dtype, names, replicated, states, scalars))
            for at in self.placements(index):
                for part in self._parts[params[at.index]]:
                    if mine := part.range.intersect(at.range):
                        own = FlatRange(mine.start - part.range.start, mine.stop - part.range.start)
                        offset = at.flat_offset + mine.start - at.range.start
                        fragments.append(Fragment(part.name, part.shape, own, index, offset))
        decoupled = self.schema.decoupled
        more = {} if decoupled is None else {"decoupled_weight_decay": decoupled}  # torch's flag
        groups = [
            LiveGroup(self._names_of(params), {key: value for key, value in group.items() if key != "params"} | more)
            for params, group in zip(self._numbered, self.base.param_groups, strict=True)
        ]
        return LocalState(
            zero_stage=self.zero_stage,
            optimizer=self.schema.optimizer,
            family=self.schema.family,
            defaults=frozenset(self.base.defaults),
            others=self._others,
            own_entries=loaded_by_modules(self._engine.module, self._others),
            quantization=self.quantization,
            flats=tuple(flats),
            fragments=tuple(fragments),
            wholes=(
                *(self._whole(name, BUFFER, buffer) for name, buffer in self.buffers.items()),
                *(self._whole(name, FROZEN, param) for name, param in self.frozen.items()),
            ),
            groups=tuple(groups),
            model=replace(
                model_of(self._engine, self.dp_group, self._fqns, self._stacked),
                extra_states={name: taker.keeps_some for name, taker in self.extra_states.items()},
            ),
        )

    def check(self, plan: LoadPlan, saved_zero_stage: int) -> None:
        """Raise :class:`UnsupportedError` if ranks differ in what the checkpoint has once. Local; changes nothing."""
        if self.zero_stage == saved_zero_stage == 3:  # which broadcasts one rank's values when the engine is built
            return
        sharded = sharded_base_weights(self._engine)
        for name in (target.name for target in plan.reads.targets if target.key == FROZEN and target.name in sharded):
            problem = "each rank has another shard of this frozen weight, and the checkpoint has only one rank's"
            found = f"deepspeed.linear.OptimizedLinear with base_weight_sharding: {sharded[name]}"
            remedy = "the other shards are in no file: build the base weights from where the run took them, and save "
            remedy += "with exclude_frozen_parameters=True, whose checkpoints load"
            raise UnsupportedError(problem, None, "the whole weight on each rank", found, parameter=name, remedy=remedy)

    def param(self, flat: int) -> OptimizerParam:
        """What the base optimizer updates in place of one flat partition."""
        master = self.masters[flat]
        position = self._positions.get(id(self.masters[flat]), 0)
        return OptimizerParam(master, master.numel(), self.groups[flat], position, self.keeps_touched)

    def _whole(self, name: str, key: str, tensor: Any) -> WholeTensor:
        """What this rank holds of a buffer or a frozen parameter."""
        partition = getattr(tensor, "ds_tensor", None)
        trains = key == FROZEN and not self.has_optimizer and tensor.requires_grad
        if partition is None:
            mine = FlatRange(0, tensor.numel())
            replicated = self._can_send(tensor, name)
            return WholeTensor(name, key, tuple(tensor.shape), mine, dtype_name(tensor), replicated, trains)
        mine = next((placement.range for placement in partitions_of([tensor])), FlatRange(0, 0))
        return WholeTensor(name, key, tuple(tensor.ds_shape), mine, dtype_name(partition), trains=trains)

    def _can_send(self, tensor: torch.Tensor, *names: str) -> bool:
        """Whether data-parallel ranks can broadcast a tensor with these parameters; not all have the same experts."""
        in_all = self._fqns_of_experts.isdisjoint(names)
        return in_all and tensor.is_contiguous() and can_broadcast(tensor.device.type, self.dp_group)

    def _names_of(self, params: Iterable[torch.nn.Parameter]) -> tuple[str, ...]:
        return tuple(part.name for param in params for part in self._parts[param])

    def fill(self, plan: LoadPlan, tensors: dict[int, torch.Tensor]) -> Parts:
        """Yield parts of the plan, each with live memory for all of its targets, allocated where the engine has none.

        Whoever asks for the next part has read the one before into its tensors. It is one part, or one per flat
        partition if the engine's memory is not all there at a time. Adds to ``tensors``, by number, those of targets
        that stay in memory. Local.
        """
        memory = self.memory(plan.reads)
        tensors.update(enumerate(memory))
        yield plan.reads, memory

    def memory(self, plan: ReadPlan) -> list[torch.Tensor]:
        """A tensor for every target; allocates new optimizer states, and fills gaps in states with their zero."""
        states: dict[int, list[TargetTensor]] = {}
        for target in plan.targets:
            if target.key not in WEIGHTS:
                states.setdefault(target.flat, []).append(target)
        for flat, targets in states.items():
            self.schema.allocate(self.param(flat), targets)
        tensors: list[torch.Tensor] = []
        for target in plan.targets:
            if target.key == MASTER:
                tensors.append(self.masters[target.flat].data)
            elif target.key in WEIGHTS:
                tensor = (self.buffers if target.key == BUFFER else self.frozen)[target.name]
                partition = getattr(tensor, "ds_tensor", None)
                tensors.append(tensor.data if partition is None else partition.data.view(-1)[: target.numel])
            else:
                tensors.append(self.base.state[self.masters[target.flat]][target.key])
                for gap in target.gaps:
                    tensors[-1].view(-1)[gap.start : gap.stop].fill_(target.fill)
        return tensors

    def set_scalars_and_groups(self, plan: LoadPlan) -> None:
        """Set scalar states and hyperparameters, if the plan restores them. Local."""
        if not plan.restores_states:
            return
        set_hyperparameters(self.base.param_groups, plan.hyperparameters)
        for flat, scalars in enumerate(plan.scalars):
            if scalars is None:
                self.base.state.pop(self.masters[flat], None)
            else:
                self.schema.set_scalars(self.param(flat), scalars)

    @abstractmethod
    def refresh_weights(self, plan: LoadPlan, exact_masters: bool) -> None:
        """Derive the low-precision weights from the masters just read. Collective.

        Unless ``exact_masters``, round these through the weights, as DeepSpeed with ``load_optimizer_states=False``.
        """


def set_hyperparameters(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Set saved hyperparameters in live param groups, in tensors that the optimizer has where they can hold them."""
    for group, values in zip(groups, saved, strict=False):
        group.update({key: _restored(group.get(key), value) for key, value in values.items()})


def partitions_of(params: Sequence[Any]) -> Iterable[Placement]:
    """The elements of this rank in consecutive parameters that ZeRO-3 partitions, padding included."""
    numels = [math.prod(param.ds_shape) for param in params]
    steps = [int(param.ds_tensor.ds_numel) for param in params]
    return placements(parameter_rules(numels, steps), dist.get_rank(group=params[0].ds_process_group))


def _restored(live: Any, saved: Any) -> Any:
    """A saved hyperparameter; live tensors are filled in place where that keeps its dtype, and live devices stay."""
    if isinstance(live, torch.Tensor) and _can_hold(live, saved):
        live.detach().copy_(tensor_of(saved)) if isinstance(saved, TensorValue) else live.detach().fill_(saved)
        return live
    if isinstance(live, torch.device) and isinstance(saved, torch.device):
        return live
    if isinstance(saved, TensorValue):
        return tensor_of(saved, live.device if isinstance(live, torch.Tensor) else "cpu")
    if type(saved) is dict:
        return {key: _restored(live.get(key) if isinstance(live, dict) else None, each) for key, each in saved.items()}
    if type(saved) not in (list, tuple):
        return saved
    same = type(live) is type(saved) and len(live) == len(saved)
    return type(saved)(map(_restored, live if same else [None] * len(saved), saved))


def _can_hold(tensor: torch.Tensor, saved: Any) -> bool:
    """Whether a tensor is like a saved one, or of a number's kind, no integer for a fraction, and wide enough."""
    if isinstance(saved, TensorValue):
        return (dtype_name(tensor), tuple(tensor.shape)) == (saved.dtype, saved.shape)
    if not isinstance(saved, (int, float, complex)) or tensor.numel() != 1:
        return False
    try:
        return torch.can_cast(torch.tensor(saved).dtype, torch.empty((), dtype=tensor.dtype).fill_(saved).dtype)
    except (RuntimeError, TypeError, OverflowError):
        return False

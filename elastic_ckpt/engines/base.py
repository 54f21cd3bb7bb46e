"""What every live engine provides: its LocalState, the memory behind them, and a commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import FlatPartition, Fragment, LiveGroup, LocalState, WholeTensor
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.core.read_plan import ReadPlan, Slot
from elastic_ckpt.distributed import can_broadcast
from elastic_ckpt.engines.state_schema import StateSchema, Stepped

#: Reads the copies of a plan, or of a part of one, into a tensor for each of its slots.
ReadPart = Callable[[ReadPlan, Sequence[torch.Tensor]], None]


def base_optimizer(engine: Any) -> Any:
    """The optimizer that the user made, inside DeepSpeed's or without one around it; ``None`` where there is none."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def has_optimizer(engine: Any) -> bool:
    """Whether a live engine was made with an optimizer. ``trainer.validate`` and the like make it without one."""
    base = base_optimizer(engine)
    return base is not None and not isinstance(base, (DummyOptim, DeepSpeedZeRoOffload))


class EngineAdapter(Protocol):
    """One kind of live optimizer.

    Attributes:
        dp_group: its data-parallel process group.
    """

    dp_group: Any

    def local_state(self) -> LocalState:
        """Describe what this rank holds. Local, changes nothing."""

    def fill(self, plan: ReadPlan, read: ReadPart) -> Mapping[int, torch.Tensor]:
        """Have every slot of the plan read into live memory, allocated where the engine has none yet. Local.

        Args:
            plan: the plan.
            read: called with the plan, or with one part of it after the other where not all of the engine's memory
                is there at a time, and a tensor for each slot of it.

        Returns:
            The tensors of those slots, by number, that are still in memory: of the replicated ones, all.
        """

    def set_scalars_and_groups(self, plan: ReadPlan) -> None:
        """Set scalar states and hyperparameters, where the plan restores them. Local."""

    def refresh_weights(self, plan: ReadPlan, exact_masters: bool) -> None:
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
        dp_group: the data-parallel process group.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        param_names: Mapping[torch.nn.Parameter, str],
        base: torch.optim.Optimizer,
        schema: StateSchema,
        masters: Sequence[torch.Tensor],
        groups: Sequence[int],
        dp_group: Any,
    ) -> None:
        self.module = module
        self.param_names = param_names
        self.base = base
        self.schema = schema
        self.masters = masters
        self.groups = groups
        self.dp_group = dp_group
        self._known_positions: dict[int, int] | None = None

    def describe(
        self,
        zero_stage: int,
        flats: Sequence[FlatPartition],
        fragments: Sequence[Fragment],
        frozen: Sequence[WholeTensor],
        group_names: Sequence[Sequence[str]],
    ) -> LocalState:
        """What the stages' own parts come to, with what they share.

        Args:
            zero_stage: ZeRO stage.
            flats, fragments: the partitions and what lies in them.
            frozen: parameters that no optimizer owns.
            group_names: per param group, its parameters in the order in which ``torch.optim`` numbers them.
        """
        return LocalState(
            zero_stage=zero_stage,
            dp=dist.get_world_size(group=self.dp_group),
            dp_rank=dist.get_rank(group=self.dp_group),
            optimizer=self.schema.optimizer,
            family=self.schema.family,
            defaults=frozenset(self.base.defaults),
            flats=tuple(self._with_states(flat) for flat in flats),
            fragments=tuple(fragments),
            wholes=(*self.whole_buffers(), *frozen),
            groups=tuple(
                LiveGroup(tuple(names), self.group_hyperparameters(number)) for number, names in enumerate(group_names)
            ),
            ties=self.ties(),
        )

    def _with_states(self, flat: FlatPartition) -> FlatPartition:
        stepped = self.stepped(flat.index, flat.numel)
        return replace(flat, states=self.schema.states(stepped), scalars=self.schema.scalars(stepped))

    def stepped(self, flat: int, numel: int | None = None) -> Stepped:
        """What the base optimizer steps on in place of one flat partition, which may be swapped out."""
        master, group = self.masters[flat], self.groups[flat]
        numel = master.numel() if numel is None else numel
        return Stepped(master, numel, group, self._positions().get(id(master), 0), self.keeps_touched())

    def _positions(self) -> Mapping[int, int]:
        """Where each master stands in its param group; ZeRO-3 puts one there at a time, and here none."""
        if self._known_positions is None:
            groups = self.base.param_groups
            self._known_positions = {id(p): place for group in groups for place, p in enumerate(group["params"])}
        return self._known_positions

    def keeps_touched(self) -> bool:
        """See :class:`elastic_ckpt.engines.state_schema.Stepped`."""
        return False

    def names_of(self, params: Iterable[torch.nn.Parameter]) -> tuple[str, ...]:
        """DeepSpeed's names of some parameters."""
        return tuple(self.param_names[param] for param in params)

    @staticmethod
    def dtype_of(tensor: torch.Tensor) -> str:
        """Name of a tensor's dtype, as the metadata spells it."""
        return str(tensor.dtype).removeprefix("torch.")

    def can_send(self, tensor: torch.Tensor) -> bool:
        """Whether one rank may read a tensor's bytes and send them to the others."""
        return tensor.is_contiguous() and can_broadcast(tensor.device.type, self.dp_group)

    def ties(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> the other names that the module has for it."""
        names: dict[int, list[str]] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        found = {self.param_names[param]: names.get(id(param), []) for param in self.param_names}
        return {name: tuple(other for other in all_ if other != name) for name, all_ in found.items() if len(all_) > 1}

    def group_hyperparameters(self, number: int) -> dict[str, Any]:
        """Hyperparameters of one live group; its kind of weight decay is told as torch tells it."""
        group = {key: value for key, value in self.base.param_groups[number].items() if key != "params"}
        if self.schema.decoupled is not None:
            group["decoupled_weight_decay"] = self.schema.decoupled
        return group

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers of the module, by the name they have in its state dict."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.module.named_buffers(remove_duplicate=False) if name in saved}

    def whole_buffers(self) -> list[WholeTensor]:
        """The buffers as local state."""
        return [self._whole(name, BUFFER, buffer) for name, buffer in self.buffers().items()]

    def whole_frozen(self, frozen: Mapping[str, torch.Tensor]) -> list[WholeTensor]:
        """Frozen parameters of which each rank holds the whole, as local state."""
        return [self._whole(name, FROZEN, data) for name, data in frozen.items()]

    def _whole(self, name: str, key: str, tensor: torch.Tensor) -> WholeTensor:
        every = FlatRange(0, tensor.numel())
        return WholeTensor(name, key, tuple(tensor.shape), every, self.dtype_of(tensor), self.can_send(tensor))

    def fill_at_once(
        self, plan: ReadPlan, read: ReadPart, frozen: Mapping[str, torch.Tensor]
    ) -> Mapping[int, torch.Tensor]:
        """:meth:`EngineAdapter.fill` where all of the engine's memory is there."""
        tensors = self.memory(plan, frozen)
        read(plan, tensors)
        return dict(enumerate(tensors))

    def memory(self, plan: ReadPlan, frozen: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """A tensor for every slot; new optimizer states are allocated, gaps in states get what stands for zero.

        Args:
            plan: the plan to prepare for.
            frozen: live memory of frozen parameters, by name.
        """
        buffers = self.buffers()
        self._allocate(plan)
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

    def _allocate(self, plan: ReadPlan) -> None:
        slots: dict[int, list[Slot]] = {}
        for slot in plan.slots:
            if slot.key not in (MASTER, BUFFER, FROZEN):
                slots.setdefault(slot.flat, []).append(slot)
        for flat, states in slots.items():
            self.schema.allocate(self.stepped(flat), states)

    def _state(self, slot: Slot) -> torch.Tensor:
        tensor: torch.Tensor = self.base.state[self.masters[slot.flat]][slot.key]
        for gap in slot.gaps:
            tensor.view(-1)[gap.start : gap.stop].fill_(slot.fill)
        return tensor

    def set_scalars_and_groups(self, plan: ReadPlan) -> None:
        """Scalar states of every flat tensor, each an object of its own, and hyperparameters of every group."""
        if not plan.restores_states:
            return
        for number, values in enumerate(plan.hyperparameters):
            set_hyperparameters(self.base.param_groups[number], values)
        for flat, scalars in enumerate(plan.scalars):
            master = self.masters[flat]
            if scalars is None:
                self.base.state.pop(master, None)
            else:
                self.schema.set_scalars(self.stepped(flat), scalars, plan.scalar_forms)


def set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set saved values in a live group; a live tensor (a capturable ``lr``) is filled, not replaced."""
    for key, value in values.items():
        live = group.get(key)
        if isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
            live.fill_(value)
        else:
            group[key] = value


def flat_master_numels(engine: Any) -> list[int] | None:
    """Elements of each flat fp32 master partition of this rank, padding included; ``None`` without ZeRO. Local.

    The names are those of ZeRO-3, of ZeRO-1 and 2, and of ``BF16_Optimizer``.
    """
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    masters = next((getattr(engine.optimizer, name) for name in names if hasattr(engine.optimizer, name)), None)
    return None if masters is None else [master.numel() for master in masters]

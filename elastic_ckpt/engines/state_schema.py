"""The states that a live base optimizer keeps for one flat tensor, and how to make them.

Optimizers are known by their class (:mod:`elastic_ckpt.engines.optimizers`, :mod:`elastic_ckpt.engines.bitsandbytes`).
An unknown one takes the states of the checkpoint as they are, where their layout is certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic_ckpt.core.read_plan import Slot
from elastic_ckpt.core.state_kinds import ELEMENTWISE, LiveState


@dataclass(frozen=True)
class Stepped:
    """One tensor that a base optimizer steps on.

    Attributes:
        master: the tensor; without elements while it is swapped out.
        numel: its elements, padding included.
        group: index of its param group.
        position: its place among the group's ``params`` while the optimizer steps on it.
        keeps_touched: whether DeepSpeed keeps Muon's momentum for all parameters that touch it, whole.
    """

    master: torch.Tensor
    numel: int
    group: int
    position: int
    keeps_touched: bool = False


class StateSchema(Protocol):
    """One live optimizer's states.

    Attributes:
        optimizer: class name.
        family: optimizers of one family keep the same states under other names or in other formats.
        decoupled: whether weight decay is apart from the gradient, where its param groups do not say so themselves.
    """

    optimizer: str
    family: str | None
    decoupled: bool | None

    def states(self, stepped: Stepped) -> tuple[LiveState, ...] | None:
        """The tensor states of one flat tensor; ``None``: not known. Changes nothing."""

    def scalars(self, stepped: Stepped) -> tuple[str, ...] | None:
        """The scalar states of one flat tensor (``step``), sorted; ``None``: not known."""

    def allocate(self, stepped: Stepped, slots: Sequence[Slot]) -> None:
        """Have a live tensor for every slot in the optimizer's state; those that fit are kept, with their values."""

    def set_scalars(self, stepped: Stepped, values: Mapping[str, float], forms: Mapping[str, str]) -> None:
        """Set scalar states, each an object of its own, since optimizers update them in place.

        Args:
            stepped: whose.
            values: by key.
            forms: how they were saved (:attr:`elastic_ckpt.core.metadata.CheckpointMetadata.scalar_forms`).
        """


class UnknownSchema:
    """An optimizer of which nothing is known beforehand.

    Args:
        base: the live optimizer.
    """

    family: str | None = None
    decoupled: bool | None = None

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base = base
        self.optimizer = class_name(base)

    def states(self, stepped: Stepped) -> tuple[LiveState, ...] | None:
        """See :class:`StateSchema`."""
        return None

    def scalars(self, stepped: Stepped) -> tuple[str, ...] | None:
        """See :class:`StateSchema`."""
        return None

    def allocate(self, stepped: Stepped, slots: Sequence[Slot]) -> None:
        """See :class:`StateSchema`."""
        allocate_plain(self._base, stepped, slots)

    def set_scalars(self, stepped: Stepped, values: Mapping[str, float], forms: Mapping[str, str]) -> None:
        """See :class:`StateSchema`. Scalars come back in the form in which they were saved."""
        for key, value in values.items():
            form = forms[key]
            made: Any = value if form == "float" else int(value)
            if form not in ("int", "float"):
                made = torch.tensor(value, dtype=getattr(torch, form))
            self._base.state[stepped.master][key] = made


class NoStates(UnknownSchema):
    """Where states are left alone: it names no state at all."""

    def states(self, stepped: Stepped) -> tuple[LiveState, ...] | None:
        """See :class:`StateSchema`."""
        return ()

    def scalars(self, stepped: Stepped) -> tuple[str, ...] | None:
        """See :class:`StateSchema`."""
        return ()


def class_name(optimizer: Any) -> str:
    """Module and name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def allocate_plain(base: torch.optim.Optimizer, stepped: Stepped, slots: Sequence[Slot]) -> None:
    """Memory beside the master, of the shape that each slot's layout asks for; what no slot names goes away.

    What is as big as the master is not filled: every element of a slot is either read or one of its gaps, and writing
    zeros first would have each page written twice.
    """
    master, state = stepped.master, base.state[stepped.master]
    for key in set(state) - {slot.key for slot in slots}:
        del state[key]
    for slot in slots:
        rows = (slot.rows,) if slot.rows > 1 else ()
        shape = rows + tuple(master.shape) if slot.layout == ELEMENTWISE else slot.shape
        dtype: torch.dtype = getattr(torch, slot.dtype)
        there = state.get(slot.key)
        if isinstance(there, torch.Tensor) and tuple(there.shape) == shape and there.dtype == dtype:
            continue
        if shape == tuple(master.shape):
            state[slot.key] = torch.empty_like(master.data, dtype=dtype, memory_format=torch.preserve_format)
        else:
            state[slot.key] = torch.zeros(shape, dtype=dtype, device=master.device)

"""Models whose names, storages and sizes do not go one by one: aliases, ties at every level, empty and shared tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero import register_external_parameter
from torch import nn

SIZE = 6


class OddLM(nn.Module):
    """A tree of modules with some oddities.

    Args:
        oddities: names of functions in :data:`ODDITIES`, in their order.
        seed: of the initial weights; an engine that resumes is built with another one.
    """

    def __init__(self, oddities: list[str], seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(SIZE, SIZE)
        self.inner = nn.Module()
        self.inner.deep = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.LayerNorm(SIZE))
        self.inner.last = nn.Linear(SIZE, SIZE)
        for name in oddities:
            ODDITIES[name](self)
        self._used = [param for param in self.parameters() if param.requires_grad and param.numel()]
        for param in self._used:
            register_external_parameter(self, param)  # ZeRO-3 then has it whole in forward

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A loss in which every parameter that is not empty has a gradient of its own, which depends on the batch."""
        for name, buffer in self.named_buffers():
            if not isinstance(buffer, nn.Parameter) and name != "scratch":
                buffer.add_(1)
        hidden = tokens[:, :SIZE].to(self.first.weight.dtype) / 37
        hidden = self.inner.last(self.inner.deep(torch.tanh(self.first(hidden))))
        loss = hidden.float().square().mean()
        for number, param in enumerate(self._used, 1):
            loss = loss + ((param.float() - 0.01 * number * hidden.float().mean()).square()).sum() / 100
        return loss


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def tie(model: Any) -> None:
    model.inner.last.weight = model.first.weight


def tie_of_three(model: Any) -> None:
    model.inner.deep[0].weight = model.inner.last.weight = model.first.weight


def tied_biases(model: Any) -> None:
    model.inner.last.bias = model.first.bias


def alias(model: Any) -> None:
    model.alias = model.first


def alias_of_a_tree(model: Any) -> None:
    model.same_inner = model.inner


def alias_elsewhere(model: Any) -> None:
    model.inner.up = nn.ModuleDict({"a": model.first, "b": model.first})


def alias_before(model: Any) -> None:
    """The second name comes first in the order of modules."""
    modules = dict(model._modules)
    model._modules.clear()
    model._modules |= {"another": modules["inner"].last, **modules}


def second_name(model: Any) -> None:
    """Two names of a parameter in one module."""
    model.first.kernel = model.first.weight


def frozen_tie(model: Any) -> None:
    model.still = nn.Linear(SIZE, 3)
    model.inner.still = nn.Linear(SIZE, 3)
    model.inner.still.weight = model.still.weight
    model.still.weight.requires_grad_(False)


def frozen_alias(model: Any) -> None:
    model.frozen = nn.Linear(SIZE, 2).requires_grad_(False)
    model.frozen_too = model.frozen


def frozen_second_name(model: Any) -> None:
    model.pinned = _weight(4).requires_grad_(False)
    model.pinned_too = model.pinned


def empty(model: Any) -> None:
    model.nothing = nn.Parameter(torch.empty(0))
    model.inner.nothing = nn.Parameter(torch.empty(0, 5))
    model.inner.none = nn.Parameter(torch.empty(3, 0))


def empty_tie(model: Any) -> None:
    model.hollow = nn.Parameter(torch.empty(0, 2))
    model.inner.hollow = model.hollow


def empty_frozen(model: Any) -> None:
    model.void = nn.Parameter(torch.empty(0), requires_grad=False)
    model.inner.void = nn.Parameter(torch.empty(0, 2), requires_grad=False)


def empty_frozen_tie(model: Any) -> None:
    model.gap = nn.Parameter(torch.empty(0), requires_grad=False)
    model.inner.gap = model.gap


def empty_buffers(model: Any) -> None:
    model.register_buffer("no_ticks", torch.empty(0))
    model.inner.register_buffer("no_ticks", torch.empty(0, 3, dtype=torch.int64))


def buffers(model: Any) -> None:
    model.register_buffer("ticks", torch.zeros((), dtype=torch.int64))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.inner.register_buffer("trace", torch.zeros(2, 3))


def shared_buffer(model: Any) -> None:
    model.register_buffer("clock", torch.zeros(2))
    model.inner.register_buffer("clock", model.clock)


def half_persistent_buffer(model: Any) -> None:
    model.register_buffer("kept", torch.zeros(2), persistent=False)
    model.inner.register_buffer("kept", model.kept)


def buffer_that_is_a_parameter(model: Any) -> None:
    model.register_buffer("shadow", model.inner.last.weight)


def buffer_of_a_frozen_parameter(model: Any) -> None:
    model.rest = _weight(5).requires_grad_(False)
    model.inner.register_buffer("rest", model.rest)


def buffer_of_a_tree(model: Any) -> None:
    model.inner.register_buffer("twin", model.first.weight)


def views(model: Any) -> None:
    """Buffers in one storage."""
    both = torch.zeros(8)
    model.register_buffer("low", both[:3])
    model.register_buffer("high", both[3:])


def parameter_list(model: Any) -> None:
    one, two = _weight(3), _weight(2, 2)
    model.listed = nn.ParameterList([one, two, one])
    model.inner.named = nn.ParameterDict({"b": two, "a": _weight(7), "c": one})


ODDITIES: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        tie, tie_of_three, tied_biases, frozen_tie, frozen_alias, frozen_second_name, empty, empty_tie, empty_frozen,
        empty_frozen_tie, empty_buffers, buffers, shared_buffer, half_persistent_buffer, buffer_that_is_a_parameter,
        buffer_of_a_frozen_parameter, buffer_of_a_tree, views, parameter_list, second_name, alias, alias_of_a_tree,
        alias_elsewhere, alias_before,
    )
}  # fmt: skip


def drawn(number: int) -> Callable[..., OddLM]:
    """A model with a few oddities, always the same for a number."""
    chosen = random.Random(number)
    names = set(chosen.sample(list(ODDITIES), chosen.randint(2, 6)))
    return partial(OddLM, [name for name in ODDITIES if name in names])

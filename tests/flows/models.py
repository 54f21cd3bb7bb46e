"""Models with what is odd about models of users: shared, aliased, empty, renamed parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.distributed import model as models
from tests.distributed.model import TinyLM
from tests.distributed.odd_models import drawn


class _More(TinyLM):
    """A tiny model all of whose own parameters get gradients."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        for param in self._parameters.values():  # those of other modules are partitioned here in ZeRO-3
            loss = loss + 1e-3 * param.float().square().sum()
        return loss


class Aliased(_More):
    """A module under two names, beside tied weights."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.alias = self.hidden
        self.other = self.head


class Empty(_More):
    """Parameters and buffers without elements."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.nothing, self.nothing_else = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 3))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))


class Scalar(_More):
    """A parameter and buffers without dimensions."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("doubles", torch.linspace(0, 1, 7, dtype=torch.float64))
        self.register_buffer("complex", torch.tensor([1j, 2.0]))


class Listed(_More):
    """Parameters in lists and dictionaries, some of them twice."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        one, two = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))
        self.some = nn.ParameterList([one, two, one])
        self.named = nn.ParameterDict(
            {"a": two, "b/c": nn.Parameter(torch.randn(2, 2)), "größe": nn.Parameter(torch.ones(1))}
        )


class SharedBuffers(_More):
    """Buffers that share memory with each other and with a parameter."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.register_buffer("one", torch.arange(6.0))
        self.register_buffer("same", self.one)
        self.register_buffer("part", self.one[2:4])


class Transposed(_More):
    """A convolution's weights and a buffer whose memory is in another order."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.images = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.register_buffer("turned_buffer", torch.arange(6.0).view(2, 3).t())


class Normalized(_More):
    """A weight that is computed from others, and norms with counters."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.hidden = nn.utils.parametrizations.weight_norm(self.hidden)
        self.batch_norm = nn.BatchNorm1d(4)


class Extra(_More):
    """A module with state of its own kind."""

    class Noted(nn.Module):
        """Notes how often it was saved."""

        note = "new"

        def get_extra_state(self) -> Any:
            return {"note": "saved", "table": torch.arange(3)}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.noted = self.Noted()


class FrozenTies(_More):
    """Tied weights that do not train, and a module that is frozen as a whole."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.embedding.weight.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.frozen = nn.Linear(3, 4).requires_grad_(False)


class Flat(_More):
    """Large enough for quantization blocks."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.bulk = nn.Parameter(torch.randn(61, 97))


MODELS: dict[str, Any] = {
    **{name: kind for name, kind in models.BUILDERS.items() if name not in ("BigLM", "HugeLM", "RenamedLM")},
    **{
        kind.__name__: kind
        for kind in (
            Aliased,
            Empty,
            Scalar,
            Listed,
            SharedBuffers,
            Transposed,
            Normalized,
            Extra,
            FrozenTies,
            Flat,
        )
    },
    **{f"Odd{number}": drawn(number) for number in range(8)},
}

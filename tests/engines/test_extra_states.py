"""Which live modules take extra state, and what becomes of one that refuses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_ckpt.core.extra_states import SavedExtraState
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.engines.extra_states import set_extra_states, takers
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.load.extra_states import files_of


class Keeper(nn.Module):
    """Writes down who was given what, in a list of all."""

    def __init__(self, given: list[Any], value: Any = 1) -> None:
        super().__init__()
        self.given, self.value = given, value
        self.inner = nn.Linear(1, 1)

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.given.append(state)


def model_of(given: list[Any]) -> nn.Module:
    model = Keeper(given)
    model.first = Keeper(given, None)
    model.second = nn.Sequential(model.first, Keeper(given))
    return model


def test_modules_get_the_state_of_their_name_in_the_order_of_torch() -> None:
    ours: list[Any] = []
    torchs: list[Any] = []
    model, like = model_of(ours), model_of(torchs)
    found = takers(model, without_hidden, model.state_dict())
    names = [name for name in like.state_dict() if name.endswith("_extra_state")]
    assert (
        sorted(found)
        == sorted(names)
        == ["_extra_state", "first._extra_state", "second.0._extra_state", "second.1._extra_state"]
    )
    assert [taker.keeps_some for taker in found.values()] == [True, False, False, True]
    values = {name: f"for {name}" for name in names}
    set_extra_states(found, values)
    like.load_state_dict({**like.state_dict(), **values})
    assert ours == torchs


def test_a_module_without_the_name_is_left_alone() -> None:
    given: list[Any] = []
    model = model_of(given)
    set_extra_states(takers(model, without_hidden, {}), {"first._extra_state": 5})
    assert given == [5]


def test_one_that_refuses_is_named() -> None:
    class Refusing(Keeper):
        def set_extra_state(self, state: Any) -> None:
            raise RuntimeError(f"no {state}")

    with pytest.raises(MismatchError) as raised:
        set_extra_states(takers(Refusing([]), without_hidden, {}), {"_extra_state": torch.ones(1)})
    assert raised.value.parameter == "_extra_state"
    assert "set_extra_state of Refusing" in str(raised.value.expected) and "no tensor" in str(raised.value.found)


def test_files_are_read_for_values_alone() -> None:
    wanted = {
        name: SavedExtraState(f"file of {name}", name, b"" if name == "none" else b"kept")
        for name in ("b", "a", "none")
    }
    assert files_of(wanted) == ("file of a", "file of b")

"""Client states, read without torch's loader, against what that makes of the same file."""

# Covers elastic_ckpt/formats/rebuilt_tensors.py, which makes the tensors of client states.

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.errors import UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.objects import materialise, materialise_entries
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from tests.formats.client_states import (
    ALLOWED,
    OBJECTS,
    OF_USERS,
    TENSORS,
    Comparison,
    Marked,
    states,
    with_attributes,
)

DRAWN = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of quantized and typed storages


@pytest.fixture
def allowed() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(ALLOWED)
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


def read_back(path: Path, client: Any, zipped: bool = True, trust_pickle: bool = False) -> None:
    """Save as in a model-states file, and compare."""
    torch.save({"module": {}, "client": client}, path, _use_new_zipfile_serialization=zipped)
    try:
        expected = torch.load(path, weights_only=False)["client"]
    except AttributeError:  # torch loads no tensors of its newer dtypes from legacy archives
        assert not zipped
        return
    file = open_pickled(str(path), trust_pickle)
    read = materialise(file, {"client": file.tree["client"]})["client"]
    assert Comparison().difference(expected, read) is None


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", [*TENSORS, *OBJECTS])
def test_each_is_what_torch_loads(name: str, zipped: bool, tmp_path: Path) -> None:
    value = {**TENSORS, **OBJECTS}[name]
    read_back(tmp_path / "file.pt", [value(), {"again": value()}], zipped)


@pytest.mark.parametrize("name", OF_USERS)
def test_what_the_user_allowed_is_too(name: str, tmp_path: Path, allowed: None) -> None:
    read_back(tmp_path / "file.pt", [OF_USERS[name](), {"again": OF_USERS[name]()}])


@pytest.mark.parametrize("name", OF_USERS)
def test_and_in_a_trusted_file(name: str, tmp_path: Path) -> None:
    read_back(tmp_path / "file.pt", [OF_USERS[name](), {"again": OF_USERS[name]()}], trust_pickle=True)


@DRAWN
@given(states({**TENSORS, **OBJECTS}), st.booleans(), st.booleans())
def test_any_mixture_is_what_torch_loads(
    tmp_path: Path, client: dict[Any, Any], zipped: bool, trust_pickle: bool
) -> None:
    read_back(tmp_path / "file.pt", client, zipped, trust_pickle)


@DRAWN
@given(states({**TENSORS, **OBJECTS, **OF_USERS}))
def test_any_mixture_with_what_the_user_allowed_is_too(tmp_path: Path, allowed: None, client: dict[Any, Any]) -> None:
    read_back(tmp_path / "file.pt", client)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_the_deepest_that_torch_saves_is_read(kind: type, tmp_path: Path) -> None:
    node: Any = torch.ones(2)
    for _ in range(400):
        node = {"deeper": node} if kind is dict else kind([node])
    read_back(tmp_path / "file.pt", node)


class NotAllowed:
    pass


@pytest.mark.parametrize(
    ("value", "found"),
    [
        pytest.param(NotAllowed(), "NotAllowed", id="a class"),
        pytest.param({"deep": [{NotAllowed: 1}]}, "NotAllowed", id="a name as a key"),
        pytest.param(NotAllowed().__init__, "getattr", id="a method"),  # type: ignore[misc]
        pytest.param(os.getcwd, "getcwd", id="a function"),
        pytest.param(np.array([NotAllowed()], dtype=object), "numpy.dtype", id="an array of objects"),
        pytest.param(torch.ones(2).as_subclass(Marked), "Marked", id="a class of tensors"),
        pytest.param(with_attributes(torch.ones(2), owner=NotAllowed()), "NotAllowed", id="an attribute"),
    ],
)
def test_what_cannot_be_made_is_one_entry(value: Any, found: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    shared = torch.arange(3.0)
    client = {"epoch": 3, "odd": value, 0: "fold", "seen": [shared, shared[1:]], "linked": [shared, [value]]}
    torch.save({"module": {"weight": shared}, **client}, path)
    file = open_pickled(str(path))
    assert isinstance(file.tree["module"]["weight"], TensorRef), "weights are read"
    entries = {key: file.tree[key] for key in client}
    with pytest.raises((UnsafePickleError, UnsupportedError), match=r"the entry 'odd' of the client state") as caught:
        materialise_entries(file, entries, may_skip=lambda _: False)
    assert found in str(caught.value.found) and caught.value.file == str(path)
    assert "on_unreadable_entry" in str(caught.value.remedy) and "topology" not in str(caught.value.remedy)
    read, left_out = materialise_entries(file, entries, may_skip=lambda _: True)
    assert set(left_out) == {"odd", "linked"}
    assert "the entry 'odd' of the client state" in left_out["odd"].problem
    assert Comparison().difference({"epoch": 3, 0: "fold", "seen": [shared, shared[1:]]}, read) is None


def test_what_fails_in_a_class_that_the_user_allowed_is_told_of_by_its_name(tmp_path: Path) -> None:
    torch.save({"module": {}, "odd": Fails()}, tmp_path / "file.pt")
    with (
        torch.serialization.safe_globals([Fails]),
        pytest.raises(UnsupportedError, match="cannot be rebuilt") as caught,
    ):
        file = open_pickled(str(tmp_path / "file.pt"))
        materialise_entries(file, file.tree, lambda _: False)
    assert "Fails: ZeroDivisionError" in str(caught.value.found)


class Fails:
    def __init__(self, *numbers: int) -> None:
        self.ratio = 1 / (1 - len(numbers))

    def __reduce__(self) -> Any:
        return Fails, (1,)

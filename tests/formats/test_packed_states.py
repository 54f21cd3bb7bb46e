"""Bytes that a module may unpickle are found wherever they are in its extra state."""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ckpt.errors import UnsafePickleError
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.formats.packed_states import has_bytes, refuse_packed

endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    "value",
    [
        b"x",
        bytearray(b"x"),
        io.BytesIO(b"x"),
        {"a": [(1, {"b": b"x"})]},
        {b"x": 1},
        OrderedDict(a=io.BytesIO()),
        SimpleNamespace(inner=SimpleNamespace(raw=b"x")),
        {frozenset([b"x"])},
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(3, dtype=torch.int8),
        np.zeros(3, dtype=np.uint8),
        np.frombuffer(b"abc", dtype="S1"),
        [endless, b"x"],
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_are_found(value: Any) -> None:
    assert has_bytes(value)
    with pytest.raises(UnsafePickleError) as raised:
        refuse_packed("file", {"weight": b"other", "a._extra_state": value})
    assert (raised.value.parameter, raised.value.file) == ("a._extra_state", "file")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        3,
        {"history": torch.zeros(3), "mask": torch.zeros(3, dtype=torch.uint8), "more": [1.5, ("a", {"b": None})]},
        torch.empty(0, dtype=torch.uint8),
        torch.zeros(3, dtype=torch.bool),
        np.zeros(3),
        endless,
        SimpleNamespace(number=3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_else_is_taken_for_them(value: Any) -> None:
    assert not has_bytes(value)
    refuse_packed("file", {"a._extra_state": value, "client": b"x"})


@pytest.mark.parametrize(
    "tree", [{"module": {"a._extra_state": b"x"}}, {"a._extra_state": b"x"}], ids=["model", "layer"]
)
def test_objects_for_another_loader_have_none(tmp_path: Path, tree: dict[str, Any]) -> None:
    torch.save(tree, tmp_path / "file.pt")
    with pytest.raises(UnsafePickleError, match="may unpickle"):
        read_objects(str(tmp_path / "file.pt"))
    torch.save({"module": {"a.weight": torch.ones(2)}, "client": b"x", "queue": deque([1])}, tmp_path / "file.pt")
    assert read_objects(str(tmp_path / "file.pt"))["client"] == b"x"

"""Bytes that a module may unpickle are found wherever they are in its extra state."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ckpt.errors import UnsafePickleError
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.formats.packed_states import has_bytes, may_be_pickle, refuse_packed

#: A pickle that calls, of 64 bytes.
CALLS = b"cbuiltins\nprint\n(tR.".ljust(64, b"\0")
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
        np.frombuffer(b"abcd", dtype="S4"),
        np.frombuffer(CALLS, dtype=np.float64),
        *(torch.frombuffer(bytearray(CALLS), dtype=dtype) for dtype in (torch.float32, torch.int64, torch.bfloat16)),
        torch.frombuffer(bytearray(CALLS), dtype=torch.bool),
        torch.frombuffer(bytearray(CALLS), dtype=torch.complex64),
        torch.zeros(3, dtype=torch.uint8).untyped_storage(),
        {"a": torch.zeros(3).storage()},
        {"queue": deque([b"x"])},
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
        torch.tensor([True, False]),
        torch.arange(2000)[:, None].expand(2000, 2),
        torch.arange(40, 50, dtype=torch.float32),
        torch.ones(3).to_sparse(),
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


class Recorder(pickle.Unpickler):
    """Notes what a pickle looks up."""

    found: list[str]

    def find_class(self, module: str, name: str) -> Any:
        self.found.append(f"{module}.{name}")
        return print


#: Opcodes, bytes that are none, and many newlines: GLOBAL reads two lines.
ALPHABET = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes] + [
    *[b"\n"] * 12,
    b"\0",
    b"\1",
    b"\4",
    b"a",
    b"\xff",
]
#: Those that ask for memory by a number that comes after.
ASKING = (b"r", b"B", b"\x8e", b"\x96")


def test_bytes_that_are_not_taken_for_a_pickle_end_an_unpickler_before_it_looks_anything_up() -> None:
    rng = random.Random(7)
    passed = 0
    for _ in range(200_000):
        length = rng.randint(1, 12)
        data = b"".join(
            rng.choice(ALPHABET if rng.random() < 0.8 else [bytes([rng.randrange(256)])]) for _ in range(length)
        )
        if may_be_pickle(data) or any(code in data for code in ASKING):
            continue
        passed += 1
        reader = Recorder(io.BytesIO(data))
        reader.found = []
        with pytest.raises(Exception):  # noqa: B017  of many kinds
            reader.load()
        assert reader.found == [], data
    assert passed > 50_000


@pytest.mark.parametrize("number", [*range(300), 65_538, 1 << 40])
def test_counters_are_no_pickle(number: int) -> None:
    assert not has_bytes(torch.tensor(number))


@pytest.mark.parametrize("bomb", [b"Nr\xff\xff\xff\x7f", b"Np2000000000\n", b"(K\1K\1u", b"K\1.", b"(" * 2000])
def test_what_costs_memory_or_is_a_pickle_is_taken_for_one(bomb: bytes) -> None:
    assert may_be_pickle(bomb)

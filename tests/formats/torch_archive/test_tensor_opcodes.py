"""Opcodes that are interpreted together, against the same ones by one."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.formats.torch_archive import tensor_opcodes, unpickler
from elastic_ckpt.formats.torch_archive.globals import find_global, set_state
from elastic_ckpt.formats.torch_archive.tensors import StorageRef, storage_id
from elastic_ckpt.formats.torch_archive.unpickler import Machine


def pickled(tree: Any, is_on_cuda: bool = False) -> bytes:
    """The pickle of a tree, in which memo indices are beyond 255, where torch's own have four bytes."""
    stream = io.BytesIO()
    torch.save([[str(number) for number in range(300)], tree], stream)
    data = zipfile.ZipFile(stream).read("archive/data.pkl")
    return on_cuda(data) if is_on_cuda else data


def on_cuda(data: bytes) -> bytes:
    """The same with storages of a GPU, whose location torch writes anew for each."""
    machine = Machine(data, find_global, load, set_state)
    machine.run()
    [place] = [index for index, value in machine.memo.items() if value == "cpu"]
    get = b"h" + bytes([place]) if place < 256 else b"j" + place.to_bytes(4, "little")
    parts = data.split(get)
    written = [b"X\x06\0\0\0cuda:0r" + (1000 + number).to_bytes(4, "little") for number in range(len(parts) - 1)]
    return parts[0] + b"".join(new + part for new, part in zip(written, parts[1:], strict=True))


def load(persistent_id: Any) -> StorageRef:
    dtype, key, nbytes, _ = storage_id(persistent_id)
    return StorageRef(dtype, nbytes, 64 * int(key))


def outcome(data: bytes) -> tuple[Any, ...]:
    machine = Machine(data, find_global, load, set_state)
    try:
        tree = machine.run()
    except Exception as error:
        return type(error), str(error)
    return repr(tree), machine.at, repr(machine.memo), machine.marks, machine.stack


def outcomes(data: bytes) -> list[tuple[Any, ...]]:
    """What opcodes do together, and what each of them does."""
    with pytest.MonkeyPatch.context() as patch:
        together = outcome(data)
        patch.setattr(unpickler, "tensor_reader", lambda *_: lambda _at, _function: None)
        return [together, outcome(data)]


def count_read(data: bytes) -> int:
    """How many tensors are read at once."""
    read: list[Any] = []

    def counting(*arguments: Any) -> Any:
        reader = tensor_opcodes.tensor_reader(*arguments)
        return lambda at, function: read.append(found) or found if (found := reader(at, function)) else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpickler, "tensor_reader", counting)
        Machine(data, find_global, load, set_state).run()
    return len(read)


@pytest.mark.parametrize("is_on_cuda", [False, True])
def test_tensors_of_torch_save_are_read_at_once(is_on_cuda: bool) -> None:
    sizes = [(8,), (8, 8), (300, 8), (2, 3, 4), (70_000, 2)]
    data = pickled({number: torch.zeros(size) for number, size in enumerate(sizes * 4)}, is_on_cuda)
    assert count_read(data) == 19, "all but the first, whose names are no memo's yet"
    together, one_by_one = outcomes(data)
    assert together == one_by_one
    assert "cuda:0" in together[2] or not is_on_cuda


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 300), max_size=4).filter(lambda sizes: torch.Size(sizes).numel() < 1e5))
    tensor = torch.zeros(shape, dtype=draw(DTYPES))
    kind = draw(st.sampled_from(["plain", "view", "parameter", "transposed"]))
    if kind == "view" and tensor.numel():
        return tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1)) :]
    if kind == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    return tensor.t() if kind == "transposed" and tensor.dim() == 2 else tensor


@given(st.lists(tensors(), max_size=6), st.booleans())
def test_any_tensor_is_read_as_by_single_opcodes(each: list[torch.Tensor], is_repeated: bool) -> None:
    tree = OrderedDict((str(number), tensor) for number, tensor in enumerate(each))
    together, one_by_one = outcomes(pickled([tree, tree, [tensor[...] for tensor in each] if is_repeated else None]))
    assert together == one_by_one


BASE = [pickled([torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(3), torch.zeros(2, 2, 9)], cuda) for cuda in (0, 1)]
BYTES = st.one_of(st.integers(0, 255), st.sampled_from(b"hjKMJrtRQ()X\x85\x86\x87\x88\x89."))


@given(st.sampled_from(BASE), st.lists(st.tuples(st.integers(1, 330), BYTES), min_size=1, max_size=3))
def test_changed_opcodes_do_the_same_or_fail_the_same(base: bytes, changes: list[tuple[int, int]]) -> None:
    data = bytearray(base)
    for back, byte in changes:
        data[-back] = byte
    together, one_by_one = outcomes(bytes(data))
    assert together == one_by_one


@given(st.sampled_from(BASE), st.integers(1, 330))
def test_a_pickle_that_ends_inside_of_a_tensor_fails_the_same(base: bytes, missing: int) -> None:
    together, one_by_one = outcomes(base[:-missing])
    assert together == one_by_one

"""Hostile pickles in sound archives: refused, and nothing runs."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  not to be imported while the canary watches
import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.tensor
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from elastic_ckpt.errors import DamagedError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.torch_archive import charges
from tests.attacks.assembly import archive, legacy, packed, records_of
from tests.attacks.guard import TooMuchWork, guarded, read
from tests.attacks.pickles import BOMBS, MADE_BY_TORCH, NAMES, TRICKS, Nested, routes

#: The size of an object of Python for each byte of a pickle that can make one.
OBJECT_NBYTES = 200


@pytest.fixture
def real_classes() -> None:
    """Classes that stand-ins become, imported."""
    assert LossScaler.__module__ == "deepspeed.runtime.fp16.loss_scaler"
    assert ZeroStageEnum.__module__ == "deepspeed.runtime.zero.config"


def test_the_canary_sings(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="code ran"), guarded(1 << 30):
        pickle.loads(pickle.dumps(Nested()))
    with pytest.raises(AssertionError, match="are allowed"), guarded(1 << 20):
        bytearray(2 << 20)
    with pytest.raises(TooMuchWork), guarded(1 << 20):
        while True:
            len("")


@pytest.mark.parametrize(("module", "qualname"), NAMES, ids=".".join)
def test_no_route_leads_to_a_function_that_is_not_on_the_list(tmp_path: Path, module: str, qualname: str) -> None:
    for route, pickled in routes(module, qualname).items():
        for path in (archive(tmp_path, pickled), legacy(tmp_path, pickled, b"\x80\x02].")):
            file, error = read(path)
            assert file is None, route
            is_old = type(error) is UnsupportedError and "protocol 0 or 1" in str(error)
            assert is_old or type(error) in (UnsafePickleError, DamagedError), route


@pytest.mark.parametrize("what", TRICKS)
@pytest.mark.usefixtures("real_classes")
def test_tricks_with_what_is_on_the_list_are_refused(tmp_path: Path, what: str) -> None:
    file, error = read(archive(tmp_path, TRICKS[what], bytes(16)))
    assert file is None and error is not None


@pytest.mark.parametrize("what", BOMBS)
def test_bombs_do_not_go_off(tmp_path: Path, what: str) -> None:
    file, error = read(archive(tmp_path, BOMBS[what], bytes(16)), copies=OBJECT_NBYTES)
    assert file is None and error is not None


@pytest.mark.parametrize("what", MADE_BY_TORCH)
def test_what_takes_torch_long_or_much_is_not_made(tmp_path: Path, what: str) -> None:
    path = archive(tmp_path, MADE_BY_TORCH[what])
    with guarded(64 << 20), pytest.raises((UnsafePickleError, UnsupportedError, DamagedError)):
        read_objects(path)


@pytest.mark.parametrize("opcode", [b"]", b"}", b"\x8f", b"\x94", b")\x85", b")N\x86", b"(t", b"(l", b"h\x00)R"])
def test_containers_take_only_so_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opcode: bytes) -> None:
    """A byte of a pickle makes a set of 216."""
    monkeypatch.setattr(charges, "_MOST_NBYTES", 64 << 20)
    pickled = b"\x80\x04ccollections\nOrderedDict\nq\x00" + opcode * 400_000 + b"."
    path = archive(tmp_path, pickled)
    with guarded(64 << 20), pytest.raises(UnsupportedError) as caught:
        open_pickled(path)
    assert "take more memory than elastic_ckpt spends on a file of its size" in str(caught.value)
    assert "a limit of elastic_ckpt" in str(caught.value)


def test_a_large_pickle_is_a_small_part_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ckpt.formats.torch_archive.archive._MOST_SMALL_PICKLE_NBYTES", 1 << 10)
    pickled = pickle.dumps(list(range(1000)), 2)
    with pytest.raises(UnsupportedError, match=r"a pickle of at most 1024 bytes"):
        open_pickled(archive(tmp_path, pickled))
    assert open_pickled(archive(tmp_path, pickled), trust_pickle=True).tree == list(range(1000))
    assert open_pickled(archive(tmp_path, pickled, bytes(8 * len(pickled)))).tree == list(range(1000))


@pytest.mark.parametrize("place", ["key", "value", "attribute", "slot", "hook", "behind the pickle"])
def test_what_torch_itself_saves_of_a_hostile_object_is_refused_or_not_looked_at(tmp_path: Path, place: str) -> None:
    tensor: Any = torch.ones(3)
    if place == "attribute":
        tensor.evil = Nested()
    if place == "hook":
        tensor = torch.nn.Parameter(tensor)
        tensor._backward_hooks = {0: Nested()}
    trees: dict[str, Any] = {"key": {(1, Nested()): 1}, "value": {"module": {"weight": Nested()}}}
    torch.save(trees.get(place, [tensor, Nested()] if place == "slot" else [tensor]), tmp_path / "file.pt")
    path = str(tmp_path / "file.pt")
    if place == "behind the pickle":
        with zipfile.ZipFile(path) as source:
            records = [(name, source.read(name)) for name in source.namelist()]
        first = [(name, raw + pickle.dumps(Nested()) if name.endswith(".pkl") else raw) for name, raw in records]
        Path(path).write_bytes(packed(first))
        assert read(path)[1] is None
    else:
        error = read(path)[1]
        assert error is None if place == "hook" else type(error) is UnsafePickleError


def test_the_extension_registry_is_not_asked(tmp_path: Path) -> None:
    import copyreg

    copyreg.add_extension("os", "system", 240)
    copyreg._extension_cache[240] = os.system  # type: ignore[attr-defined]
    try:
        pickled = b"\x80\x02\x82\xf0X\x04\x00\x00\x00exit\x85R."
        assert pickle.loads(pickled) == 0, "or this proves nothing"
        assert type(read(archive(tmp_path, pickled))[1]) is DamagedError
    finally:
        copyreg.remove_extension("os", "system", 240)


def test_an_object_of_hostile_tensors_alone_is_data(tmp_path: Path) -> None:
    """The control of all others: an archive of the same assembly is read."""
    path = tmp_path / "file.pt"
    path.write_bytes(packed(records_of(b"\x80\x02}X\x01\x00\x00\x00aK\x01s.")))
    file, error = read(str(path))
    assert error is None and file is not None and file.tree == {"a": 1}

"""Files of DataStates-LLM: read as they were saved, or refused."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.errors import DamagedError, UnsafePickleError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled
from tests.datastates import save, write

STATE: dict[str, Any] = {
    "module": OrderedDict(weight=torch.arange(12.0).view(3, 4).t(), bias=torch.ones(5, dtype=torch.bfloat16)),
    "optimizer": {
        "state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.arange(7)}},
        "groups": [{"lr": 0.1}, [torch.ones(2)]],
    },
    "shapes": [OrderedDict(weight=torch.Size([4, 3]))],
    "text": "TENSOR|of a user",
    "pair": (1, "TENSOR|pair|1"),
    "dtype": torch.float32,
}


def saved(path: Path, state: Any = STATE) -> str:
    save(state, path / "state.pt")
    return str(path / "state.pt")


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    file = open_pickled(saved(tmp_path))
    tree = materialise(file, file.tree)
    assert torch.equal(tree["module"]["weight"], STATE["module"]["weight"])
    assert (
        torch.equal(tree["module"]["bias"], STATE["module"]["bias"]) and tree["module"]["bias"].dtype == torch.bfloat16
    )
    states = tree["optimizer"]["state"][0]
    assert (
        states["step"] == torch.tensor(4.0)
        and states["step"].shape == ()
        and torch.equal(states["exp_avg"], torch.arange(7))
    )
    assert tree["optimizer"]["groups"][0] == {"lr": 0.1} and torch.equal(
        tree["optimizer"]["groups"][1][0], torch.ones(2)
    )
    assert {key: tree[key] for key in ("text", "pair", "dtype")} == {
        key: STATE[key] for key in ("text", "pair", "dtype")
    }
    assert tree["shapes"][0]["weight"] == torch.Size([4, 3])


def header_of(offsets: Any, shape: Any = (2,), dtype: str = "torch.float32") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "tree", "found"),
    [
        (header_of([0, 8]), {}, "its state does not have the tensors ['a']"),
        ({}, {"a": "TENSOR|a"}, "its header does not list the tensor a"),
        (header_of([0, 8]) | {"b": header_of([4, 12])["a"]}, {"a": "TENSOR|a", "b": "TENSOR|b"}, "overlap"),
        (header_of([0, 12]), {"a": "TENSOR|a"}, "in 12 bytes"),
        (header_of([16, 24]), {"a": "TENSOR|a"}, "its header describes bytes 16 to 24 of 16"),
        (header_of([-8, 0]), {"a": "TENSOR|a"}, "its header describes bytes -8 to 0"),
        (header_of([0, 8], (-2,)), {"a": "TENSOR|a"}, "has a size, stride or offset that is none"),
        (header_of([0, 8], (2.0,)), {"a": "TENSOR|a"}, "has a size, stride or offset that is none"),
        (header_of([0, 8], dtype="torch.storage"), {"a": "TENSOR|a"}, "of dtype torch.storage"),
        ({"a": {"dtype": "torch.float32", "shape": [2], "offsets": [0, 8]}}, {"a": "TENSOR|a"}, "without data_offsets"),
        (header_of([0, 8]), {"b": "TENSOR|a"}, "its state does not have the tensors ['a']"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(header: dict[str, Any], tree: Any, found: str, tmp_path: Path) -> None:
    write(tmp_path / "state.pt", header, bytes(16), pickle.dumps(tree))
    with pytest.raises(DamagedError) as refused:
        open_pickled(str(tmp_path / "state.pt"))
    assert found in str(refused.value.found)


def test_two_tensors_of_one_key_are_refused(tmp_path: Path) -> None:
    """The library writes both under one key, so that one of them is lost."""
    path = saved(tmp_path, {"states": {0: torch.ones(2), "0": torch.zeros(2)}})
    with pytest.raises(DamagedError, match="truncated or unreadable") as refused:
        open_pickled(path)
    assert "two of that key" in str(refused.value.found)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = Path(saved(tmp_path))
    data = path.read_bytes()
    for nbytes in (0, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:nbytes])
        with pytest.raises(DamagedError):
            open_pickled(str(path))


class _Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def test_its_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "state.pt", {}, b"", pickle.dumps({"client": _Attack()}))
    with pytest.raises(UnsafePickleError):
        open_pickled(str(tmp_path / "state.pt"))
    assert not (tmp_path / "attacked").exists()

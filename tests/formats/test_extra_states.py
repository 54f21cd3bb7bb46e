"""Extra states of modules in files: which values are one, and which rank gets which."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.errors import UnsafePickleError
from elastic_ckpt.formats.extra_states import NONE, ExtraStateCopy, digests, extra_states_in, made_extra_states, settle
from elastic_ckpt.formats.grid import Grid
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.rank_files import extra_states_of
from elastic_ckpt.formats.torch_archive.globals import find_global, set_state
from elastic_ckpt.tools.conversion.rewriting import rewrite

NAME = "block.gauge._extra_state"


class Own:
    """A class that no list of safe globals has."""

    def __init__(self) -> None:
        self.number = 3


def file_of(folder: Path, value: Any, name: str = "layer_01-model_states.pt") -> PickledFile:
    """A pipeline layer's file with this extra state."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"weight": torch.ones(2), NAME: value}, folder / name)
    return open_pickled(str(folder / name))


def digest(folder: Path, value: Any) -> bytes:
    file = file_of(folder, value)
    return digests(file, extra_states_in(file))[NAME]


def stream(raw: bytes, position: int = 0) -> io.BytesIO:
    made = io.BytesIO(raw)
    made.seek(position)
    return made


BASE = torch.arange(6.0)
VALUES: dict[str, tuple[Any, Any, Any]] = {
    # a value, an equal one that is saved otherwise, and one that differs
    "tensors": (BASE, BASE.clone(), BASE + 1),
    "views": (BASE.view(2, 3).t(), BASE.view(2, 3).t().contiguous(), BASE.view(2, 3)),
    "dtypes": (torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "gradients": (torch.ones(2), torch.ones(2), torch.ones(2, requires_grad=True)),
    "dictionaries": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}),
    "sets": ({"a", "b", "c"}, {"c", "b", "a"}, {"a", "b"}),
    "shared": ([BASE, BASE], [BASE, BASE.clone()], [BASE, BASE[:1]]),
    "numbers": ([1, 0.0], [1, 0.0], [1, -0.0]),
    "kinds of numbers": (1, 1, 1.0),
    "flags": (1, 1, True),
    "undefined numbers": (float("nan"), float("nan"), float("inf")),
    "bytes": (b"ab", b"ab", bytearray(b"ab")),
    "joined": (["ab", "c"], ["ab", "c"], ["a", "bc"]),
    "streams": (stream(b"abc"), stream(b"abc"), stream(b"abc", 1)),
    "ordered": (OrderedDict(a=1), OrderedDict(a=1), {"a": 1}),
    "arrays": (np.arange(3), np.arange(3), np.arange(3) * 2),
    "objects of Python": (deque([1, 2], 5), deque([1, 2], 5), deque([1, 2], 6)),
}


@pytest.mark.parametrize("case", VALUES)
def test_digests_tell_values_apart_and_nothing_else(case: str, tmp_path: Path) -> None:
    value, equal, other = (digest(tmp_path / str(number), each) for number, each in enumerate(VALUES[case]))
    assert value == equal
    assert value != other


def test_nothing_is_told_from_what_is_empty(tmp_path: Path) -> None:
    assert digest(tmp_path, None) == NONE
    assert NONE not in (digest(tmp_path, empty) for empty in ({}, (), b"", "", torch.empty(0), False, 0))


def test_a_value_that_contains_itself_is_another_one_in_each_file(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert digest(tmp_path / "a", endless) == digest(tmp_path / "a", endless) != digest(tmp_path / "b", endless)


def test_a_name_is_one_by_its_last_part_alone() -> None:
    assert is_extra_state("_extra_state") and is_extra_state("a.0._extra_state")
    assert not is_extra_state("a.my_extra_state") and not is_extra_state("_extra_state.weight")


def test_streams_come_back_at_their_position(tmp_path: Path) -> None:
    made = made_extra_states(file_of(tmp_path, {"s": stream(b"abcdef", 4)}), trust_pickle=True)[NAME]["s"]
    assert type(made) is io.BytesIO
    assert (made.getvalue(), made.tell()) == (b"abcdef", 4)


@pytest.mark.parametrize(
    "state", [(b"ab", 3, None), (b"ab", -1, None), (b"ab", 1 << 62, None), (b"ab", 0, {"read": 1}), ("ab", 0, None)]
)
def test_a_stream_of_anything_else_is_refused(state: tuple[Any, ...]) -> None:
    made = find_global("_io", "BytesIO").call
    assert made is not None
    set_state(made(), (b"ab", 2, None))
    with pytest.raises(pickle.UnpicklingError):
        set_state(made(), state)


def test_what_is_not_made_is_an_error_of_its_entry_alone(tmp_path: Path) -> None:
    torch.save({NAME: Own(), "other._extra_state": 5}, tmp_path / "layer_01-model_states.pt")
    made = made_extra_states(open_pickled(str(tmp_path / "layer_01-model_states.pt")))
    assert made["other._extra_state"] == 5
    error = made[NAME]
    assert isinstance(error, UnsafePickleError)
    assert error.parameter == NAME and error.file and "Own" in str(error.found)


def test_each_rank_gets_its_own_where_there_are_as_many_and_else_what_all_have() -> None:
    copies = [ExtraStateCopy("a", f"file{dp}{tp}", "a", bytes([dp, tp]), dp, tp) for dp in (0, 1) for tp in (0, 1)]
    assert [settle(copies, dp, tp)["a"].path for dp in (0, 1) for tp in (0, 1)] == [
        "file00",
        "file01",
        "file10",
        "file11",
    ]
    assert settle(copies, 1, 0)["a"].other is None
    assert (settle(copies, None, 1)["a"].path, settle(copies, None, 1)["a"].other) == ("file01", "file11")
    same = [copy._replace(digest=b"same") for copy in copies]
    assert (settle(same, None, None)["a"].path, settle(same, None, None)["a"].other) == ("file00", None)
    assert settle([same[0]._replace(digest=NONE)], 0, 0)["a"].is_none


def test_files_of_model_parallel_ranks_are_told_by_the_tensor_parallel_rank() -> None:
    models: Any = {mp: [SimpleNamespace(path=f"mp{mp}", extra_states={"a": bytes([mp])})] for mp in range(2)}
    grid = Grid(((0, 1),), partition_degree=2)
    mine = extra_states_of(models, grid, RankCoordinates(partition_degree=5, tp=2, tp_rank=1))
    assert (mine["a"].path, mine["a"].other) == ("mp1", None)
    merged = extra_states_of(models, grid, RankCoordinates(tp=1))
    assert (merged["a"].path, merged["a"].other) == ("mp0", "mp1")


def test_what_cannot_be_read_is_left_out_of_a_file_that_is_written_anew(tmp_path: Path) -> None:
    source = tmp_path / "mp_rank_00_model_states.pt"
    module = {"weight": torch.ones(2), NAME: Own(), "other._extra_state": {"a": BASE}}
    torch.save({"module": module, "global_steps": 4, "note": Own(), "epoch": 3}, source)
    with pytest.raises(UnsafePickleError) as raised:
        rewrite(str(source), tmp_path / "new.pt", trust_pickle=False, skip_unreadable=False)
    assert raised.value.remedies[-1].config == {"on_unreadable_entry": "skip"}
    left_out = rewrite(str(source), tmp_path / "new.pt", trust_pickle=False, skip_unreadable=True)
    written = torch.load(tmp_path / "new.pt")
    assert left_out == ["note", NAME]
    assert written.keys() == {"module", "global_steps", "epoch"}
    assert written["module"].keys() == {"weight", "other._extra_state"}
    assert torch.equal(written["module"]["other._extra_state"]["a"], BASE)

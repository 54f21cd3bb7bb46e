"""Arrays and dtypes whose states a file says: numpy itself trusts offsets, sizes and flags."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.objects import read_objects

RECORDS = np.dtype({"names": ["a", "b"], "formats": ["i4", "O"], "offsets": [0, 8], "itemsize": 16})
PARTS = np.dtype(("i4", (2,)))


class Reduced:
    """Is pickled as a call of numpy's, with a state."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def dtype_with(offset: int = 8, itemsize: int = 16, flags: int = 63, spec: str = "V16", sub: Any = None) -> Reduced:
    fields = {"a": (np.dtype("i4"), 0), "b": (np.dtype("O"), offset)}
    return Reduced(np.dtype, (spec, False, True), (3, "|", sub, ("a", "b"), fields, itemsize, 1, flags))


def array_of(dtype: Any, elements: Any, shape: tuple[int, ...] = (1,)) -> Reduced:
    reconstruct, arguments, _ = np.zeros(1).__reduce__()
    return Reduced(reconstruct, arguments, (1, shape, dtype, False, elements))


HOSTILE = {
    "a field far behind its record": array_of(dtype_with(offset=1 << 24), [(1, None)]),
    "a field before its record": array_of(dtype_with(offset=-8), [(1, None)]),
    "a field that reaches over the end": array_of(dtype_with(offset=12), [(1, None)]),
    "a record of 2 GiB": array_of(dtype_with(itemsize=(1 << 31) - 8, spec="V16"), [(1, None)]),
    "a record of 16 MiB": array_of(dtype_with(itemsize=1 << 24, spec=f"V{1 << 24}"), [(1, None)]),
    "objects that say they are numbers": array_of(dtype_with(flags=0), b"\x41" * 16),
    "fewer objects than elements": array_of(np.dtype("O"), [1], (1 << 20,)),
    "bytes for objects": array_of(np.dtype("O"), b"\x41" * 8),
    "a part of another size": array_of(dtype_with(sub=(np.dtype("O"), (1 << 20,))), [(1, None)]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_state_that_reaches_elsewhere_is_refused_though_dtypes_are_allowed(tmp_path: Path, what: str) -> None:
    """As they are wherever megatron.core is imported."""
    torch.save({"module": {}, "odd": HOSTILE[what]}, tmp_path / "file.pt")
    with torch.serialization.safe_globals([np.dtype]), pytest.raises(ElasticCkptError):
        read_objects(str(tmp_path / "file.pt"))


@pytest.mark.parametrize(
    "value",
    [
        np.array([(1, [2]), (3, None)], RECORDS),
        np.zeros(3, [("x", PARTS), ("y", ">f8")]),
        np.array([[1, 2]], "O"),
        np.zeros(2, [("deep", [("a", "i2"), ("b", "S3")])]),
        RECORDS,
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_what_numpy_itself_pickles_is_made(tmp_path: Path, value: Any) -> None:
    torch.save({"module": {}, "fine": value}, tmp_path / "file.pt")
    with torch.serialization.safe_globals([np.dtype]):
        found = read_objects(str(tmp_path / "file.pt"))["fine"]
    dtypes = [getattr(each, "dtype", each) for each in (value, found)]
    assert dtypes[0] == dtypes[1] and type(found) is type(value)
    assert not isinstance(value, np.ndarray) or repr(value) == repr(found)


UNPRINTABLE = {
    "no code points": np.array([0x7FFFFFFF, 0x110000], dtype="<u4").view("<U2"),
    "a big-endian one": np.array([0x61, 0x110000], dtype=">u4").view(">U2"),
    "a date without a unit": np.zeros(2, dtype="datetime64"),
    "a field of no code points": np.array([(1, 0x110000)], dtype="<i4,<u4").view("<i4,<U1"),
    "a field of dates": np.zeros(2, dtype=[("a", "<f4"), ("b", "datetime64")]),
    "a scalar": np.zeros(1, dtype="datetime64")[0],
}


@pytest.mark.parametrize("what", UNPRINTABLE)
def test_what_numpy_can_neither_print_nor_compare_is_refused_where_it_is_read(tmp_path: Path, what: str) -> None:
    torch.save({"module": {}, "lr_scheduler": {"odd": UNPRINTABLE[what]}}, tmp_path / "file.pt")
    with torch.serialization.safe_globals([np.dtype]), pytest.raises(ElasticCkptError):
        read_objects(str(tmp_path / "file.pt"))


@pytest.mark.parametrize(
    "value",
    [np.array(["NaT", "NaT"], "M8"), np.array(["a", "\U0010ffff"], ">U2"), np.array([3], "M8[s]"), np.zeros(0, "U3")],
)
def test_what_numpy_prints_is_read(tmp_path: Path, value: Any) -> None:
    torch.save({"module": {}, "odd": value}, tmp_path / "file.pt")
    assert repr(read_objects(str(tmp_path / "file.pt"))["odd"]) == repr(pickle.loads(pickle.dumps(value, 2)))

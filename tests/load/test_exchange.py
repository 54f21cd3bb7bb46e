"""What ranks tell each other about the files that they opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.played import PlayedJob, in_turn
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.pickled import PickledFile, Trees, open_pickled
from elastic_ckpt.load.metadata import file_opener, join, read_my_share, split


@dataclass(frozen=True)
class Part:
    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("digests",)

    numel: int
    digests: Any = None


@dataclass(frozen=True)
class Item:
    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    names: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    part: Part | None = None


ITEM = Item("0", ("a", "b"), (Part(1, {"x": 1}), Part(2)), Part(3, {"y": 2}))


def test_an_item_is_split_and_joined() -> None:
    common, own = split(ITEM)
    assert own == ["0", {"x": 1}, None, {"y": 2}]
    assert common == Item(..., ("a", "b"), (Part(1, ...), Part(2, ...)), Part(3, ...))  # type: ignore[arg-type]
    assert join(common, own, set()) == ITEM
    assert join(common, own, set()).names is ITEM.names


def test_what_is_empty_in_each_part_stays_in_common_so_that_files_share_these_parts() -> None:
    items = [Item(path, ("a",), (Part(1, {}), Part(2, {}))) for path in "xy"]
    (common, own), (other, others) = map(split, items)
    assert (common, own, others) == (other, ["x"], ["y"])
    assert [join(common, own, set()), join(common, others, set())] == items
    assert join(common, own, set()).parts is join(common, others, set()).parts is common.parts


@dataclass(frozen=True)
class Other(Item):
    """Of another class, with the same fields."""


def test_items_that_consist_of_the_same_objects_stay_of_their_classes() -> None:
    names = ("a",) * 40
    items = [Item("x", names), None, Other("y", names)]  # the first and the last are read by rank 0
    assert PlayedJob(2).run_all(lambda: read_my_share(in_turn(3), items.__getitem__)) == [items] * 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12), st.integers(1, 4))
def test_every_rank_gets_every_item(kinds: list[tuple[int, int]], ranks: int) -> None:
    items: list[Any] = []
    for position, (kind, detail) in enumerate(kinds):
        one = Item(str(position), (f"name{kind}",) * 50, (Part(kind, {detail: position}),))
        items.append(one if kind < 2 else ("of another class", detail))
    job = PlayedJob(ranks)
    assert job.run_all(lambda: read_my_share(in_turn(len(items)), items.__getitem__)) == [items] * ranks


def test_what_files_have_in_common_travels_once_and_only_to_who_lacks_it() -> None:
    names = tuple(f"a parameter of a long name {number}" for number in range(1000))
    everywhere = [Item(str(at), names) for at in range(8)]
    job = PlayedJob(4)
    job.run_all(lambda: read_my_share(in_turn(8), everywhere.__getitem__))
    assert len(job.rounds) == 1 and all(len(sent) < 500 for sent in job.rounds[0])
    once = [Item(str(at), names[::-1]) if at in (3, 7) else item for at, item in enumerate(everywhere)]
    job = PlayedJob(4)
    found = job.run_all(lambda: read_my_share(in_turn(8), once.__getitem__))
    assert found == [once] * 4
    long = [rank for rank, sent in enumerate(job.rounds[1]) if len(sent) > 20_000]
    assert long == [0, 3]  # rank 3 lacks what the others have, and they lack what it has
    assert all(item.names is found[1][4].names for at, item in enumerate(found[1]) if at not in (1, 3, 5, 7))


def test_files_with_one_pickle_are_read_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"zero_pp_rank_{rank}.pt") for rank in range(3)]
    for rank, path in enumerate(paths):
        torch.save({"a": torch.full((3,), float(rank)), "b": "other" if rank == 2 else "same."}, path)
    opened: dict[str, PickledFile] = {}
    trees = [file.tree for file in map(file_opener(MetadataOptions(), opened), paths)]
    assert list(opened) == paths and [tree["b"] for tree in trees] == ["same.", "same.", "other"]
    assert trees[0] is trees[1] is not trees[2]


@pytest.mark.parametrize("change", ["offset", "size"])
def test_a_tree_is_not_shared_if_its_tensors_are_elsewhere(tmp_path: Path, change: str) -> None:
    first, second = str(tmp_path / "a.pt"), str(tmp_path / ("b" * 99 if change == "offset" else "b"))
    torch.save({"a": torch.zeros(3), "b": torch.zeros(2)}, first)
    torch.save({"a": torch.zeros(3), "b": torch.zeros(2 if change == "offset" else 4)}, second)
    known = Trees()
    files = [open_pickled(path, known=known) for path in (first, second)]
    alone = [open_pickled(path) for path in (first, second)]
    assert files[0].tree is not files[1].tree
    assert [file.tree for file in files] == [file.tree for file in alone]
    assert len(known.trees) == 2


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="missing"):
        file_opener(MetadataOptions(), {})(str(tmp_path / "none.pt"))

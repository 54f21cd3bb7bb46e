"""Folders are listed with the links in them, in a bounded number of entries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.errors import NotFoundError, UnsupportedError
from elastic_ckpt.formats.detect import list_below, list_tags
from elastic_ckpt.storage import listing
from elastic_ckpt.storage.listing import MOST_DEPTH, file_names, folder_names
from elastic_ckpt.storage.view import list_folders
from elastic_ckpt.tools.latest import find_latest
from elastic_ckpt.tools.opened import locate
from tests.nested_folders import nested


def test_folders_and_links_to_them_are_listed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    targets = {"link": "folder", "to a file": "file", "dangling": "nowhere", "loop": "loop", "itself": ".", "up": ".."}
    for name, target in targets.items():
        (tmp_path / name).symlink_to(target)
    assert sorted(folder_names(str(tmp_path))) == ["folder", "link"]
    assert len(file_names(str(tmp_path))) == 8


@pytest.mark.parametrize("depth", [MOST_DEPTH, MOST_DEPTH + 1, 1500, 3000])
def test_a_walk_ends_where_folders_are_nested_deeper_than_in_a_checkpoint(tmp_path: Path, depth: int) -> None:
    unlisted = list[OSError]()
    scanned = list[str]()
    with nested(tmp_path, depth), mock.patch.object(listing.os, "scandir", noted(os.scandir, scanned)):
        (tmp_path / "d" / "file").write_bytes(b"abc")
        files = list(listing.walk(str(tmp_path), unlisted.append))
    assert [(path, version.nbytes) for path, version in files] == [(str(tmp_path / "d" / "file"), 3)]
    assert len(scanned) == MOST_DEPTH + 1
    assert [error.filename for error in unlisted] == (
        [str(tmp_path.joinpath(*["d"] * (MOST_DEPTH + 1)))] if depth > MOST_DEPTH else []
    )


def noted(real: Callable[[str], Any], calls: list[str]) -> Callable[[str], Any]:
    def note(path: str) -> Any:
        calls.append(path)
        return real(path)

    return note


def test_links_alone_are_followed_up_to_the_root(tmp_path: Path) -> None:
    """Whose real path the system looks up folder by folder."""
    (tmp_path / "x").mkdir()
    for number in range(20):
        (tmp_path / "x" / str(number)).mkdir()
        (tmp_path / "x" / str(number) / "file").touch()
    (tmp_path / "x" / "again").symlink_to("0")
    (tmp_path / "x" / "0" / "up").symlink_to("..")
    (tmp_path / "x" / "1" / "root").symlink_to("/")
    resolved = list[str]()
    with mock.patch.object(listing.os.path, "realpath", noted(os.path.realpath, resolved)):
        files = [path for path, _ in listing.walk(str(tmp_path / "x"))]
    assert files == sorted(str(tmp_path / "x" / str(number) / "file") for number in range(20))
    assert sorted(resolved) == sorted(str(tmp_path / "x" / name) for name in (".", "again", "0/up", "1/root"))


tree_names = st.sampled_from(["a", "b", "c"])
trees = st.recursive(
    st.one_of(st.none(), st.lists(tree_names, max_size=3)),  # a file, or a link to this path from the top
    lambda inner: st.dictionaries(tree_names, inner, max_size=3),
    max_leaves=12,
)


def make(folder: Path, tree: dict[str, Any], top: Path) -> None:
    for name, inner in tree.items():
        if inner is None:
            (folder / name).write_bytes(b"x")
        elif isinstance(inner, list):
            (folder / name).symlink_to(top.joinpath(*inner))
        else:
            (folder / name).mkdir()
            make(folder / name, inner, top)


def by_the_systems_walk(folder: str) -> list[str]:
    """What Python's own walk finds, each folder once."""
    walked, top, found = set[str](), os.path.realpath(folder), list[str]()
    for inside, folders, names in os.walk(folder, followlinks=True):
        itself = os.path.realpath(inside)
        if itself in walked or top.startswith(os.path.join(itself, "")):
            folders.clear()
            continue
        walked.add(itself)
        folders.sort()
        found += [os.path.join(inside, name) for name in sorted(names)]
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(tree_names, trees, max_size=3))
def test_a_walk_finds_what_pythons_own_finds(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    top = tmp_path_factory.mktemp("tree")
    make(top, tree, top)
    assert [path for path, _ in listing.walk(str(top))] == by_the_systems_walk(str(top))


def test_more_files_than_a_checkpoint_has_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        (tmp_path / str(number % 3)).mkdir(exist_ok=True)
        (tmp_path / str(number % 3) / str(number)).touch()
    monkeypatch.setattr(listing, "MOST_ENTRIES", 12)
    assert len(list(listing.walk(str(tmp_path)))) == 9
    monkeypatch.setattr(listing, "MOST_ENTRIES", 11)
    with pytest.raises(UnsupportedError, match="more files than any checkpoint"):
        list(listing.walk(str(tmp_path)))


@pytest.mark.parametrize("most", [8, 9])
def test_a_folder_of_more_entries_than_a_checkpoint_has_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    for number in range(9):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(listing, "MOST_ENTRIES", most)
    for names in (file_names, folder_names):
        if most == 9:
            assert sorted(names(str(tmp_path))) == sorted(map(str, range(9)))
            continue
        with pytest.raises(UnsupportedError, match="more files than any checkpoint") as caught:
            names(str(tmp_path))
        assert caught.value.file == str(tmp_path) and caught.value.expected == "at most 8 below it"


def test_a_folder_that_nobody_asked_for_may_have_any_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag, files in {"global_step1": 1, "images": 30}.items():
        (tmp_path / "run" / tag).mkdir(parents=True)
        for number in range(files):
            (tmp_path / "run" / tag / f"mp_rank_{number:02d}_model_states.pt").touch()
    monkeypatch.setattr(listing, "MOST_ENTRIES", 29)
    assert list_tags(str(tmp_path / "run")) == ["global_step1"]
    assert [found.tag for _, found in list_below(str(tmp_path))] == ["global_step1"]


def linked_in_circles(folder: Path, width: int) -> None:
    """Two folders, each with many links to the other."""
    for name, other in (("a", "b"), ("b", "a")):
        (folder / name).mkdir()
        for number in range(width):
            (folder / name / str(number)).symlink_to(folder / other)


SEARCHES: dict[str, Callable[[str], object]] = {
    "list_below": list_below,
    "locate": lambda path: locate(path, None),
    "find_latest": find_latest,
    "list_folders": lambda path: list_folders("", [path]),
}


@pytest.mark.parametrize("what", SEARCHES)
def test_links_in_circles_do_not_multiply_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    linked_in_circles(tmp_path, 60)
    entries = list[str]()
    monkeypatch.setattr(listing, "MOST_SEARCHED", 3000)
    refused = pytest.raises(UnsupportedError, match="more files than any checkpoint")
    with mock.patch.object(listing.os, "scandir", noted(os.scandir, entries)), refused as caught:
        SEARCHES[what](str(tmp_path / "a"))
    assert caught.value.file == str(tmp_path / "a") and caught.value.expected == "at most 3000 below it"
    assert len(entries) < 300


def test_links_to_the_folder_that_has_them_are_not_searched(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for number in range(100):
        (tmp_path / "run" / str(number)).symlink_to(tmp_path / "run")
    listed = list[str]()
    with mock.patch.object(listing.os, "scandir", noted(os.scandir, listed)), pytest.raises(NotFoundError):
        locate(str(tmp_path / "run"), None)
    assert len(listed) < 20


def test_links_lead_to_other_disks_but_not_into_the_kernels_file_systems(tmp_path: Path) -> None:
    (tmp_path / "disk" / "zero").mkdir(parents=True)
    (tmp_path / "disk" / "zero" / "file").write_bytes(b"abc")
    (tmp_path / "tag").mkdir()
    for name, target in {"zero": tmp_path / "disk" / "zero", "p": "/proc", "q": "/proc/self/task", "s": "/sys"}.items():
        (tmp_path / "tag" / name).symlink_to(target)
    skipped = list[OSError]()
    files = [(path, version.nbytes) for path, version in listing.walk(str(tmp_path / "tag"), skipped.append)]
    assert files == [(str(tmp_path / "tag" / "zero" / "file"), 3)]
    assert [error.filename for error in skipped] == [str(tmp_path / "tag" / name) for name in "pqs"]
    assert all("kernel's own file system" in str(error.strerror) for error in skipped)

"""Folders that stay those that were opened, whatever is under their names by now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.storage.local import Version, made_whole
from elastic_ckpt.storage.opened_folders import (
    is_folder_in,
    is_link_in,
    opened_below,
    opened_root,
    remove_in,
    version_in,
)


def test_a_held_folder_is_the_one_that_was_opened(tmp_path: Path) -> None:
    with opened_root(str(tmp_path)) as root, opened_below(root, "a/b", make=True) as folder:
        (tmp_path / "a").rename(tmp_path / "away")
        (tmp_path / "elsewhere" / "b").mkdir(parents=True)
        (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
        with made_whole("file", 7, folder) as stream:
            stream.write(b"abc")
        version = version_in(folder, "file")
    assert version[1:] == (3, 7)
    assert (tmp_path / "away" / "b" / "file").read_bytes() == b"abc"
    assert not [*(tmp_path / "elsewhere" / "b").iterdir()]


@pytest.mark.parametrize("name", ["link", "link/inner", "folder/link", "folder/link/inner"])
@pytest.mark.parametrize("make", [False, True])
def test_no_part_may_be_a_link(tmp_path: Path, name: str, make: bool) -> None:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    for place in (tmp_path, tmp_path / "folder"):
        (place / "link").symlink_to(tmp_path / "elsewhere")
    refused = pytest.raises(ConfigError, match="does not follow links")
    with opened_root(str(tmp_path)) as root, refused as caught, opened_below(root, name, make):
        raise AssertionError(name)
    assert caught.value.file == str(tmp_path / name.partition("/inner")[0])


@pytest.mark.parametrize("name", ["..", "a/../..", "./a"])
def test_no_part_leads_up(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    with opened_root(str(tmp_path)) as root, pytest.raises(ConfigError, match="not below"), opened_below(root, name):
        raise AssertionError(name)


def test_what_is_not_there_or_no_folder_is_what_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with opened_root(str(tmp_path)) as root:
        for name, kind in (("nothing", FileNotFoundError), ("file", NotADirectoryError)):
            with pytest.raises(kind), opened_below(root, name):
                raise AssertionError(name)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "link").symlink_to(tmp_path)
    with opened_root(str(tmp_path)) as root:
        for _ in range(20):
            with opened_below(root, "a/b/c", make=True):
                pass
            with pytest.raises(ConfigError), opened_below(root, "a/../link"):
                pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_kinds_and_versions_are_of_the_name_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("abc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to file").symlink_to("file")
    (tmp_path / "to folder").symlink_to("folder")
    with opened_root(str(tmp_path)) as root:
        names = ("file", "folder", "to file", "to folder", "nothing")
        assert [is_link_in(root.descriptor, name) for name in names] == [False, False, True, True, False]
        assert [is_folder_in(root.descriptor, name) for name in names] == [False, True, False, False, False]
        assert version_in(root.descriptor, "file") == Version.of((tmp_path / "file").stat())
        assert version_in(root.descriptor, "to file") == Version.of((tmp_path / "to file").lstat())
        assert version_in(root.descriptor, "nothing") == Version(0, 0, 0)


def test_what_is_removed_is_removed_whole_and_nothing_beyond_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "tree" / "inner" / "innermost").mkdir(parents=True)
    for place in (tmp_path / "tree", tmp_path / "tree" / "inner"):
        (place / "file").touch()
        (place / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with opened_root(str(tmp_path)) as root:
        for name in ("tree", "link", "nothing"):
            remove_in(root.descriptor, name)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "file").exists()

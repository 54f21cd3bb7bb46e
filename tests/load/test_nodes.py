"""What one process makes of the folders of a load; jobs of several are in tests/distributed/test_nodes.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ckpt import storage
from elastic_ckpt.errors import NotFoundError
from elastic_ckpt.load.nodes import Nodes


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two folders, of which the second has what the first lacks."""
    for name, content in {"memory/latest": "step4", "memory/step4/a": "a", "disk/step4/b": "b"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return [str(tmp_path / "memory"), str(tmp_path / "disk")]


def names(folder: str) -> list[str]:
    return sorted(storage.file_names(folder))


def test_one_folder_that_all_see_needs_no_view(folders: list[str]) -> None:
    nodes = Nodes(folders[:1], None, every_tag=False)
    assert nodes.look("look", lambda: names(f"{folders[0]}/step4")) == ["a"]
    assert nodes.view is None and storage.VIEW.get() is None


def test_files_of_fallback_folders_are_seen_in_the_first_until_the_load_ends(folders: list[str]) -> None:
    nodes = Nodes(folders, None, every_tag=False)
    assert nodes.look("look", lambda: names(f"{folders[0]}/step4")) == ["a", "b"]
    with storage.open_stream(f"{folders[0]}/step4/b") as stream:
        assert stream.read() == b"b"
    nodes.close()
    assert names(f"{folders[0]}/step4") == ["a"]


def test_what_rank_0_does_not_find_is_the_same_error(folders: list[str]) -> None:
    def find() -> str:
        raise NotFoundError("there is none")

    with pytest.raises(NotFoundError) as caught:
        Nodes(folders[:1], None, every_tag=False).look("look", find)
    assert caught.value.rank == 0


@pytest.mark.parametrize("latest", ["../outside", "/etc", "..", "", ".", "a/../../outside", "step4\0"])
def test_a_latest_file_that_leads_outside_has_nothing_listed(folders: list[str], latest: str) -> None:
    Path(folders[0], "latest").write_text(latest)
    nodes = Nodes(folders, None, every_tag=False)
    nodes.look("look", lambda: None)
    assert nodes.view is not None
    assert all(path.startswith(os.path.join(folders[0], "")) for path, _ in nodes.view.walk(folders[0]))
    assert not any(".." in path for path, _ in nodes.view.walk(folders[0]))
    nodes.close()


def test_copies_are_tried_one_after_another(folders: list[str]) -> None:
    Path(folders[1], "step4", "a").write_text("a")
    status = os.stat(Path(folders[0], "step4", "a"))
    os.utime(Path(folders[1], "step4", "a"), ns=(status.st_mtime_ns, status.st_mtime_ns))
    nodes, path = Nodes(folders, None, every_tag=False), os.path.join(folders[0], "step4", "a")
    for expected in (folders[0], folders[1], None):
        nodes.look("look", lambda: None)
        other = nodes.take_other_copies(path)
        assert other is None if expected is None else other is not None and os.path.join(expected, "step4") in other
    assert nodes.take_other_copies(os.path.join(folders[0], "step4", "b")) is None, "the only one"
    nodes.close()


def test_a_fallback_folder_with_nothing_of_it_is_told(folders: list[str], tmp_path: Path) -> None:
    nodes = Nodes([*folders, str(tmp_path / "typo")], None, every_tag=False)
    for _ in range(2):
        nodes.look("look", lambda: None)
    nodes.close()
    (note,) = nodes.notes
    assert str(tmp_path / "typo") in note

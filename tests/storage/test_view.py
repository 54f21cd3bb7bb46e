"""Folders of several nodes, seen as one: what is there, which copy is read, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt import storage
from elastic_ckpt.core.lacking import Lacking
from elastic_ckpt.errors import ConflictingCopiesError, DamagedError, SavedOverError
from elastic_ckpt.io.node_files import NodeFiles
from elastic_ckpt.storage import Entry
from elastic_ckpt.storage.view import FolderView, NodeListing, list_folders
from tests.privileges import without_privileges

NAMES = ["latest", "step4/mp_rank_00_model_states.pt", "step4/optim_0.pt", "step4/zero/a/fp32.pt", "step5/x.pt"]


def write(folder: Path, name: str, content: bytes, mtime: int = 1000) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    os.utime(folder / name, (mtime, mtime))


def alone(*folders: Path, root: Path, in_order: bool = False) -> FolderView:
    """Several folders of one node, seen as ``root``."""
    return FolderView(str(root), [list_folders("here", [str(folder) for folder in folders])], in_order=in_order)


def seen_by_all(root: str, listings: list[NodeListing]) -> list[FolderView]:
    """What one rank on each node sees once all have told their digests."""
    ranks = [[number] for number in range(len(listings))]
    views = [FolderView(root, listings, number, ranks, number) for number in range(len(listings))]
    told = [view.digests_to_tell() for view in views]
    for view in views:
        for digests in told:
            view.digests |= digests
    return views


def supplied(views: list[FolderView], mine: int, work: Callable[[], bytes]) -> bytes:
    """What work on a rank returns, which is given what it lacks."""
    while True:
        try:
            return work()
        except Lacking as lacking:
            wanted = lacking.wanted
            raw = bytearray(wanted.nbytes)
            try:
                with closing(NodeFiles(views[wanted.holder].own_files)) as files:
                    files.read(wanted.file, wanted.byte_offset, memoryview(raw))
                views[mine].pages.add(wanted, bytes(raw))
            except DamagedError as error:
                views[mine].pages.add(wanted, error)


def content_of(view: FolderView, name: str) -> bytes:
    with storage.seen_through(view), storage.open_stream(os.path.join(view.root, name)) as stream:
        return stream.read()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(placed=st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=4), data=st.data())
def test_each_node_reads_the_union_of_all_nodes(
    placed: list[set[str]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("nodes")
    folders = [root / str(number) for number in range(len(placed))]
    for folder, names in zip(folders, placed, strict=True):
        for name in names:
            write(folder, name, name.encode() * 3)
    listings = [list_folders(f"node{number}", [str(folder)]) for number, folder in enumerate(folders)]
    views = seen_by_all(str(root / "seen"), listings)
    mine = data.draw(st.integers(0, len(folders) - 1))
    view = views[mine]
    every = set[str]().union(*placed)
    assert {os.path.relpath(path, view.root) for path, _ in view.walk(view.root)} == every
    for name in NAMES:
        path = f"{view.root}/{name}"
        assert view.exists(path) == (name in every)
        if name not in every:
            with pytest.raises(DamagedError, match="missing") as caught:
                content_of(view, name)
            assert caught.value.expected is not None and "node0" in caught.value.expected
            continue
        holding = [number for number, names in enumerate(placed) if name in names]
        assert {tuple(each.readers(path) or ()) for each in views} in ({tuple(holding)}, {()})
        holder = view.holder_of(path)
        assert holder is None if mine in holding else holder is not None and holder[0] in holding
        assert supplied(views, mine, lambda name=name: content_of(view, name)) == name.encode() * 3
        with storage.seen_through(view):
            ranges = storage.open_ranges(path)
            parts = [bytearray(3), bytearray(4)]
            assert ranges.read([memoryview(part) for part in parts], 2) == 7
            assert b"".join(parts) == (name.encode() * 3)[2:9]
            assert ranges.read([memoryview(bytearray(5))], len(name) * 3) == 0
            ranges.close()
    for folder in ("step4", "step4/zero", "step4/zero/a"):
        inside = {name[len(folder) + 1 :].split("/")[0] for name in every if name.startswith(f"{folder}/")}
        assert view.is_folder(f"{view.root}/{folder}") == bool(inside)
        if inside:
            assert set(view.file_names(f"{view.root}/{folder}")) == inside


def test_copies_of_one_size_and_other_content_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "a", "step4/optim_0.pt", b"one save", 1000)
    write(tmp_path / "b", "step4/optim_0.pt", b"another.", 2000)
    with pytest.raises(ConflictingCopiesError, match="different files under one name") as caught:
        content_of(alone(tmp_path / "a", tmp_path / "b", root=tmp_path), "step4/optim_0.pt")
    assert str(tmp_path / "a") in str(caught.value.expected) and str(tmp_path / "b") in str(caught.value.found)


@pytest.mark.parametrize("seconds", [10**13, -(10**13), 10**17, -(10**17)])
def test_times_that_no_calendar_has_are_told_apart(tmp_path: Path, seconds: int) -> None:
    """As file systems in memory keep them, and other nodes tell them."""
    listings = [
        NodeListing(node, (str(tmp_path),), ((Entry("step4/optim_0.pt", nbytes, seconds * 10**9),),))
        for nbytes, node in enumerate(("node0", "node1"))
    ]
    with pytest.raises(ConflictingCopiesError) as caught:
        FolderView(str(tmp_path), listings).compare_copies([str(tmp_path / "step4" / "optim_0.pt")])
    assert f"0 bytes written {seconds:g} s after 1970" in str(caught.value.expected)


@pytest.mark.parametrize("size", [0, 3, 7])
def test_a_copy_of_another_size_is_told_apart_whatever_its_time(tmp_path: Path, size: int) -> None:
    write(tmp_path / "a", "step4/optim_0.pt", b"one save")
    write(tmp_path / "b", "step4/optim_0.pt", b"one save"[:size])
    with pytest.raises(ConflictingCopiesError, match="different files under one name"):
        content_of(alone(tmp_path / "a", tmp_path / "b", root=tmp_path), "step4/optim_0.pt")


def test_copies_of_one_content_are_one_file_and_the_first_folder_is_preferred(tmp_path: Path) -> None:
    write(tmp_path / "a", "step4/optim_0.pt", b"one save", 1000)
    write(tmp_path / "b", "step4/optim_0.pt", b"one save", 2000)
    view = alone(tmp_path / "b", tmp_path / "a", root=tmp_path / "a")
    with storage.seen_through(view), storage.open_stream(str(tmp_path / "a/step4/optim_0.pt")) as stream:
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == str(tmp_path / "b/step4/optim_0.pt")


@pytest.mark.parametrize("name", ["latest", "latest_universal", "step4/mp_rank_01_model_states.pt"])
def test_of_what_is_on_every_node_the_newest_is_taken_and_told(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", name, b"step2", 1000)
    write(tmp_path / "b", name, b"step40", 2000)
    write(tmp_path / "c", name, b"step3", 1500)
    view = alone(*(tmp_path / letter for letter in "abc"), root=tmp_path)
    assert content_of(view, name) == b"step40"
    assert len(view.notes) == 1 and name in view.notes[0] and str(tmp_path / "b") in view.notes[0]


@pytest.mark.parametrize("name", ["step4/mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"])
def test_a_folder_to_fall_back_on_has_only_what_the_first_lacks(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", name, b"step4", 1000)
    write(tmp_path / "b", name, b"step2", 2000)  # copied there since
    view = alone(tmp_path / "a", tmp_path / "b", root=tmp_path, in_order=True)
    assert content_of(view, name) == b"step4"
    assert "first folder's was taken" in view.notes[0] and str(tmp_path / "a") in view.notes[0]


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_00_model_states.pt", "layer_00-model_00-model_states.pt"])
def test_files_of_one_rank_are_never_taken_for_copies(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", name, b"step2", 1000)
    write(tmp_path / "b", name, b"step40", 2000)
    with pytest.raises(DamagedError, match="different files under one name"):
        content_of(alone(tmp_path / "a", tmp_path / "b", root=tmp_path), name)


def test_one_copy_after_another_is_read_where_that_is_asked_for(tmp_path: Path) -> None:
    for letter in "ab":
        write(tmp_path / letter, "step4/optim_0.pt", letter.encode())  # as if a bit had been flipped since
    listing = list_folders("here", [str(tmp_path / letter) for letter in "ab"])
    for number, letter in enumerate("ab"):
        view = FolderView(str(tmp_path), [listing], choices={"step4/optim_0.pt": number})
        assert content_of(view, "step4/optim_0.pt") == letter.encode()


def test_only_the_tags_that_are_asked_for_are_listed(tmp_path: Path) -> None:
    for name in NAMES:
        write(tmp_path, name, b"x")
    (entries,) = list_folders("here", [str(tmp_path)], ["step4", "step9"]).entries
    assert {entry.name for entry in entries} == {name for name in NAMES if not name.startswith("step5")}


def test_a_folder_that_no_node_has_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "a", "step4/optim_0.pt", b"x")
    view = alone(tmp_path / "a", root=tmp_path)
    with storage.seen_through(view), pytest.raises(DamagedError, match="missing"):
        storage.file_names(str(tmp_path / "step5"))


def test_what_is_outside_of_the_view_is_read_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "a", "latest", b"step2")
    write(tmp_path / "seen2", "latest", b"beside")
    view = alone(tmp_path / "a", root=tmp_path / "seen")
    with storage.seen_through(view), storage.open_stream(str(tmp_path / "seen2/latest")) as stream:
        assert stream.read() == b"beside"
    with pytest.raises(DamagedError, match="missing"):
        storage.open_stream(str(tmp_path / "seen/latest"))


def test_what_another_node_cannot_read_is_its_error(tmp_path: Path) -> None:
    here, there, name = tmp_path / "here", tmp_path / "there", "step4/optim_0.pt"
    here.mkdir()
    write(there, name, b"content")
    views = seen_by_all(str(here), [list_folders(folder.name, [str(folder)]) for folder in (here, there)])
    (there / name).unlink()
    with pytest.raises(DamagedError, match="missing") as caught:
        supplied(views, 0, lambda: content_of(views[0], name))
    assert caught.value.file == str(there / name)
    assert views[0].name_of(caught.value.file) == name  # of which another copy can be tried


@pytest.mark.parametrize("nbytes", [1, 7])
def test_a_file_of_another_size_than_listed_is_read_for_nobody(tmp_path: Path, nbytes: int) -> None:
    write(tmp_path / "there", "step4/optim_0.pt", b"old")
    view = alone(tmp_path / "there", root=tmp_path)
    os.truncate(tmp_path / "there" / "step4" / "optim_0.pt", nbytes)
    with pytest.raises(SavedOverError, match="overwritten") as caught, closing(NodeFiles(view.own_files)) as files:
        files.read(0, 0, memoryview(bytearray(1)))
    assert str(caught.value.expected).startswith("3 bytes") and caught.value.found == f"{nbytes} bytes"


def test_digests_tell_copies_of_other_nodes_apart(tmp_path: Path) -> None:
    """Of those of one size and other times alone; one that cannot be read is met by whoever takes the file."""
    for node, content in (("a", b"same"), ("b", b"same"), ("c", b"else")):
        for name in ("step4/optim_0.pt", "step4/optim_1.pt"):
            write(tmp_path / node, name, content, 1000 + ord(node))
        write(tmp_path / node, "step4/alike.pt", b"x")
    (tmp_path / "b" / "step4" / "optim_1.pt").unlink()
    os.mkfifo(tmp_path / "b" / "step4" / "optim_1.pt")
    listings = [list_folders(node, [str(tmp_path / node)]) for node in "abc"]
    views = seen_by_all(str(tmp_path / "a"), listings)
    names = [{copy.entry.name for copy in view.digests if copy.node == number} for number, view in enumerate(views)]
    assert names[0] == {"step4/optim_0.pt", "step4/optim_1.pt"}
    for view in views:
        with pytest.raises(ConflictingCopiesError):
            view.compare_copies([f"{view.root}/step4/optim_0.pt"])
        view.compare_copies([f"{view.root}/step4/alike.pt"])


class Stored:
    """A folder in an object store with one object, and how often it was opened."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.opened = 0

    def open_ranges(self, _: Entry) -> Stored:
        self.opened += 1
        return self

    def read(self, buffers: Sequence[memoryview], byte_offset: int) -> int:
        part = self.content[byte_offset : byte_offset + len(buffers[0])]
        buffers[0][: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


def test_digests_of_copies_in_a_store_are_told_by_one_rank(tmp_path: Path) -> None:
    write(tmp_path, "step4/optim_0.pt", b"same")
    places = [str(tmp_path), "s3://bucket/run"]
    here = list_folders("here", places)
    nothing = NodeListing("there", here.folders, ((), ()))
    stored = NodeListing(places[1], here.folders, ((), (Entry("step4/optim_0.pt", 4, 7),)))
    remotes: list[Any] = [Stored(b"same") for _ in range(2)]
    ranks = [[0], [1]]
    views = [
        FolderView(places[0], [here, nothing, stored], mine, ranks, mine, remotes={1: remotes[mine]})
        for mine in range(2)
    ]
    told = [view.digests_to_tell() for view in views]
    for view in views:
        view.digests |= told[0] | told[1]
        view.compare_copies([f"{places[0]}/step4/optim_0.pt"])
    assert [remote.opened for remote in remotes] == [1, 0]


def test_the_real_paths_are_known(tmp_path: Path) -> None:
    write(tmp_path / "a", "step4/mp_rank_00_model_states.pt", b"older", 1000)
    write(tmp_path / "b", "step4/mp_rank_00_model_states.pt", b"newer one", 2000)
    write(tmp_path / "b", "step4/optim_1.pt", b"x")
    view = alone(tmp_path / "a", tmp_path / "b", tmp_path / "c", root=tmp_path / "a")
    model, optimizer = (str(tmp_path / "a/step4" / name) for name in ("mp_rank_00_model_states.pt", "optim_1.pt"))
    other = str(tmp_path / "b/step4/mp_rank_00_model_states.pt")
    assert storage.copies_of(model) == [model]
    with storage.seen_through(view):
        assert storage.copies_of(model) == [model, other]
        assert dict(view.walk(view.root))[model].nbytes == 5
        storage.open_stream(model).close()  # of which the newest is taken
        assert storage.copies_of(model) == [other, model]
        assert dict(view.walk(view.root))[model].nbytes == 9
        assert storage.copies_of(optimizer) == [str(tmp_path / "b/step4/optim_1.pt")]
        assert storage.copies_of(str(tmp_path / "a/step4")) == [str(tmp_path / "a/step4"), str(tmp_path / "b/step4")]
        assert storage.copies_of(str(tmp_path / "a/step5")) == [str(tmp_path / "a/step5")]
    a, b, c = (tmp_path / letter for letter in "abc")
    assert view.summary(view.root) == f"2 in 3 folders, of which {a} has 1, {b} has 2, {c} has 0"


def test_links_to_one_folder_are_tags_of_their_own_and_circles_end(tmp_path: Path) -> None:
    write(tmp_path, "step4/x.pt", b"x")
    (tmp_path / "best").symlink_to("step4")
    (tmp_path / "step4" / "around").symlink_to(tmp_path)
    (tmp_path / "step4" / "far").symlink_to("/")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "step4" / "pipe")
    (entries,) = list_folders("here", [str(tmp_path)]).entries
    names = {entry.name for entry in entries}
    assert {"step4/x.pt", "best/x.pt", "loop", "step4/pipe"} <= names and len(names) < 20
    with pytest.raises(DamagedError, match="cannot be read") as caught:
        content_of(alone(tmp_path, root=tmp_path), "step4/pipe")
    assert caught.value.found == "a named pipe"


def test_a_folder_that_cannot_be_listed_is_named_where_a_file_is_missing(tmp_path: Path) -> None:
    write(tmp_path, "step4/inside/x.pt", b"x")
    (tmp_path / "step4" / "inside").chmod(0)
    with without_privileges():
        view = alone(tmp_path, root=tmp_path)
        with pytest.raises(DamagedError, match="missing") as caught:
            content_of(view, "step4/inside/x.pt")
    (tmp_path / "step4" / "inside").chmod(0o700)
    assert f"cannot be listed: {tmp_path}/step4/inside (Permission denied)" in str(caught.value.found)
    assert "cannot be listed" in view.summary(view.root)


def test_a_listing_of_deeply_nested_names_is_seen_whole() -> None:
    """As an object store may have them."""
    name = "/".join(["d"] * 3000)
    view = FolderView("/seen", [NodeListing("", ("/real",), ((Entry(name, 1, 0), Entry("d/x", 1, 0)),))])
    assert view.is_folder("/seen/d/d") and view.file_names("/seen/d") == ["d", "x"]
    assert view.exists(f"/seen/{name}") and view.folder_names("/seen") == ["d"]

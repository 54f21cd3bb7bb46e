"""Files of several folders, on several nodes, seen as those of one folder.

Each node lists what it has of the folders in which a checkpoint may be. Of a file that several have, any copy will do
as long as all are the same, which is looked at when the file is first opened: of one size, and either written at the
same time, as one file on a shared disk is, or of the same content as far as a digest of it shows. Which of them is read
is chosen by folder, in the order of preference, then by node: a rank's own, else one of the others, so that these share
the load. Bytes of another node's copy come from the ranks there, which only collectives of all ranks bring.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from itertools import chain
from typing import BinaryIO

from elastic_ckpt.core.resume_sheet import SHEET
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import (
    ConflictingCopiesError,
    DamagedError,
    ElasticCkptError,
    listed,
    shortened,
)
from elastic_ckpt.report import Requests
from elastic_ckpt.storage import VIEW, Entry, PartStream, Ranges, Store, absolute, is_url, local
from elastic_ckpt.storage.digest import content_digest
from elastic_ckpt.storage.listing import file_names, search, walk
from elastic_ckpt.storage.pages import Pages
from elastic_ckpt.storage.remote import RemoteFolder

#: A folder in a checkpoints' folder, with copies of other nodes' files.
REPLICAS = ".replicas"
#: Bytes that one request for a small part of a file brings.
_BUFFER_NBYTES = 1 << 16
_LATEST = "latest"
#: Written on every node, with what may differ there; of copies that do, the one that was written last is taken.
ON_EVERY_NODE = re.compile(rf"{_LATEST}(_universal)?|(.*/)?(mp_rank_\d+_model_states\.pt|{re.escape(SHEET)})")


@dataclass(frozen=True)
class NodeListing:
    """What one node has of some folders, which other nodes have, too."""

    node: str  # its name, for people; empty where there is but one
    folders: tuple[str, ...]  # in order of preference
    entries: tuple[tuple[Entry, ...], ...]  # by folder
    unreadable: tuple[str, ...] = ()  # folders in these that cannot be listed, and why

    @property
    def files(self) -> list[tuple[str, int]]:
        """Path and size of all files; their positions are their numbers."""
        both = zip(self.folders, self.entries, strict=True)
        return [(os.path.join(folder, entry.name), entry.nbytes) for folder, entries in both for entry in entries]


def list_folders(node: str, folders: Sequence[str], tags: Collection[str] | None = None) -> NodeListing:
    """List the files of some folders: those at the top, and below some tags or all folders. Local.

    Raises :class:`DamagedError` if one of the folders is there, but cannot be listed.
    """
    unreadable = list[str]()

    def note(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            unreadable.append(f"{error.filename} ({error.strerror})")

    def entries(folder: str) -> Iterator[Entry]:
        if is_url(folder):
            return
        paths = [os.path.join(folder, name) for name in file_names(folder)] if local.is_folder(folder) else []
        below = [path for path in paths if local.is_folder(path) and os.path.basename(path) != REPLICAS]
        files = ((path, local.version_of(path)) for path in sorted(paths) if not local.is_folder(path))
        # each by itself, since links may make two tags of one folder
        tops = sorted(below if tags is None else (os.path.join(folder, tag) for tag in tags))
        for path, version in chain(files, *(walk(top, note) for top in tops)):
            yield Entry(os.path.relpath(path, folder), version.nbytes, version.mtime_ns)

    with search(folders[0]):
        found = tuple(tuple(entries(folder)) for folder in folders)
    return NodeListing(node, tuple(folders), found, tuple(unreadable))


def with_replicas(folders: Sequence[str]) -> list[str]:
    """Some folders, each with that of the copies in it."""
    return [place for each in folders for place in ([each] if is_url(each) else [each, os.path.join(each, REPLICAS)])]


@dataclass(frozen=True)
class Copy:
    """One node's copy of a file."""

    node: int
    number: int  # among the node's files
    level: int  # of its folder in the order of preference
    path: str  # on that node
    entry: Entry

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.entry.nbytes


class FolderView(Store):
    """What several nodes have listed, seen as one folder; the same on all, but for ``mine``.

    Args:
        root: the folder as which all is seen.
        listings: of the nodes.
        mine: which of them is this process's.
        ranks: those of the job on each node; empty if there is one node.
        me: this process's rank.
        choices: of files of which the copies are tried one after another, which one is to be read.
        in_order: whether the folders are in an order of preference; else they are nodes'.
        remotes: those of the folders that are in object stores, by their places in the order of preference; one
            listing, of no node, has their files.
    """

    def __init__(
        self,
        root: str,
        listings: Sequence[NodeListing],
        mine: int = 0,
        ranks: Sequence[Sequence[int]] = (),
        me: int = 0,
        choices: Mapping[str, int] | None = None,
        remotes: Mapping[int, RemoteFolder] | None = None,
        in_order: bool = True,
    ) -> None:
        self.outer = VIEW.get()  # in which paths elsewhere are looked up
        self.root = root
        self._listings = listings
        self._mine = mine
        self._ranks = ranks
        self._me = me
        self.pages = Pages()  # of other nodes' files
        self.notes: list[str] = []  # what a user should know of the files that were opened so far
        self.copies: dict[str, list[Copy]] = {}  # of each file, by preference
        self._choices = choices or {}
        self._remotes = remotes or {}
        self._in_order = in_order
        self._names: dict[str, dict[str, bool]] = {"": {}}  # by folder: each name in it, and whether that is a folder
        self._chosen: dict[str, Copy] = {}
        self._as_good: dict[str, Sequence[Copy]] = {}  # of chosen files, the copies of which any may be read
        #: Of copies: their own, and those of other nodes that may differ.
        self.digests: dict[Copy, bytes | ElasticCkptError] = {}
        for node, listing in enumerate(listings):
            numbers = iter(range(len(listing.files)))
            for level, (folder, entries) in enumerate(zip(listing.folders, listing.entries, strict=True)):
                for entry in entries:
                    copy = Copy(node, next(numbers), level, os.path.join(folder, entry.name), entry)
                    self.copies.setdefault(entry.name, []).append(copy)
        for name, copies in self.copies.items():
            copies.sort(key=lambda copy: (copy.level, copy.node))
            self._add(name, is_folder=False)

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may have what this one lacks."""
        return bool(self._ranks)

    @cached_property
    def own_files(self) -> Sequence[tuple[str, int]]:
        """Path and size, as it was listed, of each of this node's files, which other nodes know by its number."""
        return self._listings[self._mine].files

    @property
    def requests(self) -> Requests | None:
        """What this process has asked of object stores; ``None`` if no folder is in one."""
        return sum((remote.requests for remote in self._remotes.values()), Requests()) if self._remotes else None

    def _add(self, name: str, is_folder: bool) -> None:
        folder, base = os.path.split(name)
        while folder not in self._names:  # and those above it, up to the root
            self._names[folder] = {base: is_folder}
            (folder, base) = os.path.split(folder)
            is_folder = True
        self._names[folder].setdefault(base, is_folder)

    def name_of(self, path: str) -> str | None:
        """The file that has a path in this view, or had it on a node; ``None`` if none has."""
        paths = (name for name, copies in self.copies.items() if any(copy.path == path for copy in copies))
        return name if (name := self._name(path)) in self.copies else next(paths, None)

    def compare_copies(self, paths: Iterable[str]) -> None:
        """Look at some files; :class:`ConflictingCopiesError` for one of which copies differ."""
        for path in paths:
            self._choose(path)

    def copies_of(self, path: str) -> list[str]:
        """See :func:`elastic_ckpt.storage.copies_of`; of a folder, where it has files, in the order of preference."""
        name = self._name(path)
        if copies := self.copies.get(name):
            return [copy.path for copy in sorted(copies, key=lambda copy: copy != self._chosen.get(name))]
        inside = os.path.join(name, "") if name else ""
        both = [each for listing in self._listings for each in zip(listing.folders, listing.entries, strict=True)]
        found = [folder for folder, entries in both if any(entry.name.startswith(inside) for entry in entries)]
        return [os.path.join(folder, name) for folder in found] or [path]

    def summary(self, folder: str) -> str:
        """How many files of a folder are where."""
        names = [self._name(path) for path, _ in self.walk(folder)]
        is_one_place = len(self._listings) == 1 or not any(listing.node for listing in self._listings)
        alone = self._listings[0].folders if is_one_place else ()
        places = alone or [listing.node for listing in self._listings]
        counts = Counter(
            at for name in names for at in {copy.level if alone else copy.node for copy in self.copies[name]}
        )
        parts = (f"{place} has {counts[number]}" for number, place in enumerate(places))
        where = f"in {counted(len(places), 'folder')}" if alone else f"on {counted(len(places), 'node')}"
        return "; ".join((f"{len(names)} {where}, of which {shortened(parts)}", *self._unreadable()))

    def _unreadable(self) -> Iterator[str]:
        for listing in self._listings:
            if listing.unreadable:
                yield " on ".join(filter(None, (f"cannot be listed: {shortened(listing.unreadable)}", listing.node)))

    def _name(self, path: str) -> str:
        name = os.path.relpath(absolute(path), self.root)
        return "" if name == os.curdir else name

    def _choose(self, path: str) -> Copy:
        """The copy of a file to read; :class:`DamagedError` if there is none, or copies differ."""
        name = self._name(path)
        if name not in self._chosen:
            copies = self.copies.get(name)
            if not copies:
                raise self._missing(path)
            if name in self._choices:
                copies = copies[self._choices[name] :][:1]
            best = self._as_good[name] = self._equally_good(path, name, copies)
            own = (copy for copy in best if copy.node == self._mine)
            self._chosen[name] = next(own, best[self._mine % len(best)])
        return self._chosen[name]

    def _equally_good(self, path: str, name: str, copies: Sequence[Copy]) -> Sequence[Copy]:
        """The copies of which any may be read; the same on all nodes."""
        first = copies[0]
        other = next((copy for copy in copies[1:] if not self._is_same(first, copy)), None)
        if other is not None and not ON_EVERY_NODE.fullmatch(name):
            problem = "there are different files under one name, so they are not of one save"
            remedy = "remove the copy that is of another run or an older save, or truncated, use another tag, or wait "
            remedy += "until the file is written"
            raise ConflictingCopiesError(problem, path, self.described(first), self.described(other), remedy=remedy)
        if other is not None:
            is_any = not self._in_order or name.startswith(_LATEST)  # else of those that the first folder has
            rivals = [copy for copy in copies if is_any or copy.level == first.level]
            newest = max(rivals, key=lambda copy: copy.entry.mtime_ns)
            which = "newest" if other in rivals else "first folder's"
            self.notes.append(f"copies of {name} differ: the {which} was taken, {self.described(newest)}")
            return [newest]
        return [copy for copy in copies if copy.level == first.level]

    def _is_same(self, one: Copy, other: Copy) -> bool:
        if one.nbytes != other.nbytes:
            return False
        return one.entry.mtime_ns == other.entry.mtime_ns or self._digest(one) == self._digest(other)

    def _digest(self, copy: Copy) -> bytes:
        if copy not in self.digests:
            with local.named_os_errors(copy.path):
                self.digests[copy] = content_digest(self._ranges(copy), copy.nbytes)
        digest = self.digests[copy]
        if isinstance(digest, ElasticCkptError):
            raise digest
        return digest

    def digests_to_tell(self) -> dict[Copy, bytes | ElasticCkptError]:
        """Digests of this node's copies that may differ from those of others, or why there are none; on rank 0, also of
        those in object stores.
        """
        for copies in self.copies.values():
            times = {copy.entry.mtime_ns for copy in copies}
            sizes = Counter(copy.nbytes for copy in copies)
            for copy in copies if len(times) > 1 else ():
                is_told_here = copy.node == self._mine or (copy.level in self._remotes and not self._me)
                if is_told_here and sizes[copy.nbytes] > 1:
                    try:
                        with local.pinned():  # it may be of a tag that is not read
                            self._digest(copy)
                    except ElasticCkptError as error:
                        self.digests[copy] = error
        return dict(self.digests)

    def readers(self, path: str) -> Sequence[int] | None:
        """The ranks that see the file at a path themselves; ``None``: all do. The same on all ranks."""
        if not self._ranks or self._choose(path).level in self._remotes:
            return None
        nodes = sorted({each.node for each in self._as_good[self._name(path)]})
        return [rank for node in nodes for rank in self._ranks[node]]

    def holder_of(self, path: str) -> tuple[int, int] | None:
        """The rank that reads a file for this one, and the file's number there; ``None``: this one does."""
        if not self._ranks:
            return None
        copy = self._choose(path)
        if copy.node == self._mine or copy.level in self._remotes:
            return None
        ranks = self._ranks[copy.node]
        return ranks[self._me % len(ranks)], copy.number

    def described(self, copy: Copy) -> str:
        """A copy, for people."""
        written = f"{copy.nbytes} bytes written {_date(copy.entry.mtime_ns)}"
        node = self._listings[copy.node].node
        return f"{written} in {os.path.dirname(copy.path)}" + (f" on {node}" if node else "")

    def _missing(self, path: str) -> DamagedError:
        places = (f"{', '.join(each.folders)}{f' on {each.node}' if each.node else ''}" for each in self._listings)
        problem = "a file of the checkpoint is missing"
        expected = "a file in one of these folders: " + listed(places)
        remedy = "add the node or the folder that has it, or use another tag"
        found = "; ".join(("no such file in any of them", *self._unreadable()))
        return DamagedError(problem, path, expected, found, remedy=remedy)

    def open_stream(self, path: str) -> BinaryIO:
        copy = self._choose(path)
        if copy.node == self._mine:
            return local.open_stream(copy.path)
        ranges = self._ranges(copy)
        return io.BufferedReader(PartStream(lambda view, at: ranges.read([view], at), copy.nbytes), _BUFFER_NBYTES)

    def open_ranges(self, path: str) -> Ranges:
        return self._ranges(self._choose(path))

    def _ranges(self, copy: Copy) -> Ranges:
        if copy.level in self._remotes:
            return self._remotes[copy.level].open_ranges(copy.entry)
        return local.open_ranges(copy.path) if copy.node == self._mine else _PagedRanges(self, copy)

    def file_names(self, folder: str) -> list[str]:
        return sorted(self._inside(folder))

    def folder_names(self, folder: str) -> list[str]:
        return sorted(name for name, is_folder in self._inside(folder).items() if is_folder)

    def _inside(self, folder: str) -> dict[str, bool]:
        if (inside := self._names.get(self._name(folder))) is None:
            raise self._missing(folder)
        return inside

    def exists(self, path: str) -> bool:
        return self._name(path) in self.copies or self.is_folder(path)

    def is_folder(self, path: str) -> bool:
        return self._name(path) in self._names

    def modified(self, path: str) -> float:
        """The time of the newest copy of a file, or of the newest file in a folder; 0 if there is none."""
        name = self._name(path)
        names = [os.path.join(name, each) for each in self._names.get(name, ())] or [name]
        return max((copy.entry.mtime_ns for each in names for copy in self.copies.get(each, ())), default=0) / 1e9

    def walk(self, folder: str) -> Iterator[tuple[str, local.Version]]:
        """Every file below a folder, with the version of the copy that is read, if known."""
        top = os.path.join(self._name(folder), "") if self._name(folder) else ""
        for name, copies in sorted(self.copies.items()):
            if name.startswith(top):
                copy = self._chosen.get(name, copies[0])
                yield os.path.join(self.root, name), local.Version(0, copy.nbytes, copy.entry.mtime_ns)


def _date(mtime_ns: int) -> str:
    """A time of writing, for people; file systems have some that no calendar has."""
    try:
        when = datetime.fromtimestamp(mtime_ns / 1e9, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return f"{mtime_ns / 1e9:g} s after 1970"
    return f"{when:%Y-%m-%d %H:%M:%S.%f} UTC"


class _PagedRanges:
    """A file on another node."""

    def __init__(self, view: FolderView, copy: Copy) -> None:
        holder = view.holder_of(os.path.join(view.root, copy.entry.name))
        assert holder is not None, copy
        self._holder, self._number = holder
        self._view = view
        self._copy = copy

    def read(self, buffers: Sequence[memoryview], byte_offset: int) -> int:
        copy = self._copy
        return self._view.pages.read(self._holder, self._number, copy.nbytes, buffers, byte_offset)

    def close(self) -> None:
        pass  # nothing is open

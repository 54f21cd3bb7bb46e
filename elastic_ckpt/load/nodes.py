"""What the nodes of a job have of a checkpoint's folder, and how its ranks see and read all of it.

Where all nodes see the same names, as on a shared disk, nothing is sent but a digest of these, in the message in which
rank 0 tells what it has found. Else the nodes exchange listings, and whoever sees a file reads it for those who do not,
in collectives of the job's own process group, until the load ends. Folders in object stores are listed by rank 0 alone,
and read by each rank itself.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from elastic_ckpt import distributed
from elastic_ckpt.core.lacking import Wanted
from elastic_ckpt.core.resume_sheet import SHEET
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL, MOST_TAG_NBYTES, read_latest
from elastic_ckpt.io.exchange import Piece, Ranks, exchange
from elastic_ckpt.io.node_files import NodeFiles
from elastic_ckpt.storage import VIEW, absolute, is_url, local
from elastic_ckpt.storage.listing import file_names
from elastic_ckpt.storage.remote import RemoteFolder
from elastic_ckpt.storage.view import REPLICAS, FolderView, NodeListing, list_folders, with_replicas

T = TypeVar("T")
#: Host memory for an exchange of what work lacks.
_SUPPLIED_AT_ONCE_NBYTES = 16 << 20
_DIGEST_NBYTES = 16
#: Environment variables of launchers: the number of a process among those of its node.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
#: Equal on the ranks that see the same files: the machine, and the folders.
Node = tuple[str, ...]


@dataclass(frozen=True)
class _Look:
    """What one rank tells of itself, and rank 0 of what it has found."""

    node: Node
    digest: bytes | None  # of the names that it sees; ``None`` if another process of its node lists them
    tags: tuple[str, ...] = ()  # that are asked for, or its files name, and that it has
    found: Any = None
    error: ElasticCkptError | None = None
    root: str = ""
    has_replicas: bool = False
    stored: NodeListing | None = None  # what the folders in object stores have


@dataclass
class Nodes:
    """The folders of one load on all nodes of the job.

    Args:
        folders: the folder to load, and those that may have files of it, in order of preference.
        tag: the one to load; ``None``: that a ``latest`` file names.
        every_tag: whether other tags may be looked for, too.
        with_sizes: whether nodes may have files of one name and of different sizes, since each saves its own.
        options: of object stores.
    """

    folders: Sequence[str]
    tag: str | None
    every_tag: bool
    with_sizes: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    view: FolderView | None = None
    pins: dict[str, local.Version] = field(default_factory=dict)  # of the files that this process reads
    notes: list[str] = field(default_factory=list)
    _choices: dict[str, int] = field(default_factory=dict)
    remotes: dict[int, RemoteFolder] = field(default_factory=dict)  # by place among the folders

    def look(self, doing: str, find: Callable[[], T]) -> T:
        """What ``find`` returns on rank 0, which sees what any rank of the job does from now on. Collective."""
        self.close()

        def mine() -> _Look:
            urls = {level: absolute(folder) for level, folder in enumerate(self._places) if is_url(folder)}
            self.remotes = {level: RemoteFolder(url, self.options) for level, url in urls.items()}
            node = identity_of(self._local)
            has_replicas = any(local.is_folder(os.path.join(folder, REPLICAS)) for folder in self._local)
            digest, tags = self._digest() if _local_rank() == 0 else (None, ())
            if distributed.rank():
                return _Look(node, digest, tags, has_replicas=has_replicas)
            root = absolute(self.folders[0])
            if self.remotes:
                return _Look(node, digest, tags, None, None, root, stored=self._stored(tags))
            try:
                return _Look(node, digest, tags, find(), None, root, has_replicas)
            except ElasticCkptError as error:
                return _Look(node, digest, tags, None, error, root, has_replicas)

        looks = distributed.all_gather(doing, mine)
        seen = {look.digest for look in looks if look.digest is not None}
        listers = {look.node for look in looks if look.digest is not None}
        alone = len(self._local) == len(self.folders) == 1 and not any(look.has_replicas for look in looks)
        if alone and len(seen) == 1 and listers == {look.node for look in looks}:
            if (error := looks[0].error) is not None:
                error.rank = 0
                raise error
            return looks[0].found  # type: ignore[no-any-return]
        self._see_all(looks)
        return distributed.broadcast(doing, find)

    def _digest(self) -> tuple[bytes, tuple[str, ...]]:
        """A digest of the folders and the names of files that matter, and the tags to load that are here. Local.

        What else is in the folder may change meanwhile: another job saves there.
        """
        named = set[str]()
        names = list[Any]()
        for folder in self._local:
            for latest in (LATEST, LATEST_UNIVERSAL):
                with suppress(ElasticCkptError):  # whoever takes this file will meet it
                    named.add(read_latest(folder, latest) or "")
        tags = self._tags(named)
        for folder in self._local:
            tops = [folder] if self.every_tag or not tags else []
            for path in (*tops, *(os.path.join(folder, tag) for tag in tags)):
                try:
                    found = sorted(name for name in file_names(path) if not name.startswith(SHEET))  # comes last
                    sizes = [local.version_of(os.path.join(path, name)).nbytes for name in found if self.with_sizes]
                    names += [found, sizes]
                except ElasticCkptError as error:
                    names.append([str(error.found)])
        text = repr((*map(os.path.abspath, self._local), sorted(named), names)).encode(errors="surrogateescape")
        there = (tag for tag in tags if any(local.is_folder(os.path.join(folder, tag)) for folder in self._local))
        return hashlib.blake2b(text, digest_size=_DIGEST_NBYTES).digest(), tuple(there)

    @property
    def _places(self) -> list[str]:
        return with_replicas(self.folders)

    @property
    def _local(self) -> list[str]:
        return [folder for folder in self.folders if not is_url(folder)]

    def _tags(self, named: set[str]) -> tuple[str, ...]:
        return tuple(sorted(inside({self.tag} if self.tag is not None else named)))

    def _stored(self, tags: Sequence[str]) -> NodeListing:
        """What the folders in object stores have. Local, on rank 0."""
        names = [name for remote in self.remotes.values() for name in _latest_in(remote)]
        wanted = None if self.every_tag else {*tags, *self._tags(set(names))} or None
        entries = (
            self.remotes[level].entries(wanted) if level in self.remotes else () for level in range(len(self._places))
        )
        url = next(iter(self.remotes.values())).url
        return NodeListing(url, tuple(map(absolute, self._places)), tuple(map(tuple, entries)))

    def _see_all(self, looks: Sequence[_Look]) -> None:
        """Exchange listings, and see the files of all nodes. Collective."""
        ranks: dict[Node, list[int]] = {}  # of which the first lists
        for rank, look in enumerate(looks):
            ranks.setdefault(look.node, []).append(rank)
        mine = looks[distributed.rank()].node
        is_lister = ranks[mine][0] == distributed.rank()
        stored = looks[0].stored
        wanted = {tag for look in looks for tag in look.tags}
        tags = None if self.every_tag or not wanted else wanted

        def list_mine() -> NodeListing | None:
            return list_folders(words_of(mine), list(map(absolute, self._places)), tags) if is_lister else None

        if stored is not None and not self._local:
            self._show(looks[0].root, [stored], -1, ())
            return
        doing = "tell which files each node has"
        listings = [each for each in distributed.all_gather(doing, list_mine) if each is not None]
        listings += [] if stored is None else [stored]
        view = self._show(looks[0].root, listings, list(ranks).index(mine), list(ranks.values()))
        if len(ranks) > 1:
            for digests in distributed.all_gather(doing, lambda: view.digests_to_tell() if is_lister else {}):
                view.digests |= digests
            distributed.supply_by(self._supply)

    def _supply(self, lacking: Mapping[int, Wanted]) -> None:
        """Bring ranks what their work lacks of other nodes' files. Collective."""
        assert self.view is not None
        doing = "exchange what nodes lack"
        mine = lacking.get(distributed.rank())
        raw = bytearray(0 if mine is None else mine.nbytes)
        pieces = {} if mine is None else {mine.holder: [Piece(mine.file, mine.byte_offset, [memoryview(raw)])]}
        ranks = Ranks()
        with local.pinned(self.pins), closing(NodeFiles(self.view.own_files)) as files, distributed.together(doing):
            errors = exchange(ranks, pieces, files, _SUPPLIED_AT_ONCE_NBYTES)
            (failed,) = ranks.most_of([bool(errors)])
        everybody = distributed.all_gather(doing, lambda: errors) if failed else []
        if mine is not None:
            mine_failed = [errors[distributed.rank()] for errors in everybody if distributed.rank() in errors]
            self.view.pages.add(mine, mine_failed[0] if mine_failed else bytes(raw))

    def _show(
        self, root: str, listings: Sequence[NodeListing], mine: int, ranks: Sequence[Sequence[int]]
    ) -> FolderView:
        several = ranks if len(ranks) > 1 else ()
        self.view = FolderView(root, listings, mine, several, distributed.rank(), self._choices, self.remotes)
        both = (each for listing in listings for each in zip(listing.folders, listing.entries, strict=True))
        full = {folder for folder, entries in both if entries}
        for fallback in map(absolute, self.folders[1:]):
            note = f'nothing of it is in {fallback} of "fallback_dirs", on any node'
            if full.isdisjoint(with_replicas([fallback])) and note not in self.notes:
                self.notes.append(note)
        VIEW.set(self.view)
        return self.view

    def take_other_copies(self, file: str | None) -> str | None:
        """Have the next look take one copy of a damaged file for all ranks; in words, or ``None`` if none is left.

        Deterministic: ranks, which may have read different copies, try them one after another.
        """
        name = None if self.view is None or file is None else self.view.name_of(file)
        if self.view is None or name is None:
            return None
        copies = self.view.copies[name]
        choice = self._choices.get(name, -1) + 1
        if len(copies) < 2 or choice == len(copies):
            return None
        self._choices[name] = choice
        self.notes.append(f"{name} was damaged in another copy: read {self.view.described(copies[choice])}")
        return self.notes[-1]

    def close(self) -> None:
        """See again what this process sees alone."""
        VIEW.set(None)
        distributed.supply_by(None)
        self.view = None
        self.pins.clear()


def _latest_in(remote: RemoteFolder) -> Iterator[str]:
    """The tags that the ``latest`` objects in a store name."""
    for entry in remote.entries(()):
        if entry.name in (LATEST, LATEST_UNIVERSAL):
            raw = bytearray(min(entry.nbytes, MOST_TAG_NBYTES))
            remote.open_ranges(entry).read([memoryview(raw)], 0)
            yield raw.decode(errors="replace").strip()


def inside(tags: set[str]) -> list[str]:
    """The tags that are paths below a folder."""
    normal = (os.path.normpath(tag) for tag in tags if tag and "\0" not in tag)
    return [tag for tag in normal if not os.path.isabs(tag) and tag.split(os.sep)[0] not in (os.pardir, os.curdir)]


def _local_rank() -> int:
    return next((int(os.environ[name]) for name in _LOCAL_RANKS if os.environ.get(name, "").isdecimal()), 0)


def identity_of(folders: Sequence[str]) -> Node:
    def seen(folder: str) -> str:
        try:
            # asks the system: whether ranks see one and the same folder, which has no answer in a view
            status = os.stat(folder)
        except (OSError, ValueError):
            return os.path.abspath(folder)
        return f"{status.st_dev} {status.st_ino}"

    machine = Path("/proc/sys/kernel/random/boot_id")
    # asks the system: this machine's name
    boot = machine.read_text(encoding="ascii").strip() if machine.exists() else ""
    return f"{socket.gethostname()} {boot}", *map(seen, folders)


def words_of(node: Node) -> str:
    """This process's node, for people."""
    return f"{node[0].split()[0]} (rank {distributed.rank()})"

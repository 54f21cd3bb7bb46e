"""Copies of node-local files on other nodes, from which a job resumes although nodes were lost."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import product
from typing import Any

from isal import isal_zlib

from elastic_ckpt import distributed
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import ConfigError, DamagedError, ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, list_checkpoints
from elastic_ckpt.load.nodes import SECRET_NBYTES, Node, identity_of, inside, own_address, words_of
from elastic_ckpt.storage import Entry, file_names, modified, walk
from elastic_ckpt.storage.local import is_link, made_whole
from elastic_ckpt.storage.opened_folders import (
    OpenedFolder,
    is_folder_in,
    opened_below,
    opened_root,
    remove_in,
    version_in,
)
from elastic_ckpt.storage.peers import FileServer, Peers
from elastic_ckpt.storage.view import REPLICAS, NodeListing, list_folders

logger = logger_of(__name__)
_DOING = "replicate a checkpoint"
#: Bytes in memory at a time.
_CHUNK_NBYTES = 8 << 20


class Replication:
    """Copies that are being made in the background; see :func:`replicate`."""

    def __init__(self, server: FileServer | None, pull: _Pull | None, prune: Callable[[], None]) -> None:
        self._server = server
        self._pull = pull
        self._prune = prune
        self._is_over = False

    def done(self) -> bool:
        """Whether this rank's node has made its copies, or failed to. Local."""
        return self._pull is None or not self._pull.is_alive()

    def wait(self) -> None:
        """Wait until the copies of all nodes are whole, then remove older tags, if asked to. Collective.

        Raises the same error on every rank if a copy could not be made; no tag is removed then. Once it is over, it
        returns at once.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            with distributed.agree(_DOING):
                if self._pull is not None:
                    self._pull.join()
                    if self._pull.error is not None:
                        raise self._pull.error
        finally:
            if self._server is not None:
                self._server.close()
        with distributed.agree("remove older tags"):
            if self._pull is not None:
                self._prune()


#: The last one of this process, whose files the next one may replace.
_last: list[Replication] = []


def replicate(folder: str | os.PathLike[str], tag: str, copies: int = 1, keep: int | None = None) -> Replication:
    """Copy each node's files of a tag to the next ``copies`` nodes, while training continues.

    Call it on every rank after ``engine.save_checkpoint(folder, tag)`` to node-local storage, such as ``/dev/shm``.
    ``engine.load_checkpoint(folder)`` then finds all files, in a job of any size, unless ``copies + 1`` neighbouring
    nodes are lost. Copies are in ``.replicas`` in ``folder``. What this node saved is never written to. A copy gets its
    name once it is complete and has the checksum of the original. Originals must not change before
    :meth:`Replication.wait` returns. The next call waits for that, too.

    Args:
        folder: the folder that ``save_checkpoint`` was given. Each node has its own.
        tag: the tag that was saved.
        copies: the number of other nodes that get a copy of each file.
        keep: the number of tags, with their copies, that stay in ``folder`` on each node. ``None``: all.

    Collective, with only small messages. A node's first rank copies, with at most 16 MiB in memory at a time. Raises
    the same :class:`ElasticCkptError` on every rank if arguments differ, or if a node has nothing to copy.
    """
    if _last:
        _last.pop().wait()
    meant = (os.path.normpath(str(tag)), copies, keep)

    def begin() -> tuple[Node, bytes, tuple[str, int, int | None]]:
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigError("this is no folder", None, "the folder that save_checkpoint was given", repr(folder))
        place = os.path.abspath(folder)
        name = meant[0]
        numbers = [copies] if keep is None else [copies, keep]
        if not all(type(number) is int and number >= 1 for number in numbers):
            raise ConfigError("copies and keep are numbers from 1 on", None, "replicate(folder, tag, copies=1)", meant)
        if not inside({name}):
            raise ConfigError("the tag is not a folder below the given one", place, "a tag such as step100", name)
        for path in (os.path.join(place, name), os.path.join(place, REPLICAS)):
            if is_link(path):
                problem = "replicate does not follow links"
                remedy = "give the folder that the link names, or remove it"
                raise ConfigError(problem, path, "a folder", "a link", remedy=remedy)
        return identity_of([place]), secrets.token_bytes(SECRET_NBYTES), meant

    everybody = distributed.all_gather(_DOING, begin)
    nodes: dict[Node, int] = {}  # the first rank of each
    for rank, (node, _, other) in enumerate(everybody):
        nodes.setdefault(node, rank)
        if other != everybody[0][2]:
            both = f"{everybody[0][2]}, as on rank 0", f"{other} on rank {rank}"
            raise ConfigError("ranks call replicate with different arguments", None, *both, rank=rank)
    _last.append(_start(os.path.abspath(folder), *meant, nodes, everybody))
    return _last[0]


def _start(
    folder: str, tag: str, copies: int, keep: int | None, nodes: dict[Node, int], everybody: Sequence[Any]
) -> Replication:
    """Serve this node's files, and begin to copy those of others. Collective."""
    (node, _, _) = everybody[distributed.rank()]
    (_, secret, _) = everybody[0]
    servers: list[FileServer] = []

    def serve() -> tuple[NodeListing, tuple[str, int]] | None:
        if nodes[node] != distributed.rank():
            return None
        listing = list_folders(words_of(node), [folder], [tag])
        if not any(os.path.dirname(entry.name) for entry in listing.entries[0]):
            problem = "this node has no files of the tag to copy"
            remedy = "call replicate after save_checkpoint"
            raise DamagedError(problem, os.path.join(folder, tag), "files that save_checkpoint wrote", remedy=remedy)
        servers.append(FileServer(own_address(list(nodes)), secret, listing.files))
        return listing, servers[0].address

    try:
        served = [each for each in distributed.all_gather(_DOING, serve) if each is not None]
    except ElasticCkptError:  # of another rank
        for server in servers:
            server.close()
        raise
    prune = partial(_prune, folder, tag, keep)
    if not servers:
        return Replication(None, None, prune)
    listings, addresses = zip(*served, strict=True)
    mine = list(nodes).index(node)
    others = len(nodes) - 1
    if copies > others and distributed.rank() == 0:
        text = "elastic_ckpt replicates to %s, not %d: the job has no more nodes; files of lost ones may be lost"
        logger.warning(text, counted(others, "other node"), copies)
    sources = [(mine + 1 + step) % len(nodes) for step in range(min(copies, others))]
    wanted: dict[str, tuple[int, int, Entry]] = {}  # of what several nodes have, the newest
    for source in sources:
        for number, entry in enumerate(listings[source].entries[0]):
            if entry.name == LATEST or entry.name.startswith(f"{tag}{os.sep}"):
                known = wanted.get(entry.name)
                if known is None or known[2].mtime_ns < entry.mtime_ns:
                    wanted[entry.name] = source, number, entry
    pull = _Pull(os.path.join(folder, REPLICAS), tag, wanted, Peers(secret, addresses))
    pull.start()
    return Replication(servers[0], pull, prune)


class _Pull(threading.Thread):
    """Makes a folder of replicas what is wanted of a tag, in the background."""

    def __init__(self, folder: str, tag: str, wanted: dict[str, tuple[int, int, Entry]], peers: Peers) -> None:
        super().__init__(name="elastic_ckpt replication", daemon=True)
        self._folder = folder
        self._tag = tag
        self._wanted = wanted
        self._peers = peers
        self._path = folder  # that it is at
        self.error: ElasticCkptError | None = None

    def run(self) -> None:
        try:
            with opened_root(os.path.dirname(self._folder)) as root:
                self._make_alike(root)
        except ElasticCkptError as error:
            self.error = error
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free memory there, or keep fewer tags" if is_full else "remove what is there, and replicate again"
            found = f"{type(error).__name__}: {error.strerror}"
            self.error = ElasticCkptError("a copy could not be written", self._path, found=found, remedy=remedy)
        finally:
            self._peers.close()

    def _make_alike(self, root: OpenedFolder) -> None:
        """Remove the files that are not wanted, and copy those that are not there. ``root``: has the replicas."""
        for path, _ in walk(os.path.join(self._folder, self._tag)):
            if os.path.relpath(path, self._folder) not in self._wanted:  # of an older save, or cut short
                self._path = path
                with self._opened(root, path) as folder, suppress(FileNotFoundError):
                    os.unlink(os.path.basename(path), dir_fd=folder)
        for name in sorted(self._wanted, key=lambda name: name == LATEST):  # which comes last
            source, number, entry = self._wanted[name]
            path = self._path = os.path.normpath(os.path.join(self._folder, entry.name))
            if not path.startswith(os.path.join(self._folder, "")):
                raise DamagedError("a listing names a file that is not below its folder", path)
            with self._opened(root, path, make=True) as folder:
                if version_in(folder, os.path.basename(path))[1:] != (entry.nbytes, entry.mtime_ns):
                    self._copy(source, number, entry, folder)

    def _opened(self, root: OpenedFolder, path: str, make: bool = False) -> AbstractContextManager[int]:
        """The folder of a file of the replicas, which no link leads to."""
        place = os.path.dirname(self._folder)
        return opened_below(root, os.path.relpath(os.path.dirname(path), place), make)

    def _copy(self, source: int, number: int, entry: Entry, folder: int) -> None:
        """Copy a file into an opened folder."""
        path = self._path
        _refuse_without_space(folder, path, entry.nbytes)
        raw = bytearray(min(_CHUNK_NBYTES, entry.nbytes))
        buffer = memoryview(raw)
        zeros = memoryview(bytes(len(raw)))
        crc32 = 0
        with made_whole(os.path.basename(path), entry.mtime_ns, folder) as stream:
            stream.truncate(entry.nbytes)
            while left := entry.nbytes - stream.tell():
                count = self._peers.read_into(source, number, [buffer[:left]], stream.tell())
                if not count:
                    raise DamagedError("the original ends early", path, f"{entry.nbytes} bytes", stream.tell())
                crc32 = isal_zlib.crc32(buffer[:count], crc32)
                if raw.startswith(zeros[:count]):  # a hole of the original is none of memory here
                    stream.seek(count, os.SEEK_CUR)
                else:
                    stream.write(buffer[:count])
            expected = self._peers.crc32(source, number, 0, entry.nbytes)
            if crc32 != expected:
                raise DamagedError("a copy differs from its original", path, f"CRC32 {expected:08x}", f"{crc32:08x}")


def _refuse_without_space(folder: int, path: str, nbytes: int) -> None:
    """Raise OSError for a file that is larger than the space for it: one of holes alone may claim any size."""
    space = shutil.disk_usage(folder)
    if space.total and nbytes > space.free:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes, and {space.free} are free", path)


def _prune(folder: str, tag: str, keep: int | None) -> None:
    """Remove tags of a folder, and copies of tags, that are older than this one and not to be kept."""
    if keep is None:
        return
    places = folder, os.path.join(folder, REPLICAS)
    newest: dict[str, float] = {}  # by tag, when it was written
    for place in places:
        for found in list_checkpoints(place):
            written = max(modified(found.path(name)) for name in file_names(found.folder))
            newest[found.tag] = max(written, newest.get(found.tag, 0.0))
    older = [each for each, written in newest.items() if written < newest.get(tag, 0.0)]
    older = sorted(older, key=lambda each: -newest[each])[keep - 1 :]
    if not older:
        return
    path = folder
    try:
        with opened_root(folder) as root:
            for each, place in product(older, ("", REPLICAS)):
                path = os.path.join(folder, place, each)
                if is_folder_in(root.descriptor, place or os.curdir):
                    _remove_tag(root, place, each)
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        raise ElasticCkptError("an older tag could not be removed", path, found=why, remedy="remove it") from error


def _remove_tag(root: OpenedFolder, place: str, tag: str) -> None:
    """Remove the folder of a tag below an opened folder; a link stays, and what it leads to."""
    with opened_below(root, place) as folder:
        if is_folder_in(folder, tag):
            hidden = f".{tag}.removed"
            remove_in(folder, hidden)  # which a process left that was killed
            os.rename(tag, hidden, src_dir_fd=folder, dst_dir_fd=folder)  # half of it is no checkpoint
            remove_in(folder, hidden)

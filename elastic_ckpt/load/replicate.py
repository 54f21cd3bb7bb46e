"""Copies of node-local files on other nodes, from which a job resumes although nodes were lost."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress

from isal import isal_zlib

from elastic_ckpt import distributed
from elastic_ckpt.errors import ConfigError, DamagedError, ElasticCkptError, UnforeseenError
from elastic_ckpt.formats.detect import LATEST, list_checkpoints
from elastic_ckpt.load.nodes import SECRET_NBYTES, Node, identity_of, inside, own_address, words_of
from elastic_ckpt.storage import Entry, exists
from elastic_ckpt.storage.local import version_of
from elastic_ckpt.storage.peers import FileServer, Peers
from elastic_ckpt.storage.view import ON_EVERY_NODE, NodeListing, list_folders

_DOING = "replicate a checkpoint"
#: Bytes in memory at a time.
_CHUNK_NBYTES = 8 << 20
_PARTIAL = ".partial"


class Replication:
    """Copies that are being made in the background; see :func:`replicate`."""

    def __init__(self, server: FileServer | None, pull: _Pull | None, prune: _Prune) -> None:
        self._server, self._pull, self._prune = server, pull, prune

    def done(self) -> bool:
        """Whether this rank's node has made its copies, or failed to. Local."""
        return self._pull is None or not self._pull.is_alive()

    def wait(self) -> None:
        """Wait until the copies of all nodes are whole, then remove older tags, if asked to. Collective.

        Raises the same error on every rank if a copy could not be made; no tag is removed then.
        """
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


def replicate(folder: str | os.PathLike[str], tag: str, copies: int = 1, keep: int | None = None) -> Replication:
    """Have the next ``copies`` nodes copy each node's files of a tag, while training goes on.

    To be called by every rank after ``engine.save_checkpoint(folder, tag)`` into node-local storage, ``/dev/shm`` say.
    ``engine.load_checkpoint(folder)`` then finds all files as long as no ``copies + 1`` neighbouring nodes are lost, in
    a job of any size. A copy gets its name once it is whole and its checksum is that of the original. The original must
    not be removed before :meth:`Replication.wait` returns.

    Args:
        folder: as ``save_checkpoint`` was given it; each node has its own.
        tag: the tag that was saved.
        copies: of each file, on as many other nodes.
        keep: how many tags stay in ``folder`` on each node: the newest ones. ``None``: all.

    Collective, over small messages alone; a node's first rank copies, with at most 8 MiB in memory at a time. Raises
    the same :class:`ElasticCkptError` on every rank if arguments differ, or a node has nothing to copy.
    """
    folder, tag = os.path.abspath(folder), os.path.normpath(str(tag))
    meant = (tag, copies, keep)

    def begin() -> tuple[Node, bytes, tuple[str, int, int | None]]:
        if not inside({tag}):
            raise ConfigError("the tag is no folder below the one that has it", folder, "a tag such as step100", tag)
        if not copies >= 1 or (keep is not None and not keep >= 1):
            raise ConfigError("copies and keep are numbers from 1 on", None, "replicate(folder, tag, copies=1)", meant)
        return identity_of([folder]), secrets.token_bytes(SECRET_NBYTES), meant

    everybody = distributed.all_gather(_DOING, begin)
    nodes: dict[Node, int] = {}  # the first rank of each
    for rank, (node, _, other) in enumerate(everybody):
        nodes.setdefault(node, rank)
        if other != everybody[0][2]:
            both = f"{everybody[0][2]}, as on rank 0", f"{other} on rank {rank}"
            raise ConfigError("ranks call replicate with different arguments", None, *both, rank=rank)
    node, (_, secret, _) = everybody[distributed.rank()][0], everybody[0]
    servers: list[FileServer] = []

    def serve() -> tuple[NodeListing, tuple[str, int]] | None:
        if nodes[node] != distributed.rank():
            return None
        listing = list_folders(words_of(node), [folder], [tag])
        if not any(os.path.dirname(name) for name, *_ in listing.entries[0]):
            problem, remedy = "this node has no files of the tag to copy", "call replicate after save_checkpoint"
            raise DamagedError(problem, os.path.join(folder, tag), "files that save_checkpoint wrote", remedy=remedy)
        servers.append(FileServer(own_address(node, list(nodes)), secret, listing.files))
        return listing, servers[0].address

    served = [each for each in distributed.all_gather(_DOING, serve) if each is not None]
    pull = None
    if servers:
        listings, addresses = zip(*served, strict=True)
        mine = list(nodes).index(node)
        sources = [(mine + 1 + step) % len(nodes) for step in range(min(copies, len(nodes) - 1))]
        pull = _Pull(folder, tag, listings, sources, Peers(secret, addresses))
        pull.start()
    return Replication(servers[0] if servers else None, pull, _Prune(folder, tag, keep))


class _Pull(threading.Thread):
    """Copies what this node lacks of the files of some others, in the background."""

    def __init__(
        self, folder: str, tag: str, listings: Sequence[NodeListing], sources: Sequence[int], peers: Peers
    ) -> None:
        super().__init__(name="elastic_ckpt replication", daemon=True)
        self._folder, self._tag, self._listings, self._sources, self._peers = folder, tag, listings, sources, peers
        self.error: ElasticCkptError | None = None

    def run(self) -> None:
        try:
            for source in self._sources:
                entries = list(enumerate(self._listings[source].entries[0]))
                of_tag = [each for each in entries if each[1].name.startswith(f"{self._tag}{os.sep}")]
                for number, entry in of_tag + [each for each in entries if each[1].name == LATEST]:  # which comes last
                    if self._lacks(entry):
                        self._copy(source, number, entry)
        except ElasticCkptError as error:
            self.error = error
        except OSError as error:  # such as a full disk
            found, remedy = f"{type(error).__name__}: {error.strerror}", "free memory there, or keep fewer tags"
            self.error = UnforeseenError("a copy could not be written", error.filename, found=found, remedy=remedy)
        finally:
            self._peers.close()

    def _lacks(self, entry: Entry) -> bool:
        """Whether a file is not here, or the copy of one that has been saved over; this node's own ones stay."""
        path = os.path.join(self._folder, entry.name)
        if not exists(path):
            return True
        if entry.name != LATEST and ON_EVERY_NODE.fullmatch(entry.name):
            return False
        _, *here = version_of(path)
        is_older = entry.name != LATEST or here[1] < entry.mtime_ns
        return is_older and here != [entry.nbytes, entry.mtime_ns]

    def _copy(self, source: int, number: int, entry: Entry) -> None:
        path = os.path.normpath(os.path.join(self._folder, entry.name))
        if not path.startswith(os.path.join(self._folder, "")):
            raise DamagedError("a listing names a file that is not below its folder", path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        partial, crc32, buffer = path + _PARTIAL, 0, memoryview(bytearray(min(_CHUNK_NBYTES, entry.nbytes)))
        try:
            with open(partial, "wb") as stream:
                while left := entry.nbytes - stream.tell():
                    count = self._peers.read_into(source, number, [buffer[:left]], stream.tell())
                    if not count:
                        raise DamagedError("the original ends early", path, f"{entry.nbytes} bytes", stream.tell())
                    crc32 = isal_zlib.crc32(buffer[:count], crc32)
                    stream.write(buffer[:count])
            expected = self._peers.crc32(source, number, 0, entry.nbytes)
            if crc32 != expected:
                raise DamagedError("a copy differs from its original", path, f"CRC32 {expected:08x}", f"{crc32:08x}")
            os.utime(partial, ns=(entry.mtime_ns, entry.mtime_ns))
            os.rename(partial, path)
        finally:
            with suppress(OSError):  # it has its name
                os.unlink(partial)


class _Prune:
    """Removes all but the newest tags of a folder."""

    def __init__(self, folder: str, tag: str, keep: int | None) -> None:
        self._folder, self._tag, self._keep = folder, tag, keep

    def __call__(self) -> None:
        if self._keep is None:
            return
        tags = [found.tag for found in list_checkpoints(self._folder) if found.tag != self._tag]
        for tag in tags[self._keep - 1 :]:
            path, hidden = os.path.join(self._folder, tag), os.path.join(self._folder, f".{tag}.removed")
            shutil.rmtree(hidden, ignore_errors=True)  # which a process left that was killed
            os.rename(path, hidden)  # half of it is no checkpoint
            shutil.rmtree(hidden)

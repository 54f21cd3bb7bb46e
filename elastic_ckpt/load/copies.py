"""The thread that copies files of a tag from other nodes, beside the training.

The copying ranks of all nodes exchange ranges in rounds of a process group of their own: each asks for the next range
of the file that it writes, and reads what the others ask for, until all have their copies.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from isal import isal_zlib

from elastic_ckpt.core.text import one_line
from elastic_ckpt.errors import CommunicationError, DamagedError, ElasticCkptError, UnforeseenError
from elastic_ckpt.formats.detect import LATEST
from elastic_ckpt.io.exchange import Piece, Ranks, exchange
from elastic_ckpt.io.node_files import NodeFiles
from elastic_ckpt.storage import Entry, walk
from elastic_ckpt.storage.local import made_whole
from elastic_ckpt.storage.opened_folders import OpenedFolder, opened_below, opened_root, version_in
from elastic_ckpt.storage.view import REPLICAS, NodeListing

#: Bytes that are asked for at a time, and host memory for what travels.
_CHUNK_NBYTES = 8 << 20
_CRC32_NBYTES = 4
#: How long a process that ends waits for the round that its thread is in.
_LEAVE_SECONDS = 60


@dataclass(frozen=True)
class Original:
    """A file of another node."""

    source: int  # the node
    number: int  # among its files
    entry: Entry


#: Yields what to exchange next, from which node, and goes on once it has arrived.
Requests = Generator[tuple[int, Piece], None, None]


class Copying(threading.Thread):
    """Makes the replicas of a tag what is wanted of it, in the background. On one rank of each node.

    Args:
        folder: of the checkpoints, in which the replicas are.
        tag: that is copied.
        wanted: files of other nodes, by name.
        listing: this node's own files.
        group: gloo's, of the copying ranks in the order of their nodes; ``None``: there is one node.
    """

    def __init__(self, folder: str, tag: str, wanted: Mapping[str, Original], listing: NodeListing, group: Any) -> None:
        super().__init__(name="elastic_ckpt replication", daemon=True)
        self._root = folder
        self._folder = os.path.join(folder, REPLICAS)
        self._tag = tag
        self._wanted = wanted
        self._group = group
        self._originals = _Originals(listing.files)
        self._path = self._folder  # that it is at
        self._leaves = False
        self.error: Exception | None = None
        self.has_made_its_own = threading.Event()  # or failed to

    def run(self) -> None:
        atexit.register(self._leave)
        requests = self._make_alike()
        try:
            request = self._next(requests)
            if self._group is not None:
                self._exchange(requests, request)
        except (RuntimeError, ValueError) as error:  # of gloo; or of a group that was destroyed
            problem = "a node no longer answers while files are copied"
            remedy = "its process ended or failed, or destroyed the process group before wait(): see the other logs"
            found = one_line(str(error))
            self.error = self.error or CommunicationError(problem, self._path, found=found, remedy=remedy)
        except Exception as error:  # wait() raises it
            self.error = self.error or error
        finally:
            requests.close()
            self._originals.close()
            self.has_made_its_own.set()
            atexit.unregister(self._leave)

    def _exchange(self, requests: Requests, request: tuple[int, Piece] | None) -> None:
        """Exchange ranges until no node wants any more."""
        ranks = Ranks(self._group)
        while not self._leaves:
            (goes_on,) = ranks.most_of([request is not None])
            if not goes_on:
                return
            wanted = {} if request is None else {request[0]: [request[1]]}
            errors = exchange(ranks, wanted, self._originals, _CHUNK_NBYTES)
            (has_failed,) = ranks.most_of([bool(errors)])
            of_all: list[Any] = [{}] * ranks.size
            if has_failed:
                dist.all_gather_object(of_all, errors, group=self._group)
            if request is not None:
                request = self._next(requests, of_all[request[0]].get(dist.get_rank(self._group)))

    def _next(self, requests: Requests, error: ElasticCkptError | None = None) -> tuple[int, Piece] | None:
        """The next request; ``None`` once all is copied, or has failed. ``error``: of the request before."""
        try:
            return next(requests) if error is None else requests.throw(error)
        except StopIteration:
            pass
        except ElasticCkptError as failure:
            self.error = failure
        except OSError as failure:
            is_full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free memory there, or keep fewer tags" if is_full else "remove what is there, and replicate again"
            found = f"{type(failure).__name__}: {failure.strerror}"
            self.error = ElasticCkptError("a copy could not be written", self._path, found=found, remedy=remedy)
        except Exception as failure:  # any other, too, since this thread must go on to answer other nodes
            self.error = failure
        self.has_made_its_own.set()
        return None

    def _leave(self) -> None:
        """Have the thread end before the interpreter does, in which it could no longer wait for others."""
        self._leaves = True
        self.join(_LEAVE_SECONDS)

    def _make_alike(self) -> Requests:
        """Remove the files that are not wanted, and copy those that are not there."""
        with opened_root(self._root) as root:
            for path, _ in walk(os.path.join(self._folder, self._tag)):
                if os.path.relpath(path, self._folder) not in self._wanted:  # of an older save, or cut short
                    self._path = path
                    with self._opened(root, path) as folder, suppress(FileNotFoundError):
                        os.unlink(os.path.basename(path), dir_fd=folder)
            for name in sorted(self._wanted, key=lambda name: name == LATEST):  # which comes last
                entry = self._wanted[name].entry
                path = self._path = os.path.normpath(os.path.join(self._folder, entry.name))
                if not path.startswith(os.path.join(self._folder, "")):
                    raise DamagedError("a listing names a file that is not below its folder", path)
                with self._opened(root, path, make=True) as folder:
                    if version_in(folder, os.path.basename(path))[1:] != (entry.nbytes, entry.mtime_ns):
                        yield from self._copy(self._wanted[name], folder)

    def _opened(self, root: OpenedFolder, path: str, make: bool = False) -> AbstractContextManager[int]:
        """The folder of a file of the replicas, which no link leads to."""
        return opened_below(root, os.path.relpath(os.path.dirname(path), self._root), make)

    def _copy(self, original: Original, folder: int) -> Requests:
        """Copy a file into an opened folder."""
        path = self._path
        nbytes = original.entry.nbytes
        _refuse_without_space(folder, path, nbytes)
        raw = bytearray(min(_CHUNK_NBYTES, nbytes))
        zeros = memoryview(bytes(len(raw)))
        crc32 = 0
        with made_whole(os.path.basename(path), original.entry.mtime_ns, folder) as stream:
            stream.truncate(nbytes)
            while left := nbytes - stream.tell():
                part = memoryview(raw)[:left]
                yield original.source, Piece(original.number, stream.tell(), [part])
                crc32 = isal_zlib.crc32(part, crc32)
                if raw.startswith(zeros[: len(part)]):  # a hole of the original is none of memory here
                    stream.seek(len(part), os.SEEK_CUR)
                else:
                    stream.write(part)
            checksum = bytearray(_CRC32_NBYTES)
            yield original.source, Piece(~original.number, 0, [memoryview(checksum)])
            expected = int.from_bytes(checksum, "big")
            if crc32 != expected:
                raise DamagedError("a copy differs from its original", path, f"CRC32 {expected:08x}", f"{crc32:08x}")


class _Originals(NodeFiles):
    """This node's files; ``~number`` in place of a number: the four bytes of the file's CRC32."""

    def read(self, file: int, byte_offset: int, buffer: memoryview) -> None:
        try:
            if file >= 0:
                super().read(file, byte_offset, buffer)
            else:
                buffer[:] = self._crc32(~file).to_bytes(_CRC32_NBYTES, "big")
        except ElasticCkptError:
            raise
        except Exception as error:  # whoever asked is told of any, since this thread must go on to answer others
            problem = f"failed to read a file for another node: {type(error).__name__}: {one_line(str(error))}"
            raise UnforeseenError(problem, self._files[file if file >= 0 else ~file][0]) from error

    def _crc32(self, number: int) -> int:
        crc32 = 0
        chunk = memoryview(bytearray(_CHUNK_NBYTES))
        _, nbytes = self._files[number]
        for start in range(0, nbytes, len(chunk)):
            part = chunk[: nbytes - start]
            super().read(number, start, part)
            crc32 = isal_zlib.crc32(part, crc32)
        return crc32


def _refuse_without_space(folder: int, path: str, nbytes: int) -> None:
    """Raise OSError for a file that is larger than the space for it: one of holes alone may claim any size."""
    space = shutil.disk_usage(folder)
    if space.total and nbytes > space.free:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes, and {space.free} are free", path)

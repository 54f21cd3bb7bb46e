"""Byte ranges of files that other processes of the job hold, for nodes that lack them.

A process serves its files (:class:`FileServer`) and asks others for ranges of theirs (:class:`Peers`). Both ends of a
connection first prove that they know the job's secret. Then a request is a struct; its answer a header with the number
of bytes that follow, those bytes, and another header that confirms them: what the system says while a file is sent is
known only once a part of it is gone. A header with a status other than 0 is followed by words instead. Neither end
believes what the other says about sizes.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from isal import isal_zlib

from elastic_ckpt.errors import CommunicationError, DamagedError, SavedOverError, UnforeseenError, refuse_used_up
from elastic_ckpt.storage.digest import DIGEST_NBYTES, content_digest
from elastic_ckpt.storage.local import PINS, first_bytes, named_os_errors, open_ranges, open_stream, see

#: Operation, number of the file, byte offset, number of bytes, and the CRC32 of what is before them.
REQUEST = struct.Struct("!BIqQI")
READ, SUM, DIGEST = range(3)
#: Status, and the number of bytes that follow. Errors by status, from 1 on: the first that fits.
HEADER = struct.Struct("!BQ")
_REFUSALS = (SavedOverError, DamagedError, UnforeseenError)
#: Most bytes that one request reads or sums.
REQUEST_NBYTES = 64 << 20
#: Most bytes that a refusal has.
_WORDS_NBYTES = 1000
#: Most buffers of a request: one less than a call takes (limits.h, IOV_MAX), since a header follows them.
_MOST_BUFFERS = 1023
_CHUNK_NBYTES = 1 << 20
_CRC32_NBYTES = 4
#: How long a server waits for the proof of a stranger.
PROOF_SECONDS = 5
#: Of how many at once: others wait in the system's queue.
MOST_STRANGERS = 64
_QUEUED = 1024
_PAUSE_SECONDS = 0.02
#: How long either end waits for the other while nothing moves.
_PROGRESS_SECONDS = 60


def _receive(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fill all buffers, of which the last is not empty."""
    remaining = list(buffers)
    while remaining:
        count = connection.recvmsg_into(remaining, 0, socket.MSG_WAITALL)[0]
        if not count:
            raise ConnectionResetError("the connection was closed")
        while remaining and count >= len(remaining[0]):
            count -= len(remaining.pop(0))
        if count:
            remaining[0] = remaining[0][count:]


def _set_timeouts(connection: socket.socket, receiving: int, sending: int) -> None:
    """The system's own, in seconds, where 0 is none; with Python's, a socket does not block."""
    for option, seconds in ((socket.SO_RCVTIMEO, receiving), (socket.SO_SNDTIMEO, sending)):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@2l", seconds, 0))


def _prove(connection: socket.socket, secret: bytes, is_server: bool) -> None:
    """Prove to the other end that this one knows the secret, and have it do so; ``OSError`` if it does not."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with Connection(os.dup(connection.fileno())) as channel:
        try:
            for step in (deliver_challenge, answer_challenge)[:: 1 if is_server else -1]:
                step(channel, secret)
        except (BlockingIOError, ConnectionResetError):  # its process was stopped or killed
            raise
        except EOFError as error:
            raise ConnectionResetError("the connection was closed") from error
        except Exception as error:  # whatever a stranger's bytes raise there
            raise ConnectionError("it did not prove that it knows the secret of this job") from error


def _shut_down(connection: socket.socket) -> None:
    """Have the thread that waits for it go on."""
    with suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)


class FileServer:
    """Serves byte ranges of some files to peers that prove that they know the secret, on a free port of a host.

    Its threads open files with the pins of the context that made it.
    """

    def __init__(self, host: str, secret: bytes, files: Sequence[tuple[str, int]]) -> None:
        """``files``: path and size of each, which peers know by its number."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_QUEUED)
        self._listener.settimeout(1)  # to look for strangers whose time is over
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.secret = secret
        self.files = tuple(files)
        self.pins = PINS.get()
        self._services: list[_Service] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="elastic_ckpt file server", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            self._services = [service for service in self._services if service.is_alive()]
            strangers = [service for service in self._services if service.deadline < math.inf]
            for stranger in strangers:
                if stranger.deadline < time.monotonic():
                    _shut_down(stranger.connection)
            try:
                if len(strangers) >= MOST_STRANGERS:
                    raise TimeoutError
                service = _Service(self, self._listener.accept()[0])
                service.start()
                self._services.append(service)
            except (OSError, RuntimeError):  # nobody came, or this process can have no more descriptors or threads
                self._closing.wait(_PAUSE_SECONDS)

    def close(self) -> None:
        """End all connections and threads."""
        self._closing.set()
        _shut_down(self._listener)
        self._thread.join()
        self._listener.close()
        for service in self._services:
            _shut_down(service.connection)
        for service in self._services:
            service.join(PROOF_SECONDS)  # a disk that does not answer may keep it, but not this process


class _Service(threading.Thread):
    """Answers the requests of one connection, in a thread of its own."""

    def __init__(self, server: FileServer, connection: socket.socket) -> None:
        super().__init__(name="elastic_ckpt file service", daemon=True)
        self._server = server
        self.connection = connection
        self.deadline = time.monotonic() + PROOF_SECONDS  # of a stranger

    def run(self) -> None:
        PINS.set(self._server.pins)
        request = bytearray(REQUEST.size)
        with self.connection, suppress(OSError):
            _set_timeouts(self.connection, PROOF_SECONDS, PROOF_SECONDS)
            _prove(self.connection, self._server.secret, is_server=True)
            self.deadline = math.inf
            _set_timeouts(self.connection, 0, _PROGRESS_SECONDS)
            while True:
                _receive(self.connection, [memoryview(request)])
                status = 0
                words = b""
                try:
                    self._answer(*REQUEST.unpack(request))
                except _REFUSALS as error:
                    status = next(number for number, kind in enumerate(_REFUSALS, 1) if isinstance(error, kind))
                    words = f"{error.problem}: {error.found} ({error.file})".encode(errors="replace")[:_WORDS_NBYTES]
                self.connection.sendall(HEADER.pack(status, len(words)) + words)

    def _answer(self, operation: int, file: int, byte_offset: int, nbytes: int, crc32: int) -> None:
        """Send all but the end of an answer."""
        is_known = operation in (READ, DIGEST) or (operation == SUM and nbytes <= REQUEST_NBYTES)
        if not is_known or file >= len(self._server.files) or byte_offset < 0:
            raise DamagedError("no such range is served", f"file {file}", found=f"byte {byte_offset}")
        path, listed_nbytes = self._server.files[file]
        with open_stream(path) as stream:
            descriptor = stream.fileno()
            if (now_nbytes := os.fstat(descriptor).st_size) != listed_nbytes:
                found = f"{now_nbytes} bytes, not {listed_nbytes} as when it was listed"
                raise SavedOverError("the file has changed", path, found=found)
            if operation == READ:
                readable_nbytes = min(nbytes, REQUEST_NBYTES, max(listed_nbytes - byte_offset, 0))
                return self._send(path, descriptor, byte_offset, readable_nbytes)
            with named_os_errors(path):
                if operation == SUM:
                    payload = _sum(descriptor, byte_offset, nbytes, crc32)
                else:
                    payload = content_digest(open_ranges(path), listed_nbytes)
        return self.connection.sendall(HEADER.pack(0, len(payload)) + payload)

    def _send(self, path: str, descriptor: int, byte_offset: int, nbytes: int) -> None:
        """Send just so many bytes, zeros for those that cannot be read: the error follows them."""
        self.connection.sendall(HEADER.pack(0, nbytes), socket.MSG_MORE)
        try:
            with named_os_errors(path):
                while nbytes:
                    count = os.sendfile(self.connection.fileno(), descriptor, byte_offset, nbytes)
                    if not count:
                        raise OSError(0, "end of file")
                    byte_offset = byte_offset + count
                    nbytes = nbytes - count
            see(path, os.fstat(descriptor))  # it may have been rewritten in the meantime
        finally:
            self.connection.sendall(bytes(nbytes))


def _sum(descriptor: int, byte_offset: int, nbytes: int, crc32: int) -> bytes:
    """The CRC32 of a range of a file, and of what is before it."""
    stop = byte_offset + nbytes
    while byte_offset < stop:
        chunk = os.pread(descriptor, min(stop - byte_offset, _CHUNK_NBYTES), byte_offset)
        if not chunk:
            raise OSError(0, "end of file")
        crc32 = isal_zlib.crc32(chunk, crc32)
        byte_offset = byte_offset + len(chunk)
    return crc32.to_bytes(_CRC32_NBYTES, "big")


class Peers:
    """This process's connections to file servers. Thread-safe: each thread has one of its own to each server.

    Each method raises :class:`DamagedError` with the words of a server that cannot read the file, and
    :class:`CommunicationError` if the server does not answer.
    """

    def __init__(self, secret: bytes, addresses: Sequence[tuple[str, int]]) -> None:
        """``addresses``: of each server, which is known by its number."""
        self._secret = secret
        self._addresses = tuple(addresses)
        self._connections: dict[tuple[int, int], socket.socket] = {}  # by thread and server

    def read_into(self, server: int, file: int, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Fill the buffers, in order, with what one request carries; number of bytes read, 0 at the end of the file."""
        wanted = buffers[:_MOST_BUFFERS]
        return self._ask(server, wanted, READ, file, byte_offset, sum(map(len, wanted)), 0)

    def crc32(self, server: int, file: int, byte_offset: int, nbytes: int) -> int:
        """CRC32 of a range, which the server computes; :class:`DamagedError` if the file ends before the range does."""
        crc32 = 0
        answer = bytearray(_CRC32_NBYTES)
        stop = byte_offset + nbytes
        for start in range(byte_offset, stop, REQUEST_NBYTES) or [byte_offset]:  # of nothing, too, if it is a file
            self._ask(server, [memoryview(answer)], SUM, file, start, min(stop - start, REQUEST_NBYTES), crc32)
            crc32 = int.from_bytes(answer, "big")
        return crc32

    def directory_digest(self, server: int, file: int) -> bytes:
        """The server's :func:`content_digest` of a file."""
        answer = bytearray(DIGEST_NBYTES)
        self._ask(server, [memoryview(answer)], DIGEST, file, 0, 0, 0)
        return bytes(answer)

    def close(self) -> None:
        """Close all connections, once no thread reads any more."""
        while self._connections:
            self._connections.popitem()[1].close()

    def _ask(self, server: int, buffers: Sequence[memoryview], *request: int) -> int:
        key = (threading.get_ident(), server)
        address = self._addresses[server]
        with ExitStack() as stack:
            try:
                known = self._connections.pop(key, None)  # until it has answered: a half answer makes it useless
                connection = stack.enter_context(known or socket.create_connection(address, _PROGRESS_SECONDS))
                if known is None:
                    connection.settimeout(None)
                    _set_timeouts(connection, _PROGRESS_SECONDS, _PROGRESS_SECONDS)
                    _prove(connection, self._secret, is_server=False)
                connection.sendall(REQUEST.pack(*request))
                count = _receive_answer(connection, buffers, is_whole=request[0] != READ)
            except OSError as error:
                asked = f"file {request[1]} from {address[0]} port {address[1]}"
                refuse_used_up(error, asked)
                is_silent = isinstance(error, BlockingIOError)
                found = f"nothing for {_PROGRESS_SECONDS} s" if is_silent else error.strerror or str(error)
                problem = "the node that holds a file of the checkpoint no longer answers"
                remedy = "its process failed or was killed: see the logs of the other ranks, then start the job again"
                raise CommunicationError(problem, None, asked, found, remedy=remedy) from error
            stack.pop_all()
        self._connections[key] = connection
        return count


def _receive_answer(connection: socket.socket, buffers: Sequence[memoryview], is_whole: bool) -> int:
    """The number of bytes that the server put in the buffers, in all of them if ``is_whole``; its refusal is raised."""
    header = memoryview(bytearray(HEADER.size))
    count = 0
    most_nbytes = sum(map(len, buffers))
    _receive(connection, [header])
    status, nbytes = HEADER.unpack(header)
    if not status:
        if (count := nbytes) > most_nbytes or (is_whole and count < most_nbytes):
            raise ConnectionError(f"{count} bytes, where {most_nbytes} were asked for")
        _receive(connection, [*first_bytes(buffers, count), header])
        status, nbytes = HEADER.unpack(header)
    if status > len(_REFUSALS) or nbytes > (_WORDS_NBYTES if status else 0):
        raise ConnectionError(f"status {status} with {nbytes} bytes, which no server sends")
    if not status:
        return count
    words = bytearray(nbytes)
    _receive(connection, [memoryview(words)])
    found = words.decode(errors="replace")
    raise _REFUSALS[status - 1]("the node that holds a file of the checkpoint cannot read it", found=found)

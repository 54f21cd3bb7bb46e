"""A file system of user space for tests: a folder, seen through the kernel's FUSE, which counts, waits and fails.

It speaks the kernel's protocol (linux/fuse.h) on ``/dev/fuse`` itself, so that no library has to be installed. Files
are opened with ``FOPEN_DIRECT_IO`` and attributes are never cached: each call of a process is a request here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

_IN, _OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT = 1, 2, 3, 14, 15, 18, 25, 26
_OPENDIR, _READDIR, _RELEASEDIR, _DESTROY, _BATCH_FORGET = 27, 28, 29, 38, 42
_SILENT = (_FORGET, _BATCH_FORGET)
_MAX_PAGES, _DIRECT_IO, _MNT_FORCE_DETACH = 1 << 22, 1, 1 | 2
_REQUEST_NBYTES, _WORKERS = 1 << 18, 8


class Event(NamedTuple):
    """A request: by which process, for what, of which file, and which bytes."""

    process: int
    what: str
    name: str
    start: int = 0
    nbytes: int = 0


@dataclass
class FuseFolder:
    """A folder that is seen through FUSE.

    Attributes:
        at: where.
        events: what was asked so far.
        seconds: that each read and each open waits.
        errors: what comes of the next calls of ``"open NAME"`` and ``"read NAME"``: numbers of errors, one a call.
        shortest: bytes that a read returns at most.
        hidden: how often it will be said that a name is not there, although it is.
        sizes: what attributes say of the sizes of some files.
    """

    source: Path
    at: Path
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    errors: dict[str, list[int]] = field(default_factory=dict)
    shortest: int = 1 << 30
    hidden: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    _device: int = -1
    _names: dict[int, str] = field(default_factory=lambda: {1: ""})
    _nodes: dict[str, int] = field(default_factory=lambda: {"": 1})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        while True:
            try:
                raw = os.read(self._device, _REQUEST_NBYTES)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):  # the request was interrupted
                    continue
                return
            _, what, unique, node, _, _, thread, _ = _IN.unpack_from(raw)
            if what in _SILENT:
                continue
            try:
                code, answer = 0, self._answer(what, node, raw[_IN.size :], thread)
            except OSError as error:
                code, answer = -(error.errno or errno.EIO), b""
            with suppress(OSError):  # of an interrupted request
                os.write(self._device, _OUT.pack(_OUT.size + len(answer), code, unique) + answer)

    def _answer(self, what: int, node: int, raw: bytes, thread: int) -> bytes:
        name = self._names.get(node, "")
        if what == _INIT:
            major, minor, ahead, flags = struct.unpack_from("<4I", raw)
            sizes = 16, 12, 1 << 17, 1, 256, 0, 0, 0
            return struct.pack("<4I2H2I2H2I24x", major, min(minor, 31), ahead, flags & _MAX_PAGES, *sizes)
        answers = {
            _LOOKUP: lambda: self._look_up(os.path.join(name, os.fsdecode(raw.rstrip(b"\0")))),
            _GETATTR: lambda: bytes(16) + self._attributes(name),
            _OPEN: lambda: self.meet(thread, "open", name) or struct.pack("<QII", 0, _DIRECT_IO, 0),
            _OPENDIR: lambda: self._note(thread, "list", name) or bytes(16),
            _READDIR: lambda: self._entries(name, *struct.unpack_from("<8xQI", raw)),
            _READ: lambda: self._read(name, thread, *struct.unpack_from("<8xQI", raw)),
            **dict.fromkeys((_RELEASE, _RELEASEDIR, _FLUSH, _DESTROY), lambda: b""),
        }
        if what not in answers:
            raise OSError(errno.ENOSYS, "not here")
        return answers[what]()

    def _read(self, name: str, thread: int, offset: int, nbytes: int) -> bytes:
        with (self.source / name).open("rb") as stream:
            raw = os.pread(stream.fileno(), min(nbytes, self.shortest), offset)
        self.meet(thread, "read", name, offset, len(raw))
        return raw

    def _note(self, thread: int, what: str, name: str, *where: int) -> None:
        status = Path(f"/proc/{thread}/status").read_text() if thread else "Tgid: 0"
        process = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:"))
        with self._lock:
            self.events.append(Event(process, what, name, *where))

    def meet(self, thread: int, what: str, name: str, *where: int) -> None:
        """Count an open or a read, wait, and fail if that is its fate."""
        self._note(thread, what, name, *where)
        time.sleep(self.seconds)
        with self._lock:
            left = self.errors.get(f"{what} {name}")
            number = left.pop(0) if left else 0
        if number:
            raise OSError(number, os.strerror(number))

    def _look_up(self, name: str) -> bytes:
        with self._lock:
            self.hidden[name] = left = self.hidden.get(name, 0) - 1
        if left >= 0:
            raise OSError(errno.ENOENT, "hidden")
        attributes = self._attributes(name)
        with self._lock:
            node = self._nodes.setdefault(name, len(self._nodes) + 1)
            self._names[node] = name
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + attributes

    def _attributes(self, name: str) -> bytes:
        status = os.stat(self.source / name)
        times = [int(seconds) for seconds in (status.st_atime, status.st_mtime, status.st_ctime)]
        parts = [nanoseconds % 10**9 for nanoseconds in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
        nbytes = self.sizes.get(name, status.st_size)
        rest = status.st_mode, status.st_nlink, 0, 0, 0, 1 << 17, 0
        return _ATTRIBUTES.pack(status.st_ino, nbytes, -(-nbytes // 512), *times, *parts, *rest)

    def _entries(self, name: str, offset: int, nbytes: int) -> bytes:
        found = b""
        for number, each in enumerate(sorted(os.listdir(self.source / name))[offset:], offset + 1):
            path = os.path.join(name, each)
            if self.hidden.get(path, 0) > 0:
                self.hidden[path] -= 1
                continue
            kind = stat.S_IFMT(os.stat(self.source / name / each).st_mode) >> 12
            raw = os.fsencode(each)
            entry = struct.pack("<QQII", number, number, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > nbytes:
                break
            found += entry
        return found


@contextmanager
def seen_through_fuse(source: Path, at: Path) -> Iterator[FuseFolder]:
    """A folder, seen at another path; skips the test where this machine allows no such file system."""
    at.mkdir(parents=True, exist_ok=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"there is no FUSE here: {error}")
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"tests", os.fsencode(at), b"fuse.tests", 0, options):
        os.close(device)
        pytest.skip(f"this machine forbids FUSE: {os.strerror(ctypes.get_errno())}")
    folder = FuseFolder(source, at, _device=device)
    threads = [threading.Thread(target=folder.serve, daemon=True) for _ in range(_WORKERS)]
    try:
        for thread in threads:
            thread.start()
        yield folder
    finally:
        libc.umount2(os.fsencode(at), _MNT_FORCE_DETACH)
        for thread in threads:
            thread.join(10)
        os.close(device)

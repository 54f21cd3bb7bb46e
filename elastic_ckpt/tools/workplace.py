"""The unfinished output folder of a conversion or an export: atomic and resumable.

Every file is written under a temporary name, synced and renamed, so that a file under its final name is complete. Once
all are, the folder is renamed, and then a ``latest`` file is written. An interrupted task resumes from the complete
files if neither the source nor the options have changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL


@dataclass(frozen=True)
class Task:
    """What writes a folder, in the words of its error messages."""

    noun: str
    verb: str


CONVERSION, EXPORT = Task("conversion", "convert"), Task("export", "export")


@dataclass(frozen=True)
class WriteReport:
    """The outcome: folder, tensors in it, files and bytes written, files kept from an earlier attempt, and notes."""

    folder: str
    tensors: int
    files: int
    nbytes: int
    files_kept: int
    seconds: float
    notes: tuple[str, ...]


class Workplace:
    """The unfinished output folder of a task, locked while in use; see :func:`fingerprint`.

    Args:
        task, target: what writes, and the folder's final name.
        source, options: the files that are read, and what else determines the bytes that are written.
        restart: discard the files of a task with another source or other options.

    Raises :class:`ElasticCkptError` if ``target`` exists, another such task is in progress, or the folder has files
    of one with another fingerprint and ``restart`` is not set.
    """

    def __init__(
        self, task: Task, target: Path, source: Sequence[SourceFile], options: Sequence[object], restart: bool = False
    ) -> None:
        self.target, self.task = target, task
        self.folder = partial_folder(target)
        self._manifest = f"{task.noun}.json"
        self._source, self._options = source, options
        self._fingerprint = fingerprint(source, options)
        mine = {"fingerprint": self._fingerprint}
        # true if an earlier attempt ended after the folder was renamed: only :meth:`finish` is left to do
        is_named = _read(target / self._manifest) == mine
        if os.path.lexists(target) and not is_named:
            raise ElasticCkptError(
                f"the folder to {task.verb} to is there already",
                file=str(target),
                expected="a folder that is not there yet",
                remedy="choose another name, or remove it",
            )
        folder = target if is_named else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            self._lock = os.open(folder, os.O_RDONLY)
            undo.callback(os.close, self._lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(self._lock), os.stat(folder)):
                    raise FileNotFoundError(folder)
            except (BlockingIOError, FileNotFoundError) as error:  # locked, or renamed just now
                raise ElasticCkptError(
                    f"another {task.noun} to the same folder is under way", file=str(folder), remedy="wait for it"
                ) from error
            if is_named:
                os.rename(target, self.folder)
            self._adopt(mine, restart)
            undo.pop_all()

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _adopt(self, mine: dict[str, str], restart: bool) -> None:
        """Keep the files of an earlier attempt at the same task, or clear the folder."""
        manifest = self.folder / self._manifest
        known = _read(manifest)
        if known == mine:
            return
        others = [path for path in self.folder.iterdir() if path != _part_of(manifest)]
        if others and not restart:
            raise ElasticCkptError(
                f"an interrupted {self.task.noun} of something else is here",
                file=str(self.folder),
                expected=mine,
                found=known if known is not None else f"{len(others)} files without {self._manifest}",
                remedy="--restart throws it away",
            )
        for path in others:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _write_durably(manifest, lambda path: path.write_text(json.dumps(mine), encoding="utf-8"))

    def has(self, path: str) -> bool:
        """Whether a file is complete."""
        return (self.folder / path).is_file()

    def write(self, path: str, write: Callable[[Path], object]) -> int:
        """Write a file through a temporary path and return its size in bytes. Thread-safe."""
        final = self.folder / path
        final.parent.mkdir(parents=True, exist_ok=True)
        _write_durably(final, write)
        return final.stat().st_size

    def finish(self, latest: str | None = None) -> None:
        """Rename the folder to its final name, and write the ``latest`` file beside it, if it has a name.

        The manifest is removed last: while it exists, the next attempt finishes these steps. Raises
        :class:`ElasticCkptError` if the source has changed.
        """
        if fingerprint(self._source, self._options) != self._fingerprint:
            raise ElasticCkptError(
                f"the checkpoint was written to while it was {self.task.verb}ed",
                file=os.path.dirname(self._source[0].path),
                expected="files that stay as they are",
                found="other sizes or times than at the start",
                remedy=f"{self.task.verb} it again with --restart once nobody writes there",
            )
        for folder, _, _ in os.walk(self.folder):
            _sync(Path(folder))
        os.rename(self.folder, self.target)
        _sync(self.target.parent)
        if latest is not None:
            name = self.target.name
            _write_durably(self.target.parent / latest, lambda path: path.write_text(name, encoding="utf-8"))
            _sync(self.target.parent)
        (self.target / self._manifest).unlink()
        _sync(self.target)


def fingerprint(files: Sequence[SourceFile], options: Sequence[object]) -> str:
    """A digest that changes with any source file's path, size or mtime, and with any option."""
    facts = [(file.path, file.nbytes, os.stat(file.path).st_mtime_ns) for file in files]
    return hashlib.sha256(repr((facts, options)).encode()).hexdigest()


def partial_folder(target: Path) -> Path:
    """The unfinished folder of an output folder."""
    return target.with_name(f".{target.name}.partial")


def refuse_target(task: Task, target: Path, source: Path) -> None:
    """Raise :class:`ElasticCkptError` if a folder is within that of the checkpoint, or has no name of its own."""
    inside = source.resolve() in target.resolve().parents
    if inside or target.name in ("", "..", LATEST, LATEST_UNIVERSAL):
        raise ElasticCkptError(
            "a checkpoint cannot be written there",
            file=str(target),
            expected=f"a folder with a name of its own, outside of the folder of the tag that is {task.verb}ed",
            found=f"a folder within {source}" if inside else repr(target.name),
            remedy="choose another folder, beside that of the tag for example",
        )


@contextmanager
def naming_os_errors(task: Task, target: Path) -> Iterator[None]:
    """Turn an :class:`OSError`, or what torch makes of one, into an :class:`ElasticCkptError` that names the file."""
    try:
        yield
    except (OSError, RuntimeError) as raised:
        error = _os_error_in(raised)
        if error is None:
            raise
        raise ElasticCkptError(
            f"the {task.noun} could not be read or written",
            file=str(error.filename or target),
            expected="a source that stays, and a folder to write to",
            found=f"{type(error).__name__}: {error.strerror or error}",
            remedy="check the path, its file system and its permissions; the same command goes on from here",
        ) from raised


def _os_error_in(error: BaseException | None) -> OSError | None:
    """The error of the system that an exception is, or was raised for, or while it was handled."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


_of_thread = threading.local()


def scratch(nbytes: int) -> torch.Tensor:
    """A flat uint8 tensor of this thread, which the next call may return again; allocating one each time is slow."""
    buffer: torch.Tensor | None = getattr(_of_thread, "buffer", None)
    if buffer is None or buffer.numel() != nbytes:
        buffer = _of_thread.buffer = torch.empty(nbytes, dtype=torch.uint8)
    return buffer


def _write_durably(final: Path, write: Callable[[Path], object]) -> None:
    part = _part_of(final)
    write(part)
    _sync(part)
    os.replace(part, final)


def _part_of(final: Path) -> Path:
    return final.with_name(f"{final.name}.part")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(manifest: Path) -> object:
    try:
        return json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

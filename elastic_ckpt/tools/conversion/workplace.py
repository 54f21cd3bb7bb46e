"""Where a conversion is written: a folder beside the final one, complete before it gets its name.

Every file is written under another name, synced to disk and renamed; a file that has its name is complete. The folder
is renamed when all are there, and only then a ``latest`` file names it. A conversion that was interrupted goes on from
the files that are complete, if nothing of the source has changed since.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import ElasticCkptError

_MANIFEST = "conversion.json"


class Workplace:
    """The unfinished folder of one conversion, locked while it is in use.

    Args:
        target: folder that is to be made; it must not be there.
        fingerprint: of everything that decides what is written; see :func:`fingerprint`.
        restart: throw away what an interrupted conversion of something else left there.

    Raises:
        ElasticCkptError: the target is there already, or another conversion is or was at work here.
    """

    def __init__(self, target: Path, fingerprint: str, restart: bool) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}.partial")
        mine = {"fingerprint": fingerprint}
        # an attempt that ended between the folder's last name and the ``latest`` file: only that is left to do
        is_named = _read(target / _MANIFEST) == mine
        if os.path.lexists(target) and not is_named:
            raise ElasticCkptError(
                "the folder to convert to is there already",
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
            except (BlockingIOError, FileNotFoundError) as error:  # it is locked, or it got its last name just now
                raise ElasticCkptError(
                    "another conversion to the same folder is under way", file=str(folder), remedy="wait for it"
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
        """Go on from what an earlier attempt at the same conversion left, or clear the folder."""
        manifest = self.folder / _MANIFEST
        known = _read(manifest)
        if known == mine:
            return
        others = [path for path in self.folder.iterdir() if path != _part_of(manifest)]
        if others and not restart:
            raise ElasticCkptError(
                "an interrupted conversion of something else lies here",
                file=str(self.folder),
                expected=mine,
                found=known if known is not None else f"{len(others)} files without {_MANIFEST}",
                remedy="--restart throws it away",
            )
        for path in others:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _write_durably(manifest, lambda path: path.write_text(json.dumps(mine), encoding="utf-8"))

    def has(self, path: str) -> bool:
        """Whether a file is complete already."""
        return (self.folder / path).is_file()

    def write(self, path: str, write: Callable[[Path], object]) -> int:
        """Have a file written, and give it its name once it is on the disk. Thread-safe; its size in bytes.

        Args:
            path: below the checkpoint.
            write: writes it to the path that it is given.
        """
        final = self.folder / path
        final.parent.mkdir(parents=True, exist_ok=True)
        _write_durably(final, write)
        return final.stat().st_size

    def finish(self, latest: str) -> None:
        """Make the folder the checkpoint that it is, and have ``latest`` beside it name it.

        The manifest goes last: as long as it is there, the next attempt finishes what is left of this.
        """
        for folder, _, _ in os.walk(self.folder):
            _sync(Path(folder))
        os.rename(self.folder, self.target)
        _sync(self.target.parent)
        name = self.target.name
        _write_durably(self.target.parent / latest, lambda path: path.write_text(name, encoding="utf-8"))
        _sync(self.target.parent)
        (self.target / _MANIFEST).unlink()
        _sync(self.target)


def fingerprint(files: Iterable[SourceFile], *options: object) -> str:
    """Changes when a source file or an option does."""
    facts = [(file.path, file.nbytes, os.stat(file.path).st_mtime_ns) for file in files]
    return hashlib.sha256(repr((facts, options)).encode()).hexdigest()


def _write_durably(final: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, sync it, rename it."""
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

"""What a conversion or an export writes: a folder under a temporary name, until all of it is on the disk."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import ConfigError, ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL
from elastic_ckpt.storage import copies_of, file_names, is_folder, open_stream, was_url
from elastic_ckpt.storage.local import steady


@dataclass(frozen=True)
class WriteReport:
    """The outcome: folder, tensors, files and bytes that were written, notes, and the call that loads it if known."""

    folder: str
    tensors: int
    files: int
    nbytes: int
    seconds: float
    notes: tuple[str, ...]
    to_load: str | None = None


def is_for_checkpoints(folder: Path, source: str) -> bool:
    """Whether a file of ours that names a checkpoint belongs into a folder.

    It does if the folder is new or empty, is the one around the checkpoint ``source``, or has such a file already.
    """
    if not is_folder(str(folder)):
        return True
    resolved = folder.resolve()
    if any(Path(each).resolve().parent == resolved for each in copies_of(source)):
        return True
    names = file_names(str(folder))
    return not names or LATEST in names or LATEST_UNIVERSAL in names


@contextmanager
def output_folder(target: Path, source: str, files: Sequence[SourceFile], latest: str | None = None) -> Iterator[Path]:
    """A new folder to write to, which is renamed to ``target`` at the end, and removed after an error.

    ``source`` is the checkpoint's folder, ``latest`` the name of a file beside ``target`` that shall name it, where
    that :func:`is_for_checkpoints`. Raises :class:`ConfigError` if ``target`` exists or is inside the checkpoint, and
    :class:`ElasticCkptError` if one of its ``files`` has changed meanwhile, or the system refuses something.
    """
    parents = target.resolve().parents
    around = next((each for each in copies_of(source) if Path(each).resolve() in parents), None)
    if was_url(target):
        raise ConfigError("nothing is written to an object store", str(target), "a folder, to be uploaded")
    # asks the system: whether there is room for what is written
    if around or os.path.lexists(target) or target.name in ("", "..", LATEST, LATEST_UNIVERSAL):
        problem = "a checkpoint cannot be written there"
        remedy = "choose another name, or remove it"
        expected = "a new folder outside the checkpoint"
        # asks the system: whether there is room for what is written
        found = f"a folder inside {around}" if around else "it exists" if target.exists() else repr(target.name)
        raise ConfigError(problem, str(target), expected, found, remedy=remedy)
    if not is_for_checkpoints(target.parent, source):
        latest = None
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        folder.mkdir(parents=True)
        with steady():
            for file in files:
                open_stream(file.path).close()  # which pins it
            yield folder
            if latest is not None:
                (folder / latest).write_text(target.name, encoding="utf-8")
            _sync(folder)
        os.rename(folder, target)
        if latest is not None:
            try:
                os.replace(target / latest, target.with_name(latest))
            except OSError:
                os.rename(target, folder)
                raise
        _sync(target.parent, deep=False)
    except (OSError, RuntimeError) as raised:
        error: BaseException | None = raised
        while error is not None and not isinstance(error, OSError):  # libraries raise their own for the system's
            error = error.__cause__ or error.__context__
        if error is None:
            raise
        problem = "the folder could not be written, or the checkpoint could not be read"
        both = "a checkpoint that stays, and a folder to write to", f"{type(error).__name__}: {error.strerror or error}"
        remedy = "check the path, its file system and its permissions, and give the same command again"
        raise ElasticCkptError(problem, str(error.filename or target), *both, remedy=remedy) from raised
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path, deep: bool = True) -> None:
    for each in [path, *(path.rglob("*") if deep else ())]:  # asks the system: what was written
        descriptor = os.open(each, os.O_RDONLY)  # asks the system: what was written
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

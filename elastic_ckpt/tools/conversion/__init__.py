"""Converts a native checkpoint to DeepSpeed's universal format: streaming, parallel, atomic, resumable.

Every file is written under a temporary name, synced and renamed, so that a file under its final name is complete. Once
all are, the folder is renamed, and then a ``latest`` file is written. An interrupted conversion resumes from the
complete files if the source has not changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from elastic_ckpt.config import state_options
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER, plain_name
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal import common_optimizer_state
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.sharding.decide import known_rules
from elastic_ckpt.tools.conversion.contents import (
    OutputFile,
    notes_on,
    parameter_files,
    refuse_unconvertible,
    refuse_without_shapes,
)
from elastic_ckpt.tools.conversion.pickling import save
from elastic_ckpt.tools.logical import LogicalReader
from elastic_ckpt.tools.opened import Opened

#: Incremented whenever the same source is converted to different bytes.
_VERSION = 1
_MANIFEST = "conversion.json"


@dataclass(frozen=True)
class ConversionReport:
    """The outcome: folder, files and bytes written, files kept from an earlier attempt, and notes."""

    folder: str
    files: int
    nbytes: int
    files_kept: int
    seconds: float
    notes: tuple[str, ...]


def convert(
    opened: Opened,
    target: Path,
    threads: int = 4,
    chunk_nbytes: int = 32 << 20,
    progress: bool | None = None,
    restart: bool = False,
) -> ConversionReport:
    """Write a universal checkpoint. Memory: about ``threads * chunk_nbytes`` beside metadata, whatever the size.

    Args:
        opened: the native checkpoint.
        target: folder to create; ``latest_universal`` beside it will name it.
        threads, chunk_nbytes: files written at a time, and bytes of a tensor in memory per thread.
        progress: whether to show a progress bar; ``None``: if standard error is a terminal.
        restart: discard the files of an interrupted conversion of something else.

    Raises:
        ElasticCkptError: the checkpoint cannot be converted exactly, or the target exists. Files written so far
            remain in a folder whose name starts with a dot, from which the next attempt resumes.
    """
    target, source = target.absolute(), Path(opened.found.folder)
    inside = source.resolve() in target.resolve().parents
    if inside or target.name in ("", "..", LATEST, LATEST_UNIVERSAL):
        raise ElasticCkptError(
            "a checkpoint cannot be written there",
            file=str(target),
            expected="a folder with a name of its own, outside of the folder of the tag that is converted",
            found=f"a folder within {source}" if inside else repr(target.name),
            remedy="choose another folder, beside that of the tag for example",
        )
    try:
        return _convert(opened, target, threads, chunk_nbytes, progress, restart)
    except OSError as error:
        raise ElasticCkptError(
            "the conversion could not be read or written",
            file=str(error.filename or target),
            expected="a source that stays, and a folder to write to",
            found=f"{type(error).__name__}: {error.strerror or error}",
            remedy="check the path, its file system and its permissions; the same command goes on from here",
        ) from error


def _convert(
    opened: Opened, target: Path, threads: int, chunk_nbytes: int, progress: bool | None, restart: bool
) -> ConversionReport:
    started = time.monotonic()
    metadata, config = opened.checkpoint.metadata, opened.config
    refuse_unconvertible(metadata)
    load = LoadOptions.of(config)
    reader = LogicalReader(metadata, load)
    rules = known_rules(metadata, metadata.parameters, load.rules)
    read = ReadOptions(threads=1, chunk_nbytes=chunk_nbytes, staging_nbytes=chunk_nbytes)
    files = [*parameter_files(reader, rules, read), *_other_files(opened)]
    facts = (_VERSION, target.name, load.rules, config.replicated_params, config.rename, state_options(config))
    before = fingerprint(metadata.files, *facts)
    with Workplace(target, before, restart) as place:
        notes = metadata.notes + reader.notes + reader.compare_copies(read) + notes_on(metadata, rules)
        # largest first, so that no thread is left with one at the end
        todo = sorted((file for file in files if not place.has(file.path)), key=lambda file: -file.nbytes)
        nbytes = _write_all(place, todo, threads, progress)
        if fingerprint(metadata.files, *facts) != before:
            raise ElasticCkptError(
                "the checkpoint was written to while it was converted",
                file=metadata.source.folder,
                expected="files that stay as they are",
                found="other sizes or times than at the start",
                remedy="convert it again with --restart once nobody writes there",
            )
        place.finish(LATEST_UNIVERSAL)
    return ConversionReport(str(target), len(todo), nbytes, len(files) - len(todo), time.monotonic() - started, notes)


def _other_files(opened: Opened) -> list[OutputFile]:
    """Copies of model-states files, and the optimizer's state beside its parameters."""
    found, trust_pickle = opened.found, opened.config.trust_pickle
    models = [Path(found.path(name)) for name in (*found.files.model.values(), *found.files.model_zero3.values())]
    refuse_without_shapes(open_pickled(str(models[0]), trust_pickle))
    first = found.path(found.files.optimizer[min(found.files.optimizer)])
    common = common_optimizer_state(open_pickled(first, trust_pickle))
    return [
        *(OutputFile(plain_name(path.name), path.stat().st_size, partial(shutil.copyfile, path)) for path in models),
        OutputFile(f"{UNIVERSAL_FOLDER}/{UNIVERSAL_OPTIMIZER}", 0, partial(save, common)),
    ]


def _write_all(place: Workplace, files: list[OutputFile], threads: int, progress: bool | None) -> int:
    """Write all files and return their bytes; the first error is raised once files in progress are done."""
    disable = None if progress is None else not progress
    lock, total = threading.Lock(), sum(file.nbytes for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=disable) as bar:

        def work(file: OutputFile) -> int:
            try:
                nbytes = place.write(file.path, file.write)
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                raise ElasticCkptError(
                    "a file of the conversion could not be written",
                    file=str(place.folder / file.path),
                    expected=f"about {file.nbytes} bytes more on the disk",
                    found=f"{type(error).__name__}: {error.strerror or error}{where}",
                    remedy="make room, or repair it; the same command goes on from here",
                ) from error
            with lock:
                bar.update(file.nbytes)
            return nbytes

        # after an error or Ctrl-C, map cancels pending files
        with ThreadPoolExecutor(threads, thread_name_prefix="elastic_ckpt") as pool:
            return sum(pool.map(work, files))


class Workplace:
    """The unfinished folder of one conversion, locked while in use; see :func:`fingerprint` and :func:`convert`.

    Raises :class:`ElasticCkptError` if ``target`` exists, another conversion is in progress, or the folder has files
    of a conversion of something else and ``restart`` is not set.
    """

    def __init__(self, target: Path, fingerprint: str, restart: bool) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}.partial")
        mine = {"fingerprint": fingerprint}
        # true if an earlier attempt ended after the folder was renamed: only :meth:`finish` is left to do
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
            except (BlockingIOError, FileNotFoundError) as error:  # locked, or renamed just now
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
        """Keep the files of an earlier attempt at the same conversion, or clear the folder."""
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
        """Whether a file is complete."""
        return (self.folder / path).is_file()

    def write(self, path: str, write: Callable[[Path], object]) -> int:
        """Write a file through a temporary path and return its size in bytes. Thread-safe."""
        final = self.folder / path
        final.parent.mkdir(parents=True, exist_ok=True)
        _write_durably(final, write)
        return final.stat().st_size

    def finish(self, latest: str) -> None:
        """Rename the folder to its final name, and write the ``latest`` file beside it.

        The manifest is removed last: while it exists, the next attempt finishes these steps.
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
    """A digest that changes with any source file's path, size or mtime, and with any option."""
    facts = [(file.path, file.nbytes, os.stat(file.path).st_mtime_ns) for file in files]
    return hashlib.sha256(repr((facts, options)).encode()).hexdigest()


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

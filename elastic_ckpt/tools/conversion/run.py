"""Converts a native checkpoint to DeepSpeed's universal format: streaming, parallel, atomic, resumable."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from elastic_ckpt.config import state_options
from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal_files import common_optimizer_state
from elastic_ckpt.io.reader import ReadOptions
from elastic_ckpt.sharding.offline import known_rules
from elastic_ckpt.tools.conversion.archive import write_tensor_file
from elastic_ckpt.tools.conversion.contents import (
    ScalarFile,
    TensorFile,
    notes_on,
    parameter_files,
    refuse_unconvertible,
    refuse_without_shapes,
)
from elastic_ckpt.tools.conversion.workplace import Workplace, fingerprint
from elastic_ckpt.tools.logical import LogicalReader
from elastic_ckpt.tools.opened import Opened, load_options

_MIB = 1 << 20
#: Changes whenever other bytes are written from the same source.
_VERSION = 1


@dataclass(frozen=True)
class ConversionOptions:
    """How to convert.

    Attributes:
        threads: files that are written at a time.
        chunk_nbytes: largest piece of a tensor in memory, for each thread.
        progress: whether to draw a progress bar; ``None``: if standard error is a terminal.
        restart: throw away what an interrupted conversion of something else left.
    """

    threads: int = 4
    chunk_nbytes: int = 32 * _MIB
    progress: bool | None = None
    restart: bool = False


@dataclass(frozen=True)
class ConversionReport:
    """What was done: the folder, files and bytes written, files that an earlier attempt had completed, and notes."""

    folder: str
    files: int
    nbytes: int
    files_kept: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Task:
    """One file: where it goes, about how big it is, and what writes it."""

    path: str
    nbytes: int
    write: Callable[[Path], object]


def convert(opened: Opened, target: Path, options: ConversionOptions) -> ConversionReport:
    """Write a universal checkpoint. Memory: about ``threads * chunk_nbytes`` beside metadata, whatever the size.

    Args:
        opened: the native checkpoint.
        target: folder to make; ``latest_universal`` beside it will name it.
        options: how.

    Raises:
        ElasticCkptError: the checkpoint cannot be converted exactly, or the target is taken. What was written so far
            stays in a folder whose name starts with a dot, and the next attempt goes on from there.
    """
    target = target.absolute()
    _check_target(target, Path(opened.found.folder))
    try:
        return _convert(opened, target, options)
    except OSError as error:
        raise ElasticCkptError(
            "the conversion could not be read or written",
            file=str(error.filename or target),
            expected="a source that stays, and a folder to write to",
            found=f"{type(error).__name__}: {error.strerror or error}",
            remedy="check the path, its file system and its permissions; the same command goes on from here",
        ) from error


def _check_target(target: Path, source: Path) -> None:
    """A name of its own, outside of the checkpoint that is converted."""
    inside = source.resolve() in target.resolve().parents
    if inside or target.name in ("", "..", LATEST, LATEST_UNIVERSAL):
        raise ElasticCkptError(
            "a checkpoint cannot be written there",
            file=str(target),
            expected="a folder with a name of its own, outside of the folder of the tag that is converted",
            found=f"a folder within {source}" if inside else repr(target.name),
            remedy="choose another folder, beside that of the tag for example",
        )


def _convert(opened: Opened, target: Path, options: ConversionOptions) -> ConversionReport:
    started = time.monotonic()
    metadata = opened.checkpoint.metadata
    refuse_unconvertible(metadata)
    load = load_options(opened.config)
    reader = LogicalReader(metadata, load)
    rules = known_rules(metadata, metadata.parameters, load.rules)
    read = ReadOptions(threads=1, chunk_nbytes=options.chunk_nbytes, staging_nbytes=options.chunk_nbytes)
    tasks = _tasks(opened, reader, rules, read)
    facts = (_VERSION, target.name, load.rules, load.replicated, load.rename, state_options(opened.config))
    before = fingerprint(metadata.files, *facts)
    with Workplace(target, before, options.restart) as place:
        notes = metadata.notes + reader.notes + reader.compare_copies(read) + notes_on(metadata, rules)
        todo = [task for task in tasks if not place.has(task.path)]
        nbytes = _run(place, todo, options)
        if fingerprint(metadata.files, *facts) != before:
            raise _source_changed(metadata.source.folder)
        place.finish(LATEST_UNIVERSAL)
    kept = len(tasks) - len(todo)
    return ConversionReport(str(target), len(todo), nbytes, kept, time.monotonic() - started, notes)


def _source_changed(folder: str) -> ElasticCkptError:
    return ElasticCkptError(
        "the checkpoint was written to while it was converted",
        file=folder,
        expected="files that stay as they are",
        found="other sizes or times than at the start",
        remedy="convert it again with --restart once nobody writes there",
    )


def _tasks(opened: Opened, reader: LogicalReader, rules: Any, read: ReadOptions) -> list[_Task]:
    """All files, the biggest first, so that no thread is left alone with one of these at the end."""
    found = opened.found
    tasks = []
    for file in parameter_files(reader, rules):
        if isinstance(file, TensorFile):
            tasks.append(_tensor_task(reader, file, read))
        else:
            tasks.append(_Task(file.path, 0, _saver(file)))
    models = [*found.files.model.values(), *found.files.model_zero3.values()]
    for name in models:
        path = found.path(name)
        nbytes = Path(path).stat().st_size
        tasks.append(_Task(name, nbytes, partial(shutil.copyfile, path)))
    refuse_without_shapes(open_pickled(found.path(models[0]), opened.config.trust_pickle))
    first = found.path(found.files.optimizer[min(found.files.optimizer)])
    common = common_optimizer_state(open_pickled(first, opened.config.trust_pickle))
    tasks.append(_Task(f"{UNIVERSAL_FOLDER}/{UNIVERSAL_OPTIMIZER}", 0, lambda part: torch.save(common, part)))
    return sorted(tasks, key=lambda task: -task.nbytes)


def _tensor_task(reader: LogicalReader, file: TensorFile, read: ReadOptions) -> _Task:
    whole = file.whole

    def write(part: Path) -> None:
        write_tensor_file(
            str(part),
            lambda tensor: {**file.beside, "param": tensor},
            whole.shape,
            whole.dtype,
            lambda wanted, out: reader.read(whole, wanted, out, read),
            _scratch(read.chunk_nbytes),
        )

    return _Task(file.path, whole.numel * ITEMSIZE[whole.dtype], write)


_of_thread = threading.local()


def _scratch(nbytes: int) -> torch.Tensor:
    """This thread's memory for one chunk."""
    held: torch.Tensor | None = getattr(_of_thread, "scratch", None)
    if held is None or held.numel() != nbytes:
        held = _of_thread.scratch = torch.empty(nbytes, dtype=torch.uint8)
    return held


def _saver(file: ScalarFile) -> Callable[[Path], object]:
    return lambda part: torch.save(file.value, part)


def _run(place: Workplace, tasks: list[_Task], options: ConversionOptions) -> int:
    """Write all files; bytes written. The first error ends it, once the files under way are done."""
    disable = None if options.progress is None else not options.progress
    lock = threading.Lock()
    total = sum(task.nbytes for task in tasks)
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=disable) as bar:

        def work(task: _Task) -> int:
            try:
                nbytes = place.write(task.path, task.write)
            except OSError as error:
                raise _cannot_write(place, task, error) from error
            with lock:
                bar.update(task.nbytes)
            return nbytes

        pool = ThreadPoolExecutor(options.threads, thread_name_prefix="elastic_ckpt")
        try:
            return sum(pool.map(work, tasks))
        finally:  # after an error too, or Ctrl-C: what has not begun is not begun
            pool.shutdown(cancel_futures=True)


def _cannot_write(place: Workplace, task: _Task, error: OSError) -> ElasticCkptError:
    return ElasticCkptError(
        "a file of the conversion could not be written",
        file=str(place.folder / task.path),
        expected=f"about {task.nbytes} bytes more on the disk",
        found=f"{type(error).__name__}: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}",
        remedy="make room, or mend it; the same command goes on from here",
    )

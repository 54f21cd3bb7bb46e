"""Converts a native checkpoint to DeepSpeed's universal format: streaming, parallel, atomic, resumable."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from elastic_ckpt.config import state_options
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal_files import common_optimizer_state
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.sharding.offline import known_rules
from elastic_ckpt.tools.conversion.contents import (
    OutputFile,
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
        chunk_nbytes: largest chunk of a tensor in memory, for each thread.
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
        return _convert(opened, target, options)
    except OSError as error:
        raise ElasticCkptError(
            "the conversion could not be read or written",
            file=str(error.filename or target),
            expected="a source that stays, and a folder to write to",
            found=f"{type(error).__name__}: {error.strerror or error}",
            remedy="check the path, its file system and its permissions; the same command goes on from here",
        ) from error


def _convert(opened: Opened, target: Path, options: ConversionOptions) -> ConversionReport:
    started = time.monotonic()
    metadata, config = opened.checkpoint.metadata, opened.config
    refuse_unconvertible(metadata)
    load = load_options(config)
    reader = LogicalReader(metadata, load)
    rules = known_rules(metadata, metadata.parameters, load.rules)
    read = ReadOptions(threads=1, chunk_nbytes=options.chunk_nbytes, staging_nbytes=options.chunk_nbytes)
    files = [*parameter_files(reader, rules, read), *_other_files(opened)]
    facts = (_VERSION, target.name, load.rules, load.replicated, load.rename, state_options(config))
    before = fingerprint(metadata.files, *facts)
    with Workplace(target, before, options.restart) as place:
        notes = metadata.notes + reader.notes + reader.compare_copies(read) + notes_on(metadata, rules)
        # the biggest first, so that no thread is left alone with one of these at the end
        todo = sorted((file for file in files if not place.has(file.path)), key=lambda file: -file.nbytes)
        nbytes = _write_all(place, todo, options)
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
    """The copies of model-states files, and what of the optimizer belongs to no parameter."""
    found, trust_pickle = opened.found, opened.config.trust_pickle
    models = [Path(found.path(name)) for name in (*found.files.model.values(), *found.files.model_zero3.values())]
    refuse_without_shapes(open_pickled(str(models[0]), trust_pickle))
    first = found.path(found.files.optimizer[min(found.files.optimizer)])
    common = common_optimizer_state(open_pickled(first, trust_pickle))
    return [
        *(OutputFile(path.name, path.stat().st_size, partial(shutil.copyfile, path)) for path in models),
        OutputFile(f"{UNIVERSAL_FOLDER}/{UNIVERSAL_OPTIMIZER}", 0, partial(torch.save, common)),
    ]


def _write_all(place: Workplace, files: list[OutputFile], options: ConversionOptions) -> int:
    """Write all files; bytes written. The first error ends it, once the files under way are done."""
    disable = None if options.progress is None else not options.progress
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

        pool = ThreadPoolExecutor(options.threads, thread_name_prefix="elastic_ckpt")
        try:
            return sum(pool.map(work, files))
        finally:  # after an error too, or Ctrl-C: what has not begun is not begun
            pool.shutdown(cancel_futures=True)

"""Converts a native checkpoint to DeepSpeed's universal format: streaming, parallel, atomic, resumable."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from elastic_ckpt.config import state_options
from elastic_ckpt.core.experts import with_stacks
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.detect import LATEST_UNIVERSAL
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER, plain_name
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal_files import common_optimizer_state
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import progress_bar
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
from elastic_ckpt.tools.workplace import CONVERSION, Workplace, WriteReport, naming_os_errors, refuse_target

#: Incremented whenever the same source is converted to different bytes.
_VERSION = 1


def convert(
    opened: Opened,
    target: Path,
    threads: int = 4,
    chunk_nbytes: int = 32 << 20,
    progress: bool | None = None,
    restart: bool = False,
) -> WriteReport:
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
    target, started = target.absolute(), time.monotonic()
    refuse_target(CONVERSION, target, Path(opened.found.folder))
    metadata, config = opened.metadata, opened.config
    refuse_unconvertible(metadata)
    metadata = with_stacks(metadata)
    load = LoadOptions.of(config)
    reader = LogicalReader(metadata, load)
    rules = known_rules(metadata, metadata.parameters, load.rules)
    read = ReadOptions(threads=1, chunk_nbytes=chunk_nbytes, staging_nbytes=chunk_nbytes)
    facts = (_VERSION, target.name, load.rules, config.replicated_params, config.rename, state_options(config))
    with naming_os_errors(CONVERSION, target):
        tensors = list(parameter_files(reader, rules, read))
        files = [*tensors, *_other_files(opened)]
        with Workplace(CONVERSION, target, metadata.files, facts, restart) as place:
            notes = (*metadata.notes, *reader.notes, *reader.compare_copies(read), *notes_on(metadata, rules))
            # largest first, so that no thread is left with one at the end
            todo = sorted((file for file in files if not place.has(file.path)), key=lambda file: -file.nbytes)
            nbytes = _write_all(place, todo, threads, progress)
            place.finish(LATEST_UNIVERSAL)
    return WriteReport(
        folder=str(target),
        tensors=len(tensors),
        files=len(todo),
        nbytes=nbytes,
        files_kept=len(files) - len(todo),
        seconds=time.monotonic() - started,
        notes=notes,
    )


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

    def work(file: OutputFile) -> int:
        try:
            return place.write(file.path, file.write)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise ElasticCkptError(
                "a file of the conversion could not be written",
                file=str(place.folder / file.path),
                expected=f"about {file.nbytes} bytes more on the disk",
                found=f"{type(error).__name__}: {error.strerror or error}{where}",
                remedy="make room, or repair it; the same command goes on from here",
            ) from error

    written = 0
    with (
        progress_bar("converting", sum(file.nbytes for file in files), progress) as bar,
        ThreadPoolExecutor(threads, thread_name_prefix="elastic_ckpt") as pool,
    ):
        # after an error or Ctrl-C, map cancels pending files
        for file, nbytes in zip(files, pool.map(work, files), strict=True):
            bar.update(file.nbytes)
            written += nbytes
    return written

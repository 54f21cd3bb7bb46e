"""Exports a checkpoint's weights as safetensors files of Hugging Face's layout: streaming, atomic, resumable."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, listed
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.export.shards import (
    INDEX,
    Dtype,
    Exported,
    Shard,
    checked_dtype,
    index_of,
    nbytes_of,
    selected,
    shards_of,
    to_export,
)
from elastic_ckpt.tools.export.writing import ShardWriter
from elastic_ckpt.tools.logical import WEIGHTS, LogicalReader, refuse_without_masters
from elastic_ckpt.tools.opened import config_of, open_folder
from elastic_ckpt.tools.workplace import (
    EXPORT,
    Workplace,
    WriteReport,
    naming_os_errors,
    partial_folder,
    refuse_target,
)

#: Incremented whenever the same source is exported to different bytes.
_VERSION = 1
_CHUNK = 16 << 20
_READ = ReadOptions(threads=1, chunk_nbytes=_CHUNK, staging_nbytes=_CHUNK)
#: Of the file system: room for its own metadata, headers and the index.
_SPARE = 16 << 20


def export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: Dtype | None = None,
    max_shard_size: str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int = 4,
    config: ElasticConfig | None = None,
    progress: bool | None = None,
    restart: bool = False,
) -> WriteReport:
    """Write a checkpoint's parameters and buffers as consolidated safetensors files. No engine and no GPU is needed.

    Parameters are fp32 master weights; frozen parameters and buffers are as the module had them. Of tied parameters,
    one is written, and the others are named in the file's metadata. Memory: about 64 MiB per job, whatever the size.

    Args:
        folder, tag: folder with a ``latest`` file and the tag in it, or the folder of one tag.
        out: folder to create.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``: of all parameters with floating-point values, frozen ones too;
            ``None``: masters and frozen parameters as they were saved.
        max_shard_size: of one file; ``"5GB"``, ``"2GiB"``.
        include, exclude: regular expressions, searched for in names.
        jobs: threads that read, convert and write.
        config: options of the load; rules of tensor parallelism, for example.
        progress: whether to show a progress bar; ``None``: if standard error is a terminal.
        restart: discard the files of an interrupted export of something else.

    Raises:
        ConfigError: an argument is wrong, or a pattern matches nothing.
        ElasticCkptError: the checkpoint cannot be read or exported exactly, the disk is too small, or ``out`` exists.
            Files written so far remain in a folder whose name starts with a dot, from which the next attempt resumes.
    """
    started = time.monotonic()
    limit, torch_dtype, options = nbytes_of(max_shard_size), checked_dtype(dtype), config or config_of(None)
    opened = open_folder(os.fspath(folder), tag, options, with_states=False)
    target, metadata = Path(out).absolute(), _weights_of(opened.checkpoint.metadata)
    refuse_target(EXPORT, target, Path(opened.found.folder))
    load = LoadOptions.of(options)
    reader = LogicalReader(metadata, load)
    tensors = to_export(selected(metadata, reader.tensors(), include, exclude), torch_dtype)
    shards = shards_of(tensors, metadata.aliases, limit)
    facts = (_VERSION, shards, load.rules, options.replicated_params, options.rename)
    with naming_os_errors(EXPORT, target):
        _refuse_full_disk(target, sum(shard.nbytes for shard in shards))
        notes = (*metadata.notes, *metadata.warnings, *reader.notes, *reader.compare_copies(_READ))
        with Workplace(EXPORT, target, metadata.files, facts, restart) as place:
            kept = sum(place.has(shard.file) for shard in shards)
            nbytes = _write_all(place, reader, shards, max(jobs, 1), progress)
            place.finish()
    return WriteReport(
        folder=str(target),
        tensors=len(tensors),
        files=len(shards) - kept,
        nbytes=nbytes,
        files_kept=kept,
        seconds=time.monotonic() - started,
        notes=(*notes, *_notes(metadata, tensors)),
    )


def _weights_of(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """The metadata without optimizer states. Raises :class:`DamagedError` if parameters have no master weights."""
    refuse_without_masters(metadata)
    return replace(
        metadata,
        tensors={key: tensor for key, tensor in metadata.tensors.items() if key[1] in WEIGHTS},
        replicas={key: replicas for key, replicas in metadata.replicas.items() if key[1] in WEIGHTS},
    )


def _refuse_full_disk(target: Path, nbytes: int) -> None:
    parent = next(folder for folder in target.parents if folder.exists())
    reused = sum(path.stat().st_size for path in partial_folder(target).glob("*.safetensors*"))
    free = shutil.disk_usage(parent).free + reused
    if free < nbytes + _SPARE:
        raise ElasticCkptError(
            "the disk has no room for this export",
            file=str(parent),
            expected=f"{nbytes + _SPARE} bytes",
            found=f"{free} bytes free",
            remedy="make room, export to another disk, or export fewer bytes with --dtype bf16 or --exclude",
        )


def _write_all(
    place: Workplace, reader: LogicalReader, shards: Sequence[Shard], jobs: int, progress: bool | None
) -> int:
    """Write the files that are not there yet, and the index; returns the bytes of the former."""
    todo = [shard for shard in shards if not place.has(shard.file)]
    disable = None if progress is None else not progress
    total = sum(shard.nbytes for shard in todo)
    with tqdm(total=total, unit="B", unit_scale=True, desc="exporting", disable=disable) as bar:
        writer = ShardWriter(reader, _READ, jobs, bar.update)
        nbytes = sum(place.write(shard.file, partial(writer.write, shard)) for shard in todo)
    if len(shards) > 1:
        place.write(INDEX, lambda path: path.write_text(index_of(shards), encoding="utf-8"))
    return nbytes


def _notes(metadata: CheckpointMetadata, tensors: Sequence[Exported]) -> Iterator[str]:
    source = metadata.source
    if not metadata.parameters:
        dtypes = listed({tensor.whole.dtype for tensor in tensors if tensor.whole.key != BUFFER})
        yield f"no master weights could be named: parameters are the module's own weights, saved in {dtypes}"
    elif not source.frozen_recorded and not metadata.names(FROZEN) and source.zero_stage >= 2:
        yield "frozen parameters, if the model has any, were left out of the save (exclude_frozen_parameters=True)"
    if not source.buffers_recorded:
        yield "the checkpoint holds no buffers"
    exported = {tensor.entry.name for tensor in tensors}
    tied = [f"{alias} = {name}" for alias, name in metadata.aliases.items() if name in exported]
    if tied:
        yield f"tied parameters are written once: {listed(tied)}"

"""Exports a checkpoint's weights as files of Hugging Face's layout: streaming, atomic, resumable."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.metadata import BUFFER, FROZEN, WEIGHTS, CheckpointMetadata, converts_exactly
from elastic_ckpt.errors import ElasticCkptError, MismatchError, listed
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import progress_bar
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.export.config_files import config_files, config_notes
from elastic_ckpt.tools.export.selection import (
    Dtype,
    checked_dtype,
    of_adapter,
    optimizer_facts,
    selected,
    states_of,
    to_export,
)
from elastic_ckpt.tools.export.shards import (
    OPTIMIZER,
    Exported,
    Format,
    Shard,
    checked_format,
    index_of,
    nbytes_of,
    shards_of,
)
from elastic_ckpt.tools.export.writing import ShardWriter
from elastic_ckpt.tools.logical import LogicalReader, refuse_without_masters
from elastic_ckpt.tools.opened import config_of, open_folder
from elastic_ckpt.tools.workplace import EXPORT, Workplace, WriteReport, naming_os_errors, partial_folder, refuse_target

#: Incremented whenever the same source is exported to different bytes.
_VERSION = 1
_CHUNK = 16 << 20
_READ = ReadOptions(threads=1, chunk_nbytes=_CHUNK, staging_nbytes=_CHUNK)
#: More jobs than this read smaller chunks, so that all together take no more memory than these.
_JOBS = 8
#: Of the file system: room for its own metadata, headers and the index.
_SPARE = 16 << 20


def export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    format: Format = "safetensors",
    dtype: Dtype | None = None,
    max_shard_size: str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: str | None = None,
    optimizer: bool = False,
    with_config: str | os.PathLike[str] | None = None,
    jobs: int = 4,
    config: ElasticConfig | None = None,
    progress: bool | None = None,
    restart: bool = False,
) -> WriteReport:
    """Write a checkpoint's parameters and buffers as consolidated files of Hugging Face's layout. No engine, no GPU.

    Parameters are fp32 master weights; frozen parameters and buffers are as the module had them. Of tied parameters,
    one is written, and the others are named in the file's metadata. Memory: below 1 GiB, whatever the size.

    Args:
        folder: folder with a ``latest`` file, or the folder of one tag.
        tag: which checkpoint of the folder; ``None``: the latest.
        out: folder to create.
        format: ``"safetensors"``, or ``"torch"`` for ``pytorch_model.bin``, in which tied names share a tensor.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``: of all parameters with floating-point values, frozen ones too;
            ``None``: masters and frozen parameters as they were saved.
        max_shard_size: of one file; ``"5GB"``, ``"2GiB"``.
        include: regular expressions, searched for in names; what none matches is left out.
        exclude: regular expressions; what one matches is left out.
        adapter: a PEFT adapter (``"default"``): it alone is written, in the one file that PEFT loads.
        optimizer: whether to write the optimizer states of the exported parameters too, as ``optimizer.safetensors``:
            state ``exp_avg`` of ``w`` is ``exp_avg.w``; scalar states and hyperparameters are metadata.
        with_config: folder whose model config, generation config and tokenizer files are copied beside the weights.
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
    naming = checked_format(format, adapter)
    copies = () if with_config is None else config_files(with_config)
    try:
        opened = open_folder(os.fspath(folder), tag, options, with_states=optimizer)
    except MismatchError as error:  # only live param groups could name the states
        error.remedy = f"export without --optimizer: {error.remedy}" if optimizer else error.remedy
        raise
    target, metadata = Path(out).absolute(), opened.metadata
    refuse_target(EXPORT, target, Path(opened.found.folder))
    refuse_without_masters(metadata)
    if not optimizer:
        metadata = _weights_of(metadata)
    load = LoadOptions.of(options)
    reader = LogicalReader(metadata, load)
    wholes = list(reader.tensors())
    tells_buffers = opened.found.format not in ("dcp", "safetensors")
    kept_keys = (BUFFER,) if tells_buffers or not metadata.parameters else (BUFFER, FROZEN)
    weights = to_export(selected(metadata, wholes, include, exclude), torch_dtype, kept_keys)
    if adapter is not None:
        weights, limit = of_adapter(weights, adapter, opened.found.folder), sys.maxsize
    sets = {naming: shards_of(weights, metadata.aliases, naming, limit)}
    if optimizer:
        names = {tensor.whole.name for tensor in weights}
        states = states_of(metadata, wholes, names)
        sets[OPTIMIZER] = shards_of(states, {}, OPTIMIZER, limit, **optimizer_facts(metadata, names))
    shards = [shard for of_set in sets.values() for shard in of_set]
    facts = (_VERSION, sets, copies, load.rules, options.replicated_params, state_options(options))
    with naming_os_errors(EXPORT, target):
        _refuse_full_disk(target, sum(shard.nbytes for shard in shards) + sum(file.nbytes for file in copies))
        notes = (*metadata.notes, *metadata.warnings, *reader.notes, *reader.compare_copies(_READ))
        notes += (*_notes(metadata, weights), *config_notes(copies, weights))
        notes += () if tells_buffers or torch_dtype is None else tuple(_notes_on_dtype(weights, torch_dtype, kept_keys))
        with Workplace(EXPORT, target, metadata.files, facts, restart) as place:
            kept = sum(place.has(shard.file) for shard in shards)
            nbytes = _write_all(place, reader, shards, max(jobs, 1), progress)
            for naming, of_set in sets.items():
                if len(of_set) > 1:
                    place.write(naming.index, partial(Path.write_text, data=index_of(of_set), encoding="utf-8"))
            for file in copies:
                place.write(file.name, file.copy)
            place.finish()
    return WriteReport(
        folder=str(target),
        tensors=sum(len(shard.tensors) for shard in shards),
        files=len(shards) - kept,
        nbytes=nbytes,
        files_kept=kept,
        seconds=time.monotonic() - started,
        notes=notes,
    )


def _weights_of(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """The metadata without optimizer states."""
    return replace(
        metadata,
        tensors={key: tensor for key, tensor in metadata.tensors.items() if key[1] in WEIGHTS},
        replicas={key: replicas for key, replicas in metadata.replicas.items() if key[1] in WEIGHTS},
    )


def _refuse_full_disk(target: Path, nbytes: int) -> None:
    parent = next(folder for folder in target.parents if folder.exists())
    reused = sum(512 * path.stat().st_blocks for path in partial_folder(target).glob("*"))
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
    """Write the files that are not there yet; returns their bytes."""
    todo = [shard for shard in shards if not place.has(shard.file)]
    with progress_bar("exporting", sum(shard.nbytes for shard in todo), progress) as bar:
        parts = -(-jobs // _JOBS)
        chunk, staging = _READ.chunk_nbytes // parts, _READ.staging_nbytes // parts
        writer = ShardWriter(reader, replace(_READ, chunk_nbytes=chunk, staging_nbytes=staging), jobs, bar.update)
        return sum(place.write(shard.file, partial(writer.write, shard)) for shard in todo)


def _notes(metadata: CheckpointMetadata, tensors: Sequence[Exported]) -> Iterator[str]:
    source = metadata.source
    if not metadata.parameters:
        dtypes = listed({tensor.whole.dtype for tensor in tensors if tensor.whole.key != BUFFER})
        yield f"no master weights could be named: parameters are the module's own weights, saved in {dtypes}"
    elif not source.frozen_recorded and not metadata.names(FROZEN) and source.zero_stage >= 2:
        yield "frozen parameters, if the model has any, were left out of the save (exclude_frozen_parameters=True)"
    if not source.buffers_recorded:
        yield "the checkpoint holds no buffers"
    pairs = {(tensor.whole.dtype, tensor.entry.dtype) for tensor in tensors}
    yield from (f"{saved} is rounded to {new}" for saved, new in sorted(pairs) if not converts_exactly(saved, new))
    exported = {tensor.entry.name for tensor in tensors}
    tied = [f"{alias} = {name}" for alias, name in metadata.aliases.items() if name in exported]
    if tied:
        yield f"tied parameters are written once: {listed(tied)}"
    coded = {key for (_, key), tensor in metadata.tensors.items() if tensor.is_quantized}
    if coded:
        yield f"8-bit optimizer states are written dequantized, as fp32: {listed(coded)}"
    shared = {state.key for saved in metadata.parameters.values() for state in saved.replicated}
    if shared and metadata.state_keys:
        yield f"optimizer states of whole partitions belong to no parameter, and are left out: {listed(shared)}"


def _notes_on_dtype(tensors: Sequence[Exported], dtype: str, kept: Sequence[str]) -> Iterator[str]:
    """Of a checkpoint that does not record which tensors are buffers."""
    same = [tensor.entry.name for tensor in tensors if tensor.whole.key in kept and tensor.whole.dtype != dtype]
    if same:
        yield f"the checkpoint does not tell buffers from frozen parameters, which keep their dtype: {listed(same)}"
    elif FROZEN not in kept:
        yield f"the checkpoint does not tell buffers from parameters: all are written in {dtype}, buffers too"

"""Streams tensors into a safetensors or ``torch.save`` file: read, converted and written chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from isal import isal_zlib

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import ITEMSIZE, converts_exactly
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.tools.conversion.torch_file import save_without_data, write_checksums
from elastic_ckpt.tools.export.safetensors import layout
from elastic_ckpt.tools.export.shards import Exported, Shard
from elastic_ckpt.tools.logical import LogicalReader
from elastic_ckpt.tools.verification.archive import Record
from elastic_ckpt.tools.workplace import scratch


@dataclass(frozen=True)
class ShardWriter:
    """Writes files with ``jobs`` threads.

    Attributes:
        reader, options: reads the tensors; ``options.chunk_nbytes`` of a tensor are in memory per thread.
        jobs: number of threads.
        advance: called with the number of bytes that were written.
    """

    reader: LogicalReader
    options: ReadOptions
    jobs: int
    advance: Callable[[int], object]

    def write(self, shard: Shard, path: Path) -> None:
        """Write a file; overwrites. Raises :class:`MismatchError` if a value is too large for the file's dtype."""
        entries = [tensor.entry for tensor in shard.tensors]
        records: dict[str, Record] = {}
        if shard.is_safetensors:
            prefix, starts = layout(entries, shard.metadata)
            path.write_bytes(prefix)
            nbytes = len(prefix) + shard.nbytes
        else:
            records = _save_state_dict(shard, path)
            starts, nbytes = {name: record.offset for name, record in records.items()}, path.stat().st_size
        with open(path, "r+b") as stream:
            descriptor = stream.fileno()
            os.posix_fallocate(descriptor, 0, nbytes)  # reports a full disk at once

            def work(chunk: tuple[Exported, FlatRange]) -> tuple[str, int, int]:
                return self._copy(*chunk, descriptor, starts[chunk[0].entry.name])

            chunks = [(tensor, wanted) for tensor in shard.tensors for wanted in self._chunks(tensor)]
            checksums: dict[str, int] = {}
            # left before the file is closed: no thread writes to a descriptor that is another file's by then
            with ThreadPoolExecutor(self.jobs, thread_name_prefix="elastic_ckpt") as pool:
                for name, written, crc in pool.map(work, chunks):
                    checksums[name] = isal_zlib.crc32_combine(checksums.get(name, 0), crc, written)
                    self.advance(written)
            if not shard.is_safetensors:
                write_checksums(stream, {records[name]: crc for name, crc in checksums.items()})

    def _chunks(self, tensor: Exported) -> list[FlatRange]:
        numel = tensor.entry.numel
        step = self.options.chunk_nbytes // max(ITEMSIZE[tensor.whole.dtype], ITEMSIZE[tensor.entry.dtype])
        return [FlatRange(start, min(start + step, numel)) for start in range(0, numel, step)]

    def _copy(self, tensor: Exported, wanted: FlatRange, descriptor: int, start: int) -> tuple[str, int, int]:
        """Copy a range of a tensor; returns the tensor's name, and the number of bytes and their CRC32."""
        whole, entry = tensor.whole, tensor.entry
        values = scratch(self.options.chunk_nbytes).view(getattr(torch, whole.dtype))[: wanted.numel]
        self.reader.read(whole, wanted, values, self.options)
        raw = converted(values, entry.dtype, entry.name).view(torch.uint8).numpy().data
        position = start + wanted.start * ITEMSIZE[entry.dtype]
        done = 0
        while done < len(raw):
            done += os.pwrite(descriptor, raw[done:], position + done)
        return entry.name, len(raw), isal_zlib.crc32(raw)


def _save_state_dict(shard: Shard, path: Path) -> dict[str, Record]:
    """``torch.save`` the state dict of a file, without its tensors' bytes; tied names share a tensor."""
    names = [tensor.entry.name for tensor in shard.tensors]

    def state_dict(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(zip(names, tensors, strict=True))
        return found | {alias: found[name] for alias, name in shard.aliases.items()}

    shapes = [(tensor.entry.shape, tensor.entry.dtype) for tensor in shard.tensors]
    return dict(zip(names, save_without_data(str(path), state_dict, shapes), strict=True))


def converted(values: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """Values in another dtype, rounded to nearest. Raises :class:`MismatchError` if a finite one becomes infinite."""
    result = values.to(getattr(torch, dtype))
    saved = str(values.dtype).removeprefix("torch.")
    if converts_exactly(saved, dtype) or not bool(result.isinf().any()):
        return result
    lost = values[result.isinf() & values.isfinite()]
    if lost.numel():
        raise MismatchError(
            f"values of this parameter are too large for {dtype}",
            parameter=name,
            expected=f"magnitudes up to {torch.finfo(result.dtype).max:g}",
            found=f"{lost.double().abs().max().item():g}, saved in {saved}",
            remedy="export it as fp32",
        )
    return result

"""Compares what all ranks read with the checksums in the checkpoint's files.

Each rank sums up the bytes that it reads (:mod:`elastic_ckpt.io.reader`); the sums of all ranks travel with the
message that ends every load. Of records that were not read once as a whole, ranks tell each other which bytes they
read: one of them reads again, within limits, what nobody read, such as padding, and what two ranks read, such as
replicated parameters under tensor parallelism, which the XOR of all sums has lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from elastic_ckpt import distributed
from elastic_ckpt.core.checksums import PartialSum
from elastic_ckpt.core.chunks import QuantizedChunks
from elastic_ckpt.core.metadata import ITEMSIZE, CheckpointMetadata, SourceFile
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import DamagedError, Remedy
from elastic_ckpt.io.coalesce import SUMMED_AT_ONCE_NBYTES, ReadOptions, parts_of, scales_of
from elastic_ckpt.io.reader import ReadSums
from elastic_ckpt.load.metadata import owner_of
from elastic_ckpt.report import Verified
from elastic_ckpt.storage import open_stream

#: A record: index of its file, and its number there.
Key = tuple[int, int]
#: Byte ranges of one record, one a row: offset and size of the first, distance to the next, and their number.
Ranges = NDArray[np.int64]
#: Of what all ranks read, at most this part is read again for checksums alone.
_MOST_AGAIN = 0.01
#: In small jobs, as many bytes a rank.
_LEAST_NBYTES = 4 << 20
#: Rows of strided reads that are listed one by one at a time, which takes some 64 bytes for each.
_EXPANDED_AT_ONCE = 1 << 18
#: What one rank has read: sums by record, and all bytes, of a record or not.
RankSums = tuple[Mapping[Key, PartialSum], int]


def verify_reads(
    metadata: CheckpointMetadata, everybody: Sequence[RankSums], plan: ReadPlan, options: ReadOptions
) -> Verified:
    """Compare what all ranks read with the files' checksums. Collective if some records were not read once as a whole.

    ``everybody`` has the sums of every rank; ``plan`` and ``options`` say what this rank read, and how. Raises the same
    :class:`DamagedError` on every rank if a checksum differs.
    """
    files = metadata.files
    read_nbytes = sum(nbytes for _, nbytes in everybody)
    totals: dict[Key, PartialSum] = {}
    for sums, _ in everybody:
        for key, partial_sum in sums.items():
            totals[key] = totals.get(key, PartialSum()) | partial_sum
    summed_nbytes = sum(total.nbytes for total in totals.values())
    incomplete = sorted(key for key, total in totals.items() if not total.tiles(_record(files, key)[1]))
    if incomplete:
        ranges = distributed.all_gather("list what was read", lambda: ranges_read(plan, options, set(incomplete)))
        owners = [owner_of(number, files[file].path) for number, (file, _) in enumerate(incomplete)]
        mine = [key for key, owner in zip(incomplete, owners, strict=True) if owner == distributed.rank()]
        most = max(int(read_nbytes * _MOST_AGAIN) // distributed.world_size(), _LEAST_NBYTES)
        read = distributed.all_gather("verify what was read", lambda: _read_again(files, mine, ranges, most))
        again = {key: more for part in read for key, more in part.items()}
        totals |= {key: totals[key] | more for key, more in again.items()}
        incomplete = [key for key in incomplete if key not in again]
    incomplete_nbytes = sum(totals[key].nbytes for key in incomplete)
    if damaged := sorted(k for k in totals.keys() - incomplete if totals[k].crc32 != _record(files, k)[2]):
        raise _damaged(metadata, damaged, totals[damaged[0]].crc32)
    return Verified(summed_nbytes - incomplete_nbytes, read_nbytes - summed_nbytes, incomplete_nbytes)


def ranges_read(plan: ReadPlan, options: ReadOptions, keys: set[Key]) -> dict[Key, Ranges]:
    """The byte ranges that this rank reads of some records."""
    files = {file for file, _ in keys}
    parts = (part for each in plan.requantize_items for part in parts_of(each, options.requantize_nbytes))
    sources = [source for part in parts for source in part.sources]
    by_key: dict[Key, list[tuple[int, int, int, int]]] = {}

    def add(file: int, *row: int) -> None:
        number = plan.files[file].records.index(row[0])
        if number is not None and (file, number) in keys:
            by_key.setdefault((file, number), []).append((row[0], row[1], row[2], row[3]))

    for item in (*plan.items, *sources):
        if item.file in files:
            itemsize = ITEMSIZE[item.dtype]
            add(item.file, item.byte_offset, item.numel * itemsize, item.file_stride * itemsize, item.rows)
    for source in sources:
        if source.code is not None and (scales := scales_of(source))[0] in files:
            add(*scales, 0, 1)
    return {key: np.array(rows, np.int64) for key, rows in by_key.items()}


def _read_again(
    files: Sequence[SourceFile], keys: Sequence[Key], everybody: Sequence[Mapping[Key, Ranges]], most_nbytes: int
) -> dict[Key, PartialSum]:
    """What the XOR of all ranks' sums lacks of some records: of as many as ``most_nbytes`` more suffice for. Local."""
    lacking: list[tuple[int, Key, NDArray[np.int64]]] = []
    for key in keys:
        first, nbytes, _ = _record(files, key)
        again = read_evenly(np.concatenate([each[key] for each in everybody if key in each]), first, first + nbytes)
        lacking.append((int((again[:, 1] - again[:, 0]).sum()), key, again))
    found: dict[Key, PartialSum] = {}
    for nbytes, key, again in sorted(lacking, key=lambda each: each[:2]):
        most_nbytes -= nbytes
        if most_nbytes < 0:
            break
        read = ReadSums(files)
        with open_stream(files[key[0]].path) as stream:
            for start, stop in again.tolist():
                stream.seek(start)
                while raw := stream.read(min(stop - stream.tell(), SUMMED_AT_ONCE_NBYTES)):
                    read.add(key[0], stream.tell() - len(raw), [memoryview(raw)])
        found[key] = read.sums.get(key, PartialSum())  # what a file has lost since shows as another checksum
    return found


def read_evenly(rows: Ranges, first: int, stop: int) -> NDArray[np.int64]:
    """What of ``[first, stop)`` was read by no rank, or an even number of times, as starts and stops in order."""
    offsets, sizes, strides, counts = (rows := rows[np.argsort(rows[:, 0])]).T
    ends = np.maximum.accumulate(offsets + (counts - 1) * strides + sizes)
    breaks = 1 + np.flatnonzero(offsets[1:] >= ends[:-1])  # such as between two parameters
    breaks = breaks[np.diff(np.cumsum(counts)[breaks - 1] // _EXPANDED_AT_ONCE, prepend=0) > 0]
    bounds = pairwise([first, *offsets[breaks].tolist(), stop])
    parts = zip(np.split(rows, breaks), bounds, strict=True)
    return np.concatenate([_covered_evenly(part, *between) for part, between in parts])


def _covered_evenly(rows: Ranges, first: int, stop: int) -> NDArray[np.int64]:
    """Of all edges in order, those of ``[first, stop)`` included, every second gap is in an odd number of ranges."""
    offsets, sizes, strides, counts = rows.T
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets, counts) + steps * np.repeat(strides, counts)
    edges = np.sort(np.concatenate([starts, starts + np.repeat(sizes, counts), [first, stop]])).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def _record(files: Sequence[SourceFile], key: Key) -> tuple[int, int, int]:
    """Offset, size and CRC32 of a record."""
    file, number = key
    records = files[file].records
    return records.offsets[number], records.nbytes[number], records.crc32s[number]


def _damaged(metadata: CheckpointMetadata, keys: Sequence[Key], found: int) -> DamagedError:
    file, number = keys[0]
    source = metadata.files[file]
    offset, nbytes, crc32 = _record(metadata.files, keys[0])
    names = {
        f"{tensor.key} of {tensor.name}"
        for tensor in metadata.tensors.values()
        for chunk in tensor.chunks_in({file})
        if source.records.index(chunk.byte_offset) == number
    }
    names |= {
        f"{source.format.scales} of {tensor.name}"
        for tensor in metadata.tensors.values()
        for source in tensor.sources
        if isinstance(source, QuantizedChunks) and source.scales_file == file
    }
    others = len({other for other, _ in keys}) - 1
    problem = "bytes of the checkpoint are not those that were saved: the checksum of a record differs"
    problem += f" (and of records in {counted(others, 'more file')})" if others else ""
    expected = f"CRC32 {crc32:08x} of the {nbytes} bytes from byte {offset} on"
    remedy = (
        Remedy("copy the file again, or use another tag (elastic-ckpt verify --full names all damage)"),
        Remedy(when="if its writer is known to leave wrong checksums in files", config={"verify": "off"}),
    )
    return DamagedError(problem, source.path, expected, f"{found:08x}", parameter=names, remedy=remedy)

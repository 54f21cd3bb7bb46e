"""Compares what all ranks read with the checksums in the checkpoint's files.

Each rank sums up the bytes that it reads (:mod:`elastic_ckpt.io.checksums`); the sums of all ranks travel with the
message that ends every load. Where a record lacks a few bytes that nobody owns, such as padding, one rank reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from elastic_ckpt import distributed
from elastic_ckpt.core.checksums import PartialSum, judge
from elastic_ckpt.core.metadata import ITEMSIZE, CheckpointMetadata, SourceFile
from elastic_ckpt.errors import DamagedError, listed
from elastic_ckpt.io.checksums import ReadSums
from elastic_ckpt.report import Verified

#: A record: index of its file, and its number there.
Key = tuple[int, int]
#: Of a record that lacks bytes, at most this part, or one page, is read for its checksum alone.
_MOST_MISSING, _PAGE_NBYTES = 0.01, 4096


@dataclass(frozen=True)
class RankSums:
    """What one rank has read: sums by record, and bytes of no record with a checksum."""

    sums: Mapping[Key, PartialSum]
    unsummed_nbytes: int

    @classmethod
    def of(cls, read: ReadSums) -> RankSums:
        """What was summed up in a load's reads, which are done."""
        sums = read.finish()
        return cls(sums, read.nbytes - sum(each.nbytes for each in sums.values()))


def verify_reads(metadata: CheckpointMetadata, everybody: Sequence[RankSums]) -> Verified:
    """Compare what all ranks read with the files' checksums. Collective if bytes are missing that nobody owns.

    Args:
        metadata: the checkpoint's; its files are the same on every rank.
        everybody: the sums of every rank.

    Raises:
        DamagedError: a checksum differs; the same on every rank.
    """
    files, by_key = metadata.files, _by_key(everybody)
    verdicts = {key: _verdict(files, key, sums) for key, sums in by_key.items()}
    almost = sorted(
        key for key, verdict in verdicts.items() if verdict is None and _lacks_little(files, key, by_key[key])
    )
    if almost:
        mine = set(almost[distributed.rank() :: distributed.world_size()])
        read = distributed.all_gather("verify what was read", lambda: _read_missing(metadata, mine))
        for key, more in ((key, more) for part in read for key, more in part.items()):
            distinct = {each.positions: each for each in by_key[key]}
            verdicts[key] = _verdict(files, key, [reduce(or_, distinct.values()) | more])
    damaged = [key for key, verdict in verdicts.items() if verdict is False]
    if damaged:
        raise _damaged(metadata, sorted(damaged), by_key)
    incomplete = sum(each.nbytes for key, sums in by_key.items() if verdicts[key] is None for each in sums)
    whole = sum(each.nbytes for sums in by_key.values() for each in sums) - incomplete
    return Verified(whole, sum(each.unsummed_nbytes for each in everybody), incomplete)


def _by_key(everybody: Sequence[RankSums]) -> dict[Key, list[PartialSum]]:
    by_key: dict[Key, list[PartialSum]] = {}
    for each in everybody:
        for key, partial_sum in each.sums.items():
            by_key.setdefault(key, []).append(partial_sum)
    return by_key


def _verdict(files: Sequence[SourceFile], key: Key, sums: Sequence[PartialSum]) -> bool | None:
    file, number = key
    records = files[file].records
    return judge(sums, records.nbytes[number], records.crc32s[number])


def _lacks_little(files: Sequence[SourceFile], key: Key, sums: Sequence[PartialSum]) -> bool:
    nbytes = files[key[0]].records.nbytes[key[1]]
    read = sum({each.positions: each.nbytes for each in sums}.values())
    return 0 < nbytes - read <= max(_MOST_MISSING * nbytes, _PAGE_NBYTES)


def _read_missing(metadata: CheckpointMetadata, keys: set[Key]) -> dict[Key, PartialSum]:
    """The sums of the bytes of some records that no tensor of the metadata has. Local."""
    covered: dict[Key, list[tuple[int, int]]] = {key: [] for key in keys}
    files = {file for file, _ in keys}
    for tensor in metadata.tensors.values() if keys else ():
        for chunk in tensor.chunks_in(files):
            number = metadata.files[chunk.file].records.index(chunk.byte_offset)
            if number is not None and (chunk.file, number) in covered:
                stop = chunk.byte_offset + chunk.range.numel * ITEMSIZE[tensor.dtype]
                covered[chunk.file, number].append((chunk.byte_offset, stop))
    read = ReadSums(metadata.files)
    for (file, number), ranges in covered.items():
        records = metadata.files[file].records
        first = records.offsets[number]
        with open(metadata.files[file].path, "rb") as stream:
            for start, stop in _complement(ranges, first, first + records.nbytes[number]):
                read.add(file, start, [memoryview(os.pread(stream.fileno(), stop - start, start))])
    return dict(read.finish())


def _complement(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What of ``[start, stop)`` is in none of the ranges."""
    for first, end in sorted(ranges):
        if start < first:
            yield start, min(first, stop)
        start = max(start, end)
    if start < stop:
        yield start, stop


def _damaged(
    metadata: CheckpointMetadata, keys: Sequence[Key], by_key: Mapping[Key, Sequence[PartialSum]]
) -> DamagedError:
    file, number = keys[0]
    source = metadata.files[file]
    found = reduce(or_, {each.positions: each for each in by_key[keys[0]]}.values())
    names = {
        f"{tensor.key} of {tensor.name}"
        for tensor in metadata.tensors.values()
        for chunk in tensor.chunks_in({file})
        if source.records.index(chunk.byte_offset) == number
    }
    others = len({other for other, _ in keys}) - 1
    return DamagedError(
        "bytes of the checkpoint are not those that were saved: the checksum of a record differs"
        + (f" (and of records in {others} more files)" if others else ""),
        parameter=listed(names),
        file=source.path,
        expected=f"CRC32 {source.records.crc32s[number]:08x} of the {source.records.nbytes[number]} bytes from byte "
        f"{source.records.offsets[number]} on",
        found=f"{found.crc32:08x}",
        remedy="copy the file again, or take another tag (elastic-ckpt verify --full names all damage); if its writer "
        'is known to leave wrong checksums in files: "elastic_checkpoint": {"verify": "off"}',
    )

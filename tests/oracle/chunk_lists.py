"""The chunks of partitioned tensors, from flat tensors that are written out element by element."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from elastic_ckpt.core.chunks import BlockCode, StorageChunk
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.state_kinds import BlockFormat

#: (number of the parameter, its element); ``None``: padding.
Element = tuple[int, int] | None
Flats = list[list[Element]]


def flats_of_group(numels: Sequence[int], paddings: Sequence[int], ranks: int, partition: int) -> Flats:
    """ZeRO-1 and 2: one buffer, padding behind each parameter and at the end, in equal partitions."""
    buffer: list[Element] = []
    for number, (numel, padding) in enumerate(zip(numels, paddings, strict=True)):
        buffer += [(number, element) for element in range(numel)] + [None] * padding
    buffer = (buffer + [None] * (ranks * partition))[: ranks * partition]
    return [buffer[rank * partition : (rank + 1) * partition] for rank in range(ranks)]


def flats_by_parameter(numels: Sequence[int], ranks: int, multiple: int) -> Flats:
    """ZeRO-3: each parameter padded until all ranks get equally many of its elements, a multiple of some number."""
    flats: Flats = [[] for _ in range(ranks)]
    for number, numel in enumerate(numels):
        padded: list[Element] = [(number, element) for element in range(numel)]
        while len(padded) % (ranks * multiple):
            padded.append(None)
        share = len(padded) // ranks
        for rank in range(ranks):
            flats[rank] += padded[rank * share : (rank + 1) * share]
    return flats


def chunk_list(
    flats: Flats,
    number: int,
    numel: int,
    files: Sequence[int],
    offsets: Sequence[int],
    itemsize: int,
    rows: int = 1,
    blocks: BlockFormat | None = None,
    scales: Sequence[int] = (),
) -> list[StorageChunk]:
    """The chunks of one parameter, row after row."""
    chunks = []
    for row in range(rows):
        for rank, flat in enumerate(flats):
            places = [(at, item[1]) for at, item in enumerate(flat) if item is not None and item[0] == number]
            for _, group in groupby(places, key=lambda place: place[0] - place[1]):
                run = list(group)
                (at, first), last = run[0], run[-1][1]
                code = None
                if blocks is not None:
                    before = row * -(-len(flat) // blocks.numel)
                    code = BlockCode(blocks, at, scales[rank] + 4 * before)
                offset = offsets[rank] + (row * len(flat) + at) * itemsize
                elements = FlatRange(row * numel + first, row * numel + last + 1)
                chunks.append(StorageChunk(elements, files[rank], offset, code))
    return chunks

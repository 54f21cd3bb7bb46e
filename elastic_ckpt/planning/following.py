"""Plans states that are laid out as their masters: they are where these are, so far ahead in the same files. Pure.

ZeRO partitions a parameter's states by the rule of its masters, into flat tensors of the same files. To locate each
state anew would take most of the time of planning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ckpt.core.chunks import FlatTensors, PartitionedChunks
from elastic_ckpt.core.local_state import Fragment
from elastic_ckpt.core.metadata import ITEMSIZE, TensorMetadata
from elastic_ckpt.core.read_plan import ReadItem, Slot
from elastic_ckpt.planning.read_items import FragmentSource

#: Byte offset of a state's element less that of the master's, by file.
_Distances = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class PlannedMasters:
    """Masters of a flat partition, as planned: what is restored, in flat order, and the items that read each part."""

    parts: Sequence[FragmentSource]
    slot: int
    items: Sequence[Sequence[ReadItem]]
    _known: dict[tuple[int, int, int], _Distances | None] = field(default_factory=dict)

    def follow(self, tensors: Sequence[TensorMetadata], slot: int) -> list[ReadItem] | None:
        """The items that read these saved states of the parts; ``None`` if one is not laid out as its master."""
        found: list[ReadItem] = []
        for part, tensor, items in zip(self.parts, tensors, self.items, strict=True):
            distances, dtype = self._distances(part.tensor, tensor), tensor.dtype
            if distances is None:
                return None
            for each in items:
                file, rows, at = each.file, each.rows, each.slot_offset
                begin, file_stride, slot_stride = each.byte_offset + distances[file], each.file_stride, each.slot_stride
                found.append(ReadItem(file, begin, slot, at, each.numel, dtype, rows, file_stride, slot_stride))
        return found

    def _distances(self, master: TensorMetadata, state: TensorMetadata) -> _Distances | None:
        if state.is_whole or state.shape != master.shape or state.shards != master.shards:
            return None
        found: list[_Distances] = []
        for one, other in zip(master.sources, state.sources, strict=True):
            if not isinstance(one, PartitionedChunks) or not isinstance(other, PartitionedChunks):
                if one or other:
                    return None
                continue
            if one.rule is not other.rule or one.files_before != other.files_before:
                return None
            key = id(one.flat), id(other.flat), one.files_before
            if key not in self._known:
                self._known[key] = _between(one.flat, other.flat, one.files_before)
            distances = self._known[key]
            if distances is None:
                return None
            found.append(distances)
        if len(found) == 1:
            return found[0]
        every = {file: each for distances in found for file, each in distances.items()}
        return every if len(every) == sum(map(len, found)) else None  # shards in one file would be confused


def _between(master: FlatTensors, state: FlatTensors, files_before: int) -> _Distances | None:
    """Distances between two flat tensors in the same files; ``None`` unless elements follow each other alike."""
    layouts = [(each.files, each.itemsize, each.rows, each.blocks) for each in (master, state)]
    if layouts[0] != layouts[1] or master.rows > 1 or master.blocks is not None:
        return None
    ranks = range(len(master.files))
    return {
        file + files_before: state.begin_on(rank) - master.begin_on(rank)
        for rank, file in zip(ranks, master.files, strict=True)
    }


def padding_items(
    slot: Slot, number: int, fragments: Sequence[Fragment], tensors: Sequence[TensorMetadata | None], tp_rank: int
) -> list[ReadItem] | None:
    """The items that read the gaps of slot ``number``; ``None`` unless its fragments are just one saved flat tensor.

    ``tensors``: the saved state of each fragment.
    """
    places: set[tuple[int, int, int, str]] = set()
    for fragment, tensor in zip(fragments, tensors, strict=True):
        source = None if tensor is None else tensor.sources[tp_rank if tensor.shards else 0]
        if tensor is None or not isinstance(source, PartitionedChunks) or slot.rows > 1 or slot.dtype != tensor.dtype:
            return None
        chunks = source.within(fragment.range.start, fragment.range.stop)
        if [chunk.range for chunk in chunks] != [fragment.range]:
            return None
        begin = chunks[0].byte_offset - fragment.flat_offset * ITEMSIZE[slot.dtype]
        places.add((chunks[0].file, begin, source.flat.numel, tensor.dtype))
    if len(places) != 1 or next(iter(places))[2] != slot.numel:
        return None
    ((file, begin, _, dtype),) = places
    size = ITEMSIZE[dtype]
    return [ReadItem(file, begin + gap.start * size, number, gap.start, gap.numel, dtype) for gap in slot.gaps]

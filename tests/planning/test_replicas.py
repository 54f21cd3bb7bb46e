"""Who compares which elements of which copies: dealt out over a job of any size, against plain counting."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import ListedChunks, StorageChunk
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import LiveShards, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import (
    BUFFER,
    ITEMSIZE,
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.read_plan import ReplicaCheck
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import Drift, find_drift, united
from elastic_ckpt.planning.planner import compare_replicas, with_own_copies
from elastic_ckpt.sharding.resolve import ReshardPlan

OPTIONS = ReadOptions(threads=1)
#: (file, byte offset) of an element, and which comparison it is part of.
Element = tuple[int, int, tuple[str, str, int]]


@dataclass
class Checkpoint:
    """Tied tensors, saved by several stages, and replicated ones; every copy in two chunks, which are files."""

    tied: dict[str, tuple[int, int, int]]  # name -> elements of a shard, shards, stages that saved it
    replicated: dict[str, tuple[int, int]]  # name -> elements, copies
    dtype: str
    keys: tuple[str, ...] = (MASTER, "exp_avg")
    files: int = 0

    def metadata(self) -> CheckpointMetadata:
        tensors, replicas = {}, {}
        for key in self.keys:
            for name, (numel, shards, stages) in self.tied.items():
                tensors[name, key], *others = (self._tensor(name, key, numel, shards) for _ in range(stages))
                replicas[name, key] = tuple(others)
            for name, (numel, copies) in self.replicated.items():
                tensors[name, key] = self._tensor(name, key, numel, copies)
        files = tuple(SourceFile(str(number), 0) for number in range(self.files))
        parameters = {name: SavedParameter((1,), 0, ()) for name in (*self.tied, *self.replicated)}
        facts = SourceFacts("native", "", "tag", 1, 1, "0")
        return CheckpointMetadata(facts, files, parameters, tensors, ({},), replicas=replicas)

    def _tensor(self, name: str, key: str, numel: int, shards: int) -> TensorMetadata:
        sources = []
        for _ in range(shards):
            files = range(self.files, self.files + 2)
            ranges = FlatRange(0, numel // 3), FlatRange(numel // 3, numel)
            sources.append(ListedChunks(tuple(StorageChunk(*each, 8) for each in zip(ranges, files, strict=True))))
            self.files += 2
        return TensorMetadata(name, key, (numel,), self.dtype, tuple(sources), shards=((numel,),) * shards)

    def elements(self, metadata: CheckpointMetadata) -> Counter[Element]:
        """Those of the first copy count once for each comparison with another."""
        found: Counter[Element] = Counter()
        for (name, key), tensor in metadata.tensors.items():
            if name in self.replicated:
                found.update(self._elements_of(tensor, (name, key, 0), None))
            pairs = [
                (replica, shard)
                for replica in metadata.replicas.get((name, key), ())
                for shard in range(self.tied[name][1])
            ]
            for number, (replica, shard) in enumerate(pairs, 1):
                found.update(self._elements_of(tensor, (name, key, number), shard))
                found.update(self._elements_of(replica, (name, key, number), shard))
        return found

    def _elements_of(self, tensor: TensorMetadata, what: tuple[str, str, int], shard: int | None) -> Iterator[Element]:
        for chunk in tensor.chunks if shard is None else tensor.sources[shard]:
            for number in range(chunk.range.numel):
                yield chunk.file, chunk.byte_offset + number * ITEMSIZE[tensor.dtype], what


def jobs(checkpoint: Checkpoint, tp: int, dp: int, pp: int, stages: dict[str, tuple[int, ...]]) -> list[ModelLayout]:
    """Every rank; ``stages``: which of them hold each name."""
    names = [*checkpoint.tied, *checkpoint.replicated]
    ranks = []
    for stage in range(pp):
        mine = [name for name in names if stage in stages[name]]
        layouts = {name: LiveShards(()) for name in mine}
        elsewhere = frozenset(names) - frozenset(mine)
        for rank in range(tp * dp):
            at = divmod(rank, dp)
            ranks.append(ModelLayout(RankCoordinates(dp, at[1], tp, at[0], pp, stage), layouts, elsewhere))
    return ranks


def shares(
    checkpoint: Checkpoint, metadata: CheckpointMetadata, ranks: Sequence[ModelLayout]
) -> list[tuple[ReplicaCheck, ...]]:
    """What each rank compares; names of other stages' replicas are not known."""
    every = []
    for rank in ranks:
        replicas = frozenset(rank.layouts) & frozenset(checkpoint.replicated)
        every.append(compare_replicas(metadata, rank, ReshardPlan(replicas=replicas), rank.layouts, True))
    return every


def elements_of(comparison: ReplicaCheck) -> Iterator[Element]:
    what = (comparison.name, comparison.key, comparison.number)
    for items in comparison.replicas:
        assert sum(item.numel for item in items) == comparison.numel
        position = 0
        for item in items:
            assert (item.rows, item.target_offset) == (1, position)
            position += item.numel
            for number in range(item.numel):
                yield item.file, item.byte_offset + number * ITEMSIZE[item.dtype], what


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    sizes = st.one_of(st.integers(1, 5), st.integers(20, 90))
    tied = {
        f"t{n}": (draw(sizes), draw(st.integers(1, 3)), draw(st.integers(2, 3))) for n in range(draw(st.integers(0, 3)))
    }
    replicated = {f"r{n}": (draw(sizes), draw(st.integers(2, 4))) for n in range(draw(st.integers(0, 5)))}
    return Checkpoint(tied, replicated, draw(st.sampled_from(["float32", "bfloat16"])))


@settings(deadline=None)
@given(st.data(), checkpoints(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 7))
def test_each_element_of_each_copy_is_compared_by_exactly_one_rank_and_all_compare_as_much(
    data: st.DataObject, checkpoint: Checkpoint, tp: int, dp: int, pp: int, grain: int
) -> None:
    metadata = checkpoint.metadata()
    stage = st.integers(0, pp - 1)
    stages = {name: tuple(data.draw(st.sets(stage, min_size=1, max_size=2))) for name in checkpoint.tied}
    stages |= {name: (data.draw(stage),) for name in checkpoint.replicated}
    ranks = jobs(checkpoint, tp, dp, pp, stages)
    with (
        patch("elastic_ckpt.planning.planner.GRAIN_NUMEL", grain),
        patch("elastic_ckpt.planning.planner._READ_NBYTES", 0),
    ):
        every = shares(checkpoint, metadata, ranks)
    assert Counter(e for share in every for one in share for e in elements_of(one)) == checkpoint.elements(metadata)
    size = ITEMSIZE[checkpoint.dtype]
    for names, together in ((checkpoint.tied, [range(len(ranks))]), (checkpoint.replicated, _by_stage(ranks))):
        for group in together:
            nbytes = [
                sum(one.numel * len(one.replicas) * size for one in every[rank] if one.name in names) for rank in group
            ]
            copies = max((len(one.replicas) for rank in group for one in every[rank]), default=0)
            if pp > 1:  # in one stage, both lie on one line
                assert max(nbytes) - min(nbytes) <= 2 * grain * copies * size
    if pp == 1:
        nbytes = [sum(one.numel * len(one.replicas) * size for one in share) for share in every]
        copies = max((len(one.replicas) for share in every for one in share), default=0)
        assert max(nbytes) - min(nbytes) <= 2 * grain * copies * size


def _by_stage(ranks: Sequence[ModelLayout]) -> list[list[int]]:
    stages = sorted({rank.coordinates.pp_rank for rank in ranks})
    return [[number for number, rank in enumerate(ranks) if rank.coordinates.pp_rank == stage] for stage in stages]


def test_big_copies_are_shared_out_and_small_ones_are_not_cut() -> None:
    """The tied embedding of a model of 176 billion parameters, and many norms."""
    shard = 250880 // 4 * 14336
    checkpoint = Checkpoint({"embedding": (shard, 4, 2)}, {f"norm{n}": (14336, 4) for n in range(40)}, "float32")
    metadata = checkpoint.metadata()
    stages: dict[str, tuple[int, ...]] = {
        name: (0, 5) if name == "embedding" else (int(name[4:]) % 6,) for name in metadata.parameters
    }
    ranks = jobs(checkpoint, 8, 4, 6, stages)
    every = shares(checkpoint, metadata, ranks)
    nbytes = [sum(one.numel * len(one.replicas) * 4 for one in share) for share in every]
    assert sum(nbytes) == 2 * 4 * (shard * 4 * 2 + 40 * 14336 * 4)
    assert max(nbytes) < 1.02 * sum(nbytes) / len(ranks)
    assert all(one.numel == 14336 for share in every for one in share if one.name != "embedding")
    assert all(one.start % (1 << 18) == 0 for share in every for one in share)


def test_many_small_copies_are_not_all_left_to_one_rank() -> None:
    """Each is a read of its own: of a big tensor and many small ones, by bytes alone one rank would get all of these."""
    checkpoint = Checkpoint({}, {"a": (1 << 24, 2)} | {f"n{n:04}": (8, 2) for n in range(1000)}, "float32", (MASTER,))
    every = shares(
        checkpoint, checkpoint.metadata(), jobs(checkpoint, 1, 4, 1, dict.fromkeys([*checkpoint.replicated], (0,)))
    )
    assert max(map(len, every)) < 400


def test_buffers_that_several_stages_saved_are_compared_in_each_stage_that_holds_them() -> None:
    """Ranks may have buffers of their own in their metadata."""
    checkpoint = Checkpoint({"ids": (100, 1, 2)}, {}, "float32", (BUFFER,))
    metadata = checkpoint.metadata()
    ranks = jobs(checkpoint, 1, 2, 3, {"ids": (0, 2)})
    every = shares(checkpoint, metadata, ranks)
    assert [sum(one.numel for one in share) for share in every] in ([100, 0, 0, 0, 100, 0], [0, 100, 0, 0, 0, 100])


def test_a_name_that_only_one_stage_knows_by_another_is_compared_there() -> None:
    """Tied within its stage, and saved under another of its names: the other stages know the saved one alone."""
    checkpoint = Checkpoint({"old": (100, 1, 2), "other": (100, 1, 2)}, {}, "float32", (MASTER,))
    saved = checkpoint.metadata()
    ranks = jobs(checkpoint, 1, 2, 2, {"old": (0,), "other": (1,)})
    found: Counter[str] = Counter()
    for rank in ranks:
        mine, live = saved, replace(rank, elsewhere=frozenset({"new"}))
        if rank.coordinates.pp_rank == 0:
            replicas = {_new(place): tuple(map(_renamed, replicas)) for place, replicas in saved.replicas.items()}
            tensors = {_new(place): _renamed(tensor) for place, tensor in saved.tensors.items()}
            mine, live = (
                replace(saved, tensors=tensors, replicas=replicas),
                replace(rank, layouts={"new": LiveShards(())}),
            )
        comparisons = compare_replicas(mine, live, ReshardPlan(), live.layouts, True, saved)
        found.update({one.name: one.numel for one in comparisons})
    assert found == {"new": 100, "other": 100}


@pytest.mark.parametrize("live_stages", [(0, 1), (0, 2), (0,), (1,)])
def test_a_stage_keeps_its_own_copy_where_the_stages_are_those_of_the_save(live_stages: tuple[int, ...]) -> None:
    """Of what the live stages do not synchronize."""
    checkpoint = Checkpoint({"tied": (100, 1, 2)}, {}, "float32", (MASTER,))
    saved = checkpoint.metadata()
    saved = replace(saved, source=replace(saved.source, pp=2), stages={"tied": (0, 1)})
    copies = (saved.tensors["tied", MASTER], *saved.replicas["tied", MASTER])
    ranks = jobs(checkpoint, 1, 1, 2, {"tied": (0, 1)})
    for stage, rank in enumerate(ranks):
        own = with_own_copies(saved, replace(rank, unsynchronized={"tied": live_stages}))
        if live_stages == (0, 1):
            assert own.tensors["tied", MASTER].sources == copies[stage].sources and not own.replicas
        else:
            assert own == saved


def _new(place: tuple[str, str]) -> tuple[str, str]:
    return ("new" if place[0] == "old" else place[0], place[1])


def _renamed(tensor: TensorMetadata) -> TensorMetadata:
    return replace(tensor, name=_new((tensor.name, ""))[0])


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 90), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(8, 200))
def test_drift_is_found_wherever_it_lies_whoever_looks(
    data: st.DataObject, numel: int, pp: int, dp: int, grain: int, staging_nbytes: int
) -> None:
    checkpoint = Checkpoint({"t": (numel, 2, 2)}, {}, "float32", (MASTER,))
    metadata = checkpoint.metadata()
    changes = data.draw(st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, numel - 1)), st.integers(1, 9)))
    with tempfile.TemporaryDirectory() as folder:
        metadata = replace(metadata, files=tuple(_write(Path(folder), metadata, changes)))
        differences: list[Drift] = []
        with (
            patch("elastic_ckpt.planning.planner.GRAIN_NUMEL", grain),
            patch("elastic_ckpt.io.compare_replicas._LEAST_NBYTES", 8),
        ):
            for share in shares(checkpoint, metadata, jobs(checkpoint, 1, dp, pp, {"t": (0, pp - 1)})):
                differences += find_drift(metadata.files, share, replace(OPTIONS, staging_nbytes=staging_nbytes))
    found = united(differences)
    assert len(found) == bool(changes)
    for drift in found:
        assert drift.largest == max(changes.values())
        assert (drift.check.name, drift.copies) == ("t", 2)


def _write(folder: Path, metadata: CheckpointMetadata, changes: dict[tuple[int, int], int]) -> Iterator[SourceFile]:
    (replica,) = metadata.replicas["t", MASTER]
    for number in range(len(metadata.files)):
        for tensor in (metadata.tensors["t", MASTER], replica):
            for shard, chunk in ((shard, chunk) for shard, source in enumerate(tensor.sources) for chunk in source):
                if chunk.file == number:
                    values = torch.arange(float(chunk.range.start), chunk.range.stop)
                    for at in range(chunk.range.numel if tensor is replica else 0):
                        values[at] += changes.get((shard, chunk.range.start + at), 0)
                    path = folder / str(number)
                    path.write_bytes(b"\xee" * chunk.byte_offset + values.numpy().tobytes())
                    yield SourceFile(str(path), path.stat().st_size)

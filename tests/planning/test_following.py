"""States that are laid out as their masters: planned like them, and like no one else."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale_models import ScaleModel, scale_metadata
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import (
    ChunkSource,
    FlatTensors,
    PartitionedChunks,
    PartitionRule,
    StorageChunk,
    group_rules,
    listed,
    parameter_rules,
)
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import Fragment
from elastic_ckpt.core.metadata import MASTER, TensorMetadata
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.core.strided import ShardSources, TPLayout, copied, fused, reshard
from elastic_ckpt.planning.following import PlannedMasters
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.planning.read_items import FragmentSource, read_items
from elastic_ckpt.tools.virtual import Topology, VirtualJob

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "models"
RULE = PartitionRule(numel=12, step=5, shift=3)
FILES = range(4)
MASTERS, STATES = (FlatTensors(FILES, array("q", offsets), 5, 4) for offsets in ([64], [1000, 2000, 3000, 4000]))


def tensor(key: str, *sources: ChunkSource, shape: tuple[int, ...] = (12,)) -> TensorMetadata:
    shards = tuple(shape for _ in sources) if len(sources) > 1 else ()
    return TensorMetadata("a", key, shape, "float32", sources, shards=shards)


def leader_of(tensors: list[TensorMetadata], sources: list[ShardSources], wanted: list[FlatRange]) -> PlannedMasters:
    """Masters that were located one by one, each at the same offset of its slot."""
    parts = [
        FragmentSource(Fragment(each.name, each.shape, range_, 0, 0), each, source)
        for each, source, range_ in zip(tensors, sources, wanted, strict=True)
    ]
    items = [list(read_items(part.tensor, part.sources, part.fragment.range)) for part in parts]
    return PlannedMasters(parts, 0, items)


def located(leader: PlannedMasters, tensors: list[TensorMetadata], slot: int) -> list[object]:
    """What the states of a leader's parts are read by, located one by one."""
    return [
        item
        for part, each in zip(leader.parts, tensors, strict=True)
        for item in read_items(each, part.sources, part.fragment.range, slot)
    ]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[PartitionRule], int]:
    """Parameters that some ranks partition by the rule of either stage."""
    numels, ranks = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        steps = [-(-numel // ranks) for numel in numels]
        return parameter_rules(numels, steps), ranks
    return group_rules(numels, list(accumulate(numels[:-1], initial=0)), -(-sum(numels) // ranks)), ranks


@given(groups(), st.integers(0, 2), st.data())
def test_items_of_states_are_those_that_locating_them_finds(
    group: tuple[list[PartitionRule], int], before: int, data: st.DataObject
) -> None:
    rules, ranks = group
    numel = max(rule.start + rule.step for rule in rules)
    offsets = [array("q", data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))) for _ in range(2)]
    flats = [FlatTensors(range(0, 2 * ranks, 2), each, numel, 4) for each in offsets]
    masters, states = (
        [
            TensorMetadata(f"p{at}", key, (rule.numel,), "float32", (PartitionedChunks(rule, flat, before),))
            for at, rule in enumerate(rules)
        ]
        for key, flat in zip((MASTER, "exp_avg"), flats, strict=True)
    )
    ranges = []
    for rule in rules:
        begin = data.draw(st.integers(0, rule.numel))
        ranges.append(FlatRange(begin, data.draw(st.integers(begin, rule.numel))))
    leader = leader_of(masters, [copied(0, rule.numel) for rule in rules], ranges)
    assert leader.follow(states, 3) == located(leader, states, 3)


@given(st.integers(1, 2), st.integers(0, 11))
def test_strided_items_of_several_shards_follow(dim: int, begin: int) -> None:
    """Two tensor-parallel shards, one of which is empty in the first case, that go to one live shard."""
    rule = PartitionRule(12, 4)
    flats = [[FlatTensors(range(3), array("q", [base]), 12, 4) for base in (first, first + 500)] for first in (0, 64)]
    masters, states = (
        tensor(key, *(PartitionedChunks(rule, flat, 3 * at) for at, flat in enumerate(pair)), shape=(3, 4))
        for key, pair in zip((MASTER, "exp_avg"), flats, strict=True)
    )
    whole = fused_layout(dim)
    sources = reshard(whole, fused_layout(dim, 1), 0)
    leader = leader_of([masters], [sources], [FlatRange(begin, 24)])
    found = leader.follow([states], 1)
    assert found == located(leader, [states], 1) and found
    assert {item.file for item in found} <= set(range(6))


def fused_layout(dim: int, degree: int = 2) -> TPLayout:
    """A matrix of two shards of 3 x 4, cut along one dimension, or whole."""
    shape = (6, 4) if dim == 1 else (3, 8)
    return fused(shape, dim - 1, [[shape[dim - 1] // degree] * degree])


BLOCKS = BlockFormat(4, "absmax1", Codebook(tuple(range(256))))
OTHERS: dict[str, Callable[[], TensorMetadata]] = {
    "rule": lambda: tensor("exp_avg", PartitionedChunks(replace(RULE, shift=2), STATES)),
    "files before": lambda: tensor("exp_avg", PartitionedChunks(RULE, STATES, 1)),
    "files": lambda: tensor("exp_avg", PartitionedChunks(RULE, replace(STATES, files=range(1, 5)))),
    "itemsize": lambda: tensor("exp_avg", PartitionedChunks(RULE, replace(STATES, itemsize=2))),
    "rows": lambda: tensor("exp_avg", PartitionedChunks(RULE, replace(STATES, rows=2))),
    "quantized": lambda: tensor("exp_avg", PartitionedChunks(RULE, replace(STATES, blocks=BLOCKS))),
    "listed": lambda: tensor("exp_avg", *listed(StorageChunk(FlatRange(0, 12), 0, 64))),
    "shape": lambda: tensor("exp_avg", PartitionedChunks(RULE, STATES), shape=(3, 4)),
    "whole": lambda: replace(tensor("exp_avg", PartitionedChunks(RULE, STATES)), is_whole=True),
    "shards": lambda: replace(tensor("exp_avg", PartitionedChunks(RULE, STATES)), shards=((12,),)),
}


@pytest.mark.parametrize("how", OTHERS)
def test_a_state_that_is_laid_out_otherwise_does_not_follow(how: str) -> None:
    leader = leader_of([tensor(MASTER, PartitionedChunks(RULE, MASTERS))], [copied(0, 12)], [FlatRange(2, 9)])
    same = tensor("exp_avg", PartitionedChunks(RULE, STATES))
    assert leader.follow([same], 1) == located(leader, [same], 1)
    assert leader.follow([OTHERS[how]()], 1) is None


def test_shards_in_one_file_do_not_follow() -> None:
    """As no save has them: one of the two shards would be read where the other one is."""
    pairs = [[replace(flat, byte_offsets=array("q", [offset])) for offset in (0, 99)] for flat in (MASTERS, STATES)]
    pairs[1].reverse()
    masters, states = (
        tensor(key, *(PartitionedChunks(RULE, flat) for flat in pair))
        for key, pair in zip((MASTER, "exp_avg"), pairs, strict=True)
    )
    leader = leader_of([masters], [copied(0, 12)], [FlatRange(2, 9)])
    assert leader.follow([states], 1) is None


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("70b", Topology(dp=24, zero_stage=3)),
        ("70b", Topology(dp=24, zero_stage=1)),
        ("bloom-176b", Topology(dp=2, tp=2, pp=4, zero_stage=1)),
        ("bloom-176b", Topology(dp=1, tp=8, pp=6, zero_stage=1)),
    ],
)
def test_plans_are_those_that_locating_each_state_makes(name: str, topology: Topology) -> None:
    model = ScaleModel.model_validate_json((CONFIGS / f"{name}.json").read_bytes())
    options = LoadOptions.of(ElasticConfig.model_validate({"tp_preset": model.preset} if model.preset else {}))
    job = VirtualJob(scale_metadata(model), topology, options)
    local_state = job.local_state(1)
    with mock.patch.object(PlannedMasters, "follow", autospec=True, side_effect=PlannedMasters.follow) as followed:
        plan = plan_load(job.metadata, local_state, options)
    assert all(call.args for call in followed.call_args_list) and followed.call_count >= 2
    with mock.patch.object(PlannedMasters, "follow", return_value=None):
        assert plan == plan_load(job.metadata, local_state, options)

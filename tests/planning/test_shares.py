"""Who reads which piece of a tensor that every rank holds: each element one rank, the same on all, and fairly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import elastic_ckpt.planning.read_items
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import LocalState, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import BUFFER, MASTER
from elastic_ckpt.core.read_plan import BroadcastRange, LoadPlan, TargetTensor
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.planning.read_items import BroadcastRanges
from tests.simulation import BYTES, Case, cases, engine_of, live, saved

#: A tensor of more than this for each rank is cut.
SMALL = 1 << 20
Targets = list[tuple[int, str]]

sizes = st.one_of(st.integers(0, 5), st.integers(0, 3 << 20), st.sampled_from([SMALL, SMALL // 2, SMALL // 4]))
targets = st.lists(st.tuples(sizes, st.sampled_from(["float32", "float16", "int8", "float64"])), max_size=12)
ITEMSIZES = {"float32": 4, "float16": 2, "int8": 1, "float64": 8}


def dealt(dp: int, offered: Targets) -> tuple[list[list[FlatRange]], list[list[BroadcastRange]]]:
    """What each rank is told to read of each target, and the shares that it writes down."""
    mine, shares = [], []
    for rank in range(dp):
        sharing = BroadcastRanges(dp, rank)
        tensors = [TargetTensor(MASTER, 0, "", numel, dtype) for numel, dtype in offered]
        mine.append([sharing.mine(number, [tensor]) for number, tensor in enumerate(tensors)])
        shares.append(sharing.shares)
    return mine, shares


@settings(deadline=None)
@given(st.integers(1, 7), targets)
def test_every_element_has_exactly_one_owner_and_all_ranks_agree(dp: int, offered: Targets) -> None:
    mine, shares = dealt(dp, offered)
    assert all(other == shares[0] for other in shares)
    for number, (numel, _) in enumerate(offered):
        pieces = sorted((share for share in shares[0] if share.target == number), key=lambda share: share.range)
        position = 0
        for share in pieces:
            assert share.range.start == position
            assert share.range.numel > 0
            position = share.range.stop
        assert position == numel
        for rank in range(dp):
            owned = [share.range for share in pieces if share.owner == rank]
            assert owned == ([mine[rank][number]] if mine[rank][number].numel else [])


@settings(deadline=None)
@given(st.integers(1, 7), targets)
def test_no_rank_has_more_to_read_than_its_part_and_one_small_tensor(dp: int, offered: Targets) -> None:
    _, shares = dealt(dp, offered)
    loads: Counter[int] = Counter(dict.fromkeys(range(dp), 0))
    for share in shares[0]:
        loads[share.owner] += share.range.numel * ITEMSIZES[offered[share.target][1]]
    # each cut tensor may leave one rank short by an element for each other rank
    rounding = sum(dp * ITEMSIZES[dtype] for _, dtype in offered)
    assert max(loads.values()) - min(loads.values()) <= SMALL * dp + rounding


@given(st.integers(1, 6), st.integers(1, 9))
def test_small_tensors_go_to_whoever_has_least(dp: int, count: int) -> None:
    _, shares = dealt(dp, [(10, "float32")] * count)
    assert [share.owner for share in shares[0]] == [number % dp for number in range(count)]


def test_a_small_tensor_goes_past_a_rank_that_has_read_a_bigger_one() -> None:
    _, shares = dealt(2, [(100, "int8"), (30, "int8"), (30, "int8"), (60, "int8"), (9, "int8")])
    assert [share.owner for share in shares[0]] == [0, 1, 1, 1, 0]


def test_bytes_count_and_not_elements() -> None:
    _, shares = dealt(2, [(10, "float64"), (60, "int8"), (10, "int8"), (9, "int8"), (1, "int8"), (1, "int8")])
    assert [share.owner for share in shares[0]] == [0, 1, 1, 1, 1, 0]


def test_a_tensor_is_cut_from_the_first_byte_beyond_small_on() -> None:
    _, shares = dealt(3, [(3 * SMALL // 4, "float32"), (3 * SMALL // 4 + 1, "float32")])
    assert [(share.target, share.owner) for share in shares[0]] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    step = SMALL // 4 + 1
    assert [share.range for share in shares[0][1:]] == [
        FlatRange(0, step),
        FlatRange(step, 2 * step),
        FlatRange(2 * step, 3 * SMALL // 4 + 1),
    ]


def test_a_tensor_that_divides_is_cut_into_equal_pieces() -> None:
    _, shares = dealt(3, [(3 * SMALL, "float32")])
    assert [share.range.numel for share in shares[0]] == [SMALL] * 3


def test_one_rank_alone_reads_everything_in_one_piece() -> None:
    _, shares = dealt(1, [(5 << 20, "float64"), (0, "float32"), (1, "int8")])
    assert shares[0] == [BroadcastRange(0, FlatRange(0, 5 << 20), 0), BroadcastRange(2, FlatRange(0, 1), 0)]


# --- the plans of all ranks together ----------------------------------------------------------------------------


def replicated_engine(case: Case, rank: int, dp: int) -> LocalState:
    """The case's engine as it would be without partitions: every rank holds everything."""
    whole = replace(case, target=replace(case.target, style="zero12", dp=1, tail=0, alignments={}))
    flats = replace(engine_of(whole, 0), zero_stage=0, model=ModelLayout(RankCoordinates(dp, rank)))
    return replace(
        flats,
        flats=tuple(replace(flat, replicated=True) for flat in flats.flats),
        wholes=tuple(replace(tensor, replicated=True) for tensor in flats.wholes),
    )


def without_items(plan: LoadPlan) -> LoadPlan:
    return replace(plan, reads=replace(plan.reads, items=(), shares=()))


def read_by(plan: LoadPlan) -> Counter[tuple[int, int, int, int]]:
    """Every (target, element) that a rank reads, with the byte and the file that it comes from."""
    return Counter(
        (copy.target, copy.target_offset + step, copy.file, copy.byte_offset + step * BYTES[copy.dtype])
        for copy in plan.reads.items
        for step in range(copy.numel)
    )


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(), st.integers(1, 4), st.sampled_from([1, 4, SMALL]))
def test_all_ranks_together_read_each_element_once_and_each_what_its_shares_say(
    case: Case, dp: int, small: int
) -> None:
    options = LoadOptions(strict=False)
    alone = plan_load(case.metadata, replicated_engine(case, 0, 1), options)
    before, elastic_ckpt.planning.read_items._SMALL_NBYTES = elastic_ckpt.planning.read_items._SMALL_NBYTES, small
    try:
        plans = [plan_load(case.metadata, replicated_engine(case, rank, dp), options) for rank in range(dp)]
    finally:
        elastic_ckpt.planning.read_items._SMALL_NBYTES = before
    together: Counter[tuple[int, int, int, int]] = Counter()
    for rank, plan in enumerate(plans):
        assert plan.reads.shares == plans[0].reads.shares
        assert all(share.range.numel for share in plan.reads.shares)
        assert without_items(plan) == without_items(alone)
        mine = read_by(plan)
        owned = {
            (share.target, element)
            for share in plan.reads.shares
            if share.owner == rank
            for element in range(share.range.start, share.range.stop)
        }
        assert {(target, element) for target, element, _, _ in mine} <= owned
        together += mine
    assert together == read_by(alone)
    assert set(together.values()) <= {1}
    dealt_out = {share.target for share in plans[0].reads.shares}
    assert dealt_out == {number for number, target in enumerate(alone.reads.targets) if target.numel}


def test_buffers_that_each_rank_reads_from_its_own_file_are_not_shared() -> None:
    wholes = {("mask", BUFFER): ((4,), "int64")}
    metadata = replace(saved({"a": (3,)}, wholes=wholes), buffers_of_this_rank=True)
    engine = live({"a": (3,)}, wholes=wholes)
    engine = replace(
        engine,
        model=ModelLayout(RankCoordinates(2, 1)),
        wholes=tuple(replace(tensor, replicated=True) for tensor in engine.wholes),
    )
    plan = plan_load(metadata, engine, LoadOptions())
    assert plan.reads.shares == ()
    target = next(number for number, target in enumerate(plan.reads.targets) if target.key == BUFFER)
    assert not plan.reads.targets[target].replicated
    assert sum(copy.numel for copy in plan.reads.items if copy.target == target) == 4
    shared = plan_load(replace(metadata, buffers_of_this_rank=False), engine, LoadOptions())
    assert shared.reads.shares == (BroadcastRange(target, FlatRange(0, 4), 0),)
    assert shared.reads.targets[target].replicated
    assert not [copy for copy in shared.reads.items if copy.target == target]


def test_partitioned_targets_are_not_shared() -> None:
    engine = replace(live({"a": (3,)}), model=ModelLayout(RankCoordinates(2, 1)))
    plan = plan_load(saved({"a": (3,)}), engine, LoadOptions())
    assert plan.reads.shares == ()
    assert sum(copy.numel for copy in plan.reads.items) == 9
    assert {target.key for target in plan.reads.targets} == {MASTER, "exp_avg", "exp_avg_sq"}

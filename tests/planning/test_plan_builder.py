"""Optimizer states of every kind, planned and then read from real files: values are compared, element by element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import FlatPartition, Fragment, LocalState
from elastic_ckpt.core.metadata import (
    MASTER,
    ReplicatedState,
    SavedParameter,
    TensorMetadata,
)
from elastic_ckpt.core.read_plan import BroadcastRange, ReadItem, ReadPlan, RequantizeItem, TargetTensor
from elastic_ckpt.core.state_kinds import PER_PARAMETER, REPLICATED, SCRATCH, TOUCHED, BlockFormat, LiveState
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.planning.read_items import BroadcastRanges
from tests.planning.building import (
    FOUR,
    UNTOUCHED,
    Shape,
    Tensors,
    carry_out,
    catalog_of,
    chunk,
    coded,
    cut,
    decoded,
    elements,
    engine_of,
    loaded,
    memory_of,
    numbers,
    target_of,
    tensor_in,
)
from tests.planning.partitions import ROUNDING, SIGNED, UNSIGNED, Disk, Partition

POSITIVE = BlockFormat(4, "absmax2", UNSIGNED[0])
CODED = LiveState("state1", "uint8", blocks=FOUR)


# --- checkpoints and engines ------------------------------------------------------------------------------------


def one_flat_each(
    shapes: Mapping[str, Shape], states: Sequence[LiveState], *, dp: int, rank: int, replicated: bool
) -> LocalState:
    """Every parameter is a flat partition of its own: no ZeRO."""
    flats = [
        FlatPartition(number, 0, math.prod(shape), "float32", (name,), replicated, tuple(states), ("step",))
        for number, (name, shape) in enumerate(shapes.items())
    ]
    fragments = [
        Fragment(name, shape, FlatRange(0, math.prod(shape)), number, 0)
        for number, (name, shape) in enumerate(shapes.items())
    ]
    engine = engine_of(shapes, states, dp=dp, rank=rank)
    return replace(engine, zero_stage=0, flats=tuple(flats), fragments=tuple(fragments))


# --- carrying plans out -----------------------------------------------------------------------------------------


# --- several rows -----------------------------------------------------------------------------------------------

TWO = {"a": (6,), "b": (2, 5)}


def rows_in_partitions(disk: Disk, key: str, blocks: BlockFormat | None) -> tuple[Tensors, NDArray[np.float32]]:
    """``TWO`` cut for two ranks, each with a tensor of two rows; and what both rows hold, whole."""
    parts = []
    for _ in range(2):
        if blocks is None:
            parts.append([disk.raw(numbers(8)) for _ in range(2)])
            continue
        parts.append([coded(disk, 8, blocks) for _ in range(2)])
    truth = np.stack([np.concatenate([parts[rank][row].values for rank in range(2)]) for row in range(2)])
    tensors: Tensors = {}
    for name, base in (("a", 0), ("b", 6)):
        numel = math.prod(TWO[name])
        chunks = [
            chunk(parts[(base + index) // 8][row], row * numel + index, 1, (base + index) % 8)
            for row in range(2)
            for index in range(numel)
        ]
        dtype = "float32" if blocks is None else "uint8"
        tensors[name, key] = TensorMetadata(name, key, (2, *TWO[name]), dtype, chunks_of(*chunks))
    return tensors, truth


@pytest.mark.parametrize(("dp", "step"), [(1, 16), (1, 18), (2, 8), (3, 6), (4, 5), (5, 4)])
def test_a_state_of_two_rows_is_cut_row_by_row(tmp_path: Path, dp: int, step: int) -> None:
    disk = Disk()
    states, truth = rows_in_partitions(disk, "m1_m2", None)
    metadata = catalog_of(disk, TWO, states)
    for rank in range(dp):
        engine = engine_of(
            TWO, [LiveState("m1_m2", "float32", planes=2)], numel=step, dp=dp, rank=rank, fragments=cut(TWO, step, rank)
        )
        plan = plan_load(metadata, engine, LoadOptions())
        target = target_of(plan, "m1_m2")
        assert (target.numel, target.planes, target.shape, target.dtype) == (2 * step, 2, (), "float32")
        held = truth[:, rank * step : (rank + 1) * step]
        padding = [row * step + place for row in range(2) for place in range(held.shape[1], step)]
        assert elements(target.gaps) == padding
        got = loaded(plan, disk, tmp_path)["m1_m2"].reshape(2, step)
        assert got[:, : held.shape[1]].tolist() == held.tolist()
        assert not got[:, held.shape[1] :].any()


@pytest.mark.parametrize(("dp", "step"), [(1, 16), (1, 18), (2, 8), (4, 4), (3, 6), (4, 5)])
def test_a_coded_state_of_two_rows_has_blocks_of_its_own_in_each_row(tmp_path: Path, dp: int, step: int) -> None:
    disk = Disk()
    states, truth = rows_in_partitions(disk, "m1_m2", FOUR)
    metadata = catalog_of(disk, TWO, states)
    live = LiveState("m1_m2", "uint8", planes=2, blocks=FOUR)
    for rank in range(dp):
        engine = engine_of(TWO, [live], numel=step, dp=dp, rank=rank, fragments=cut(TWO, step, rank))
        plan = plan_load(metadata, engine, LoadOptions())
        codes, scales = target_of(plan, "m1_m2"), target_of(plan, "absmax1")
        blocks = FOUR.blocks(step)
        assert (codes.numel, codes.planes, scales.numel, scales.planes, plan.blocks) == (
            2 * step,
            2,
            2 * blocks,
            2,
            2 * blocks,
        )
        assert scales.gaps == (FlatRange(0, 2 * blocks),)
        got = loaded(plan, disk, tmp_path)
        for row in range(2):
            now = got["absmax1"].reshape(2, blocks)[row]
            values = decoded(got["m1_m2"].reshape(2, step)[row], now, FOUR)
            held = truth[row, rank * step : (rank + 1) * step]
            assert not values[len(held) :].any()
            if step % 4 == 0 or (dp, step) == (1, 18):
                assert values[: len(held)].tobytes() == held.tobytes()
            bound = (FOUR.codebook.bound + ROUNDING) * np.repeat(now, 4)[: len(held)]
            assert (np.abs(values[: len(held)] - held) <= bound).all()
        if step % 4 == 0:
            assert plan.reads.requantize_items == ()
        elif rank == 1:
            assert len({recode.start // step for recode in plan.reads.requantize_items}) == 2, "both rows are recoded"


def test_a_state_of_two_rows_that_all_ranks_hold_is_shared_whole(tmp_path: Path) -> None:
    shapes = {"a": (3,), "b": (2,)}
    disk = Disk()
    parts = {name: disk.raw(numbers(2 * math.prod(shape))) for name, shape in shapes.items()}
    states = {(name, "m"): tensor_in(part, name, "m", (2, *shapes[name])) for name, part in parts.items()}
    metadata = catalog_of(disk, shapes, states)
    live = LiveState("m", "float32", planes=2)
    for rank in range(2):
        plan = plan_load(metadata, one_flat_each(shapes, [live], dp=2, rank=rank, replicated=True), LoadOptions())
        tensors = memory_of(plan.reads)
        carry_out(plan.reads, disk, tmp_path, tensors)
        for number, target in enumerate(plan.reads.targets):
            (share,) = [share for share in plan.reads.shares if share.target == number]
            assert share.range == FlatRange(0, target.numel)
            if target.key == "m":
                truth = parts["ab"[target.flat]].values.tolist()
                assert tensors[number].tolist() == (truth if share.owner == rank else [UNTOUCHED] * target.numel)


def test_what_is_not_restored_leaves_a_gap_in_each_row(tmp_path: Path) -> None:
    saved, shapes = {"a": (3,), "b": (2,)}, {"new": (2,), "a": (3,), "also_new": (1,), "b": (2,)}
    disk = Disk()
    parts = {name: disk.raw(numbers(2 * math.prod(shape))) for name, shape in saved.items()}
    states = {(name, "m"): tensor_in(part, name, "m", (2, *saved[name])) for name, part in parts.items()}
    engine = engine_of(shapes, [LiveState("m", "float32", planes=2, initial=0.5)], numel=9)
    plan = plan_load(catalog_of(disk, saved, states), engine, LoadOptions(strict=False))
    assert elements(target_of(plan, "m").gaps) == [0, 1, 5, 8, 9, 10, 14, 17]
    a, b = parts["a"].values, parts["b"].values
    rows = [[0.5, 0.5, *a[3 * row :][:3], 0.5, *b[2 * row :][:2], 0.5] for row in range(2)]
    assert loaded(plan, disk, tmp_path)["m"].tolist() == [*rows[0], *rows[1]]


def test_a_state_with_another_number_of_rows_does_not_fit() -> None:
    disk = Disk()
    states, _ = rows_in_partitions(disk, "m1_m2", None)
    for live in (LiveState("m1_m2", "float32"), LiveState("m1_m2", "float32", planes=3)):
        with pytest.raises(MismatchError, match="shape of m1_m2 differs") as caught:
            plan_load(catalog_of(disk, TWO, states), engine_of(TWO, [live]), LoadOptions())
        assert caught.value.parameter == "a"


# --- touched, whole, replicated, scratch ------------------------------------------------------------------------


def test_a_touched_state_holds_whole_parameters_whatever_part_of_them_is_here(tmp_path: Path) -> None:
    shapes = {"a": (2, 3), "b": (4,), "c": (5,), "d": (2,)}
    disk = Disk()
    parts = {name: disk.raw(numbers(math.prod(shape))) for name, shape in shapes.items()}
    states = {(name, "momentum"): tensor_in(part, name, "momentum", shapes[name]) for name, part in parts.items()}
    metadata = catalog_of(disk, shapes, states)
    live = LiveState("momentum", "float32", TOUCHED)
    for rank, touched in enumerate(["ab", "bc", "cd"]):
        engine = engine_of(shapes, [live], numel=6 + rank, dp=3, rank=rank)
        # 6 elements of 'a', 'b' in two halves, and so on: ranks hold [0, 8), [8, 12), [12, 17)
        bounds = [(0, 8), (8, 12), (12, 17)][rank]
        engine = replace(engine, fragments=held_between(shapes, *bounds))
        assert "".join(part.name for part in engine.fragments) == touched
        plan = plan_load(metadata, engine, LoadOptions())
        target = target_of(plan, "momentum")
        expected = np.concatenate([parts[name].values for name in touched])
        assert (target.layout, target.numel, target.shape, target.gaps) == (
            TOUCHED,
            len(expected),
            (len(expected),),
            (),
        )
        assert loaded(plan, disk, tmp_path)["momentum"].tolist() == expected.tolist()


def held_between(shapes: Mapping[str, Shape], first: int, last: int) -> tuple[Fragment, ...]:
    """The fragments of elements ``[first, last)`` of parameters that lie one behind the other."""
    found, position = [], 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        held = FlatRange(position, position + numel).intersect(FlatRange(first, last))
        if held is not None:
            inside = FlatRange(held.start - position, held.stop - position)
            found.append(Fragment(name, shape, inside, 0, held.start - first))
        position += numel
    return tuple(found)


def test_parameters_that_are_not_restored_leave_gaps_of_their_whole_size_in_a_touched_state(tmp_path: Path) -> None:
    shapes = {"new": (3,), "a": (2, 2), "also_new": (5,), "b": (2,), "last_new": (2, 2)}
    old = {name: shapes[name] for name in ("a", "b")}
    disk = Disk()
    part = disk.raw(numbers(6))
    states = {("a", "momentum"): tensor_in(part, "a", "momentum", (2, 2))}
    states["b", "momentum"] = tensor_in(part, "b", "momentum", (2,), 4)
    live = LiveState("momentum", "float32", TOUCHED, initial=0.25)
    engine = engine_of(shapes, [live], fragments=held_between(shapes, 2, 15), numel=13)
    plan = plan_load(catalog_of(disk, old, states), engine, LoadOptions(strict=False))
    target = target_of(plan, "momentum")
    assert (target.numel, target.gaps, target.fill) == (
        18,
        (FlatRange(0, 3), FlatRange(7, 12), FlatRange(14, 18)),
        0.25,
    )
    expected = [*[0.25] * 3, *part.values[:4], *[0.25] * 5, *part.values[4:], *[0.25] * 4]
    assert loaded(plan, disk, tmp_path)["momentum"].tolist() == expected


def whole_state(part: Partition, name: str, key: str, shape: Shape) -> TensorMetadata:
    return replace(tensor_in(part, name, key, shape), has_own_shape=True)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (0,)])
def test_a_whole_state_keeps_a_shape_of_its_own(tmp_path: Path, shape: Shape) -> None:
    shapes = {"a": shape}
    disk = Disk()
    rows, columns = disk.raw(numbers(2)), disk.raw(numbers(3), "bfloat16")
    states = {("a", "row"): whole_state(rows, "a", "row", (2, 1))}
    states["a", "col"] = whole_state(columns, "a", "col", (1, 3))
    live = [LiveState("row", "float32", PER_PARAMETER, shape=(2, 1)), LiveState("col", "", PER_PARAMETER, shape=(1, 3))]
    engine = one_flat_each(shapes, live, dp=1, rank=0, replicated=False)
    plan = plan_load(catalog_of(disk, shapes, states), engine, LoadOptions())
    row, col = target_of(plan, "row"), target_of(plan, "col")
    assert (row.layout, row.shape, row.numel, row.dtype, row.gaps) == (PER_PARAMETER, (2, 1), 2, "float32", ())
    assert (col.layout, col.shape, col.numel, col.dtype) == (PER_PARAMETER, (1, 3), 3, "bfloat16"), (
        "no dtype of its own"
    )
    tensors = memory_of(plan.reads)
    carry_out(plan.reads, disk, tmp_path, tensors)
    assert tensors[1].tolist() == rows.values.tolist()
    assert tensors[2].tolist() == columns.values.tolist()


def test_a_whole_state_of_another_shape_or_precision_does_not_fit() -> None:
    shapes = {"a": (2, 3)}
    disk = Disk()
    states = {("a", "row"): whole_state(disk.raw(numbers(2)), "a", "row", (2, 1))}
    metadata = catalog_of(disk, shapes, states)
    for live, problem in (
        (LiveState("row", "float32", PER_PARAMETER, shape=(1, 2)), "shape of row differs"),
        (LiveState("row", "bfloat16", PER_PARAMETER, shape=(2, 1)), "row of this parameter would lose precision"),
    ):
        engine = one_flat_each(shapes, [live], dp=1, rank=0, replicated=False)
        with pytest.raises(MismatchError, match=problem) as caught:
            plan_load(metadata, engine, LoadOptions(ElasticConfig(on_change="error")))
        assert caught.value.parameter == "a"


def test_whole_states_that_all_ranks_hold_are_read_by_one(tmp_path: Path) -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    disk = Disk()
    parts = {name: disk.raw(numbers(2)) for name in shapes}
    states = {(name, "row"): whole_state(part, name, "row", (2,)) for name, part in parts.items()}
    metadata = catalog_of(disk, shapes, states)
    live = LiveState("row", "float32", PER_PARAMETER, shape=(2,))
    plans = [
        plan_load(metadata, one_flat_each(shapes, [live], dp=2, rank=rank, replicated=True), LoadOptions())
        for rank in range(2)
    ]
    assert plans[0].reads.shares == plans[1].reads.shares
    owned = {(share.target, share.owner) for share in plans[0].reads.shares}
    assert len(owned) == len(plans[0].reads.targets) == 4
    for rank, plan in enumerate(plans):
        assert all(target.replicated for target in plan.reads.targets)
        assert {copy.target for copy in plan.reads.items} == {target for target, owner in owned if owner == rank}
        tensors = memory_of(plan.reads)
        carry_out(plan.reads, disk, tmp_path, tensors)
        for number, target in enumerate(plan.reads.targets):
            if target.key == "row":
                truth = parts["ab"[target.flat]].values.tolist()
                assert tensors[number].tolist() == (truth if (number, rank) in owned else [UNTOUCHED] * 2)


@pytest.mark.parametrize("replicated", [False, True])
def test_a_replicated_state_is_read_by_every_rank_by_itself(tmp_path: Path, replicated: bool) -> None:
    shapes = {"a": (3,)}
    disk = Disk()
    moment, shared = disk.raw(numbers(3)), disk.raw(numbers(6))
    states = {("a", "state1"): tensor_in(moment, "a", "state1", (3,))}
    saved = ReplicatedState("table", "float32", (2, 3), shared.file, shared.byte_offset, 7)
    metadata = catalog_of(disk, shapes, states, [saved])
    live = [LiveState("state1", "float32"), LiveState("table", "float32", REPLICATED, shape=(2, 3))]
    for rank in range(2):
        engine = one_flat_each(shapes, live, dp=2, rank=rank, replicated=replicated)
        plan = plan_load(metadata, engine, LoadOptions())
        target = target_of(plan, "table")
        assert (target.layout, target.shape, target.numel, target.gaps, target.replicated) == (
            REPLICATED,
            (2, 3),
            6,
            (),
            False,
        )
        assert target.flat == 0
        assert plan.reads.targets.index(target) not in {share.target for share in plan.reads.shares}
        assert loaded(plan, disk, tmp_path)["table"].tolist() == shared.values.tolist()


def test_a_scratch_state_has_no_target() -> None:
    shapes = {"a": (3,)}
    disk = Disk()
    moment = disk.raw(numbers(3))
    metadata = catalog_of(disk, shapes, {("a", "state1"): tensor_in(moment, "a", "state1", (3,))})
    live = [LiveState("buffer", "float32", SCRATCH, shape=(1,)), LiveState("state1", "float32")]
    plan = plan_load(metadata, engine_of(shapes, live), LoadOptions())
    assert [target.key for target in plan.reads.targets] == [MASTER, "state1"]
    assert [copy.target for copy in plan.reads.items] == [1, 0]


# --- 8-bit states -----------------------------------------------------------------------------------------------


def coded_states(
    disk: Disk, shapes: Mapping[str, Shape], key: str = "state1", blocks: BlockFormat = FOUR
) -> tuple[Tensors, Partition]:
    """All parameters one behind the other in one partition."""
    part = coded(disk, sum(map(math.prod, shapes.values())), blocks)
    tensors: Tensors = {}
    position = 0
    for name, shape in shapes.items():
        tensors[name, key] = tensor_in(part, name, key, shape, position)
        position += math.prod(shape)
    return tensors, part


@pytest.mark.parametrize(("blocks", "zero"), [(FOUR, 100), (POSITIVE, 0)])
def test_a_coded_state_fills_two_targets_with_zeros_in_the_gaps(tmp_path: Path, blocks: BlockFormat, zero: int) -> None:
    saved, live = {"a": (6,), "b": (4,)}, {"a": (6,), "new": (9,), "b": (4,)}
    disk = Disk()
    states, part = coded_states(disk, saved, blocks=blocks)
    engine = engine_of(live, [LiveState("state1", "uint8", blocks=blocks, initial=3.0)], numel=22)
    plan = plan_load(catalog_of(disk, saved, states), engine, LoadOptions(strict=False))
    assert [target.key for target in plan.reads.targets] == [MASTER, "state1", blocks.scales]
    _, codes, scales = plan.reads.targets
    assert codes == TargetTensor("state1", 0, "", 22, "uint8", (FlatRange(6, 15), FlatRange(19, 22)), fill=zero)
    assert scales == TargetTensor(blocks.scales, 0, "", 6, "float32", (FlatRange(0, 6),))
    assert plan.blocks == 6
    got = loaded(plan, disk, tmp_path)
    values = decoded(got["state1"], got[blocks.scales], blocks)
    assert values[:6].tobytes() == part.values[:6].tobytes()
    assert not values[6:15].any()
    assert not values[19:].any()
    assert set(got["state1"][8:12].tolist()) == {zero}, "a block without any element in the checkpoint"
    assert got[blocks.scales][2] == 0.0
    bound = (blocks.codebook.bound + ROUNDING) * np.repeat(got[blocks.scales], 4)[15:19]
    assert (np.abs(values[15:19] - part.values[6:]) <= bound).all()


def test_codes_become_values_where_the_live_optimizer_keeps_values(tmp_path: Path) -> None:
    disk = Disk()
    states, part = coded_states(disk, TWO)
    live = LiveState("state1", "float32", initial=0.5)
    plan = plan_load(
        catalog_of(disk, TWO, states),
        engine_of(TWO, [live], numel=18),
        LoadOptions(ElasticConfig(on_change="error")),
    )
    target = target_of(plan, "state1")
    assert (target.dtype, target.numel, target.gaps, target.fill) == ("float32", 18, (FlatRange(16, 18),), 0.5)
    assert ([target.key for target in plan.reads.targets], plan.blocks) == ([MASTER, "state1"], 0)
    assert loaded(plan, disk, tmp_path)["state1"].tolist() == [*part.values.tolist(), 0.5, 0.5]


def test_values_become_codes_where_the_live_optimizer_keeps_codes(tmp_path: Path) -> None:
    disk = Disk()
    part = disk.raw(numbers(6))
    states = {("a", "state1"): tensor_in(part, "a", "state1", (6,))}
    metadata = catalog_of(disk, {"a": (6,)}, states)
    plan = plan_load(metadata, engine_of({"a": (6,)}, [CODED]), LoadOptions())
    got = loaded(plan, disk, tmp_path)
    values = decoded(got["state1"], got["absmax1"], FOUR)
    assert (np.abs(values - part.values) <= (FOUR.codebook.bound + ROUNDING) * np.repeat(got["absmax1"], 4)[:6]).all()
    with pytest.raises(MismatchError, match="requantized") as caught:
        plan_load(metadata, engine_of({"a": (6,)}, [CODED]), LoadOptions(ElasticConfig(on_change="error")))
    assert str(caught.value.found).startswith("2 of 2 blocks")


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_partitions_of_whole_blocks_are_loaded_exactly_at_any_degree(tmp_path: Path, dp: int) -> None:
    shapes = {"a": (5,), "b": (7,), "c": (1, 3), "d": (1,)}
    disk = Disk()
    states, part = coded_states(disk, shapes)
    metadata = catalog_of(disk, shapes, states)
    for rank in range(dp):
        step = 16 // dp
        engine = engine_of(shapes, [CODED], numel=step, dp=dp, rank=rank, fragments=cut(shapes, step, rank))
        plan = plan_load(metadata, engine, LoadOptions(ElasticConfig(on_change="error")))
        assert plan.reads.requantize_items == ()
        got = loaded(plan, disk, tmp_path)
        values = decoded(got["state1"], got["absmax1"], FOUR)
        assert values.tobytes() == part.values[rank * step : (rank + 1) * step].tobytes()


def test_without_realignment_a_plan_that_would_quantize_anew_is_refused() -> None:
    shapes = {"a": (5,), "b": (11,)}
    disk = Disk()
    states, _ = coded_states(disk, shapes)
    metadata = catalog_of(disk, shapes, states)
    # 16 elements: rank 1 holds those from 7 to 14 (or from 5 to 10), which begin and end inside of blocks
    for step, rank, found in ((7, 0, ""), (7, 1, "2 of 2 blocks"), (7, 2, ""), (5, 1, "1 of 2 blocks")):
        engine = engine_of(shapes, [CODED], numel=step, dp=3, rank=rank, fragments=cut(shapes, step, rank))
        assert plan_load(metadata, engine, LoadOptions()).reads.requantize_items or rank == 0
        if not found:
            plan_load(metadata, engine, LoadOptions(ElasticConfig(on_change="error")))
            continue
        with pytest.raises(MismatchError, match="8-bit blocks of state1 would have to be requantized") as caught:
            plan_load(metadata, engine, LoadOptions(ElasticConfig(on_change="error")))
        assert "on_change" in str(caught.value.expected)
        assert {"on_change": "warn"} in [each.config for each in caught.value.remedies]
        assert "align_partitions" in str(caught.value.remedy)
        assert str(caught.value.found).startswith(found)
        assert caught.value.parameter == "b"
        assert caught.value.file == "/ckpt/tag"


def test_without_realignment_blocks_may_still_be_split_or_cut_short() -> None:
    disk = Disk()
    eight = BlockFormat(8, "absmax1", SIGNED[0])
    states, _ = coded_states(disk, {"a": (16,)}, blocks=eight)
    metadata = catalog_of(disk, {"a": (16,)}, states)
    for rank in range(2):
        engine = engine_of({"a": (16,)}, [CODED], numel=12, dp=2, rank=rank, fragments=cut({"a": (16,)}, 12, rank))
        plan = plan_load(metadata, engine, LoadOptions(ElasticConfig(on_change="error")))
        assert plan.reads.requantize_items


def test_the_second_row_is_refused_as_well_as_the_first() -> None:
    disk = Disk()
    raw, part = coded(disk, 4), coded(disk, 5)
    shapes = {"a": (4,)}
    chunks = (chunk(raw, 0, 4, 0), chunk(part, 4, 4, 1))
    states = {("a", "m"): TensorMetadata("a", "m", (2, 4), "uint8", chunks_of(*chunks))}
    live = LiveState("m", "uint8", planes=2, blocks=FOUR)
    with pytest.raises(MismatchError, match="requantized") as caught:
        plan_load(
            catalog_of(disk, shapes, states),
            engine_of(shapes, [live]),
            LoadOptions(ElasticConfig(on_change="error")),
        )
    assert str(caught.value.found).startswith("1 of 1 blocks")


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_coded_states_that_all_ranks_hold_are_dealt_out_whole(tmp_path: Path, dp: int) -> None:
    shapes = {"a": (12,), "b": (2, 5), "c": (7,), "d": (3,)}
    disk = Disk()
    states, part = coded_states(disk, shapes)
    metadata = catalog_of(disk, shapes, states)
    plans = [
        plan_load(metadata, one_flat_each(shapes, [CODED], dp=dp, rank=rank, replicated=True), LoadOptions())
        for rank in range(dp)
    ]
    targets, shares = plans[0].reads.targets, plans[0].reads.shares
    owner = {share.target: share.owner for share in shares}
    assert sorted(owner) == list(range(len(targets))) == sorted(share.target for share in shares)
    assert all(share.range == FlatRange(0, targets[share.target].numel) for share in shares)
    assert len(set(owner.values())) == dp
    pairs = [number for number, target in enumerate(targets) if target.key == "state1"]
    assert all(owner[number] == owner[number + 1] for number in pairs), "codes and scales belong together"
    together = memory_of(plans[0].reads)
    for rank, plan in enumerate(plans):
        assert (plan.reads.targets, plan.reads.shares, plan.blocks) == (targets, shares, 3 + 3 + 2 + 1)
        mine = {number for number, held in owner.items() if held == rank}
        recoded = {recode.target for recode in plan.reads.requantize_items} | {
            recode.scales_target for recode in plan.reads.requantize_items
        }
        assert {copy.target for copy in plan.reads.items} | recoded == mine
        tensors = memory_of(plan.reads)
        carry_out(plan.reads, disk, tmp_path, tensors)
        for number in mine:
            together[number] = tensors[number]
    assert any(plan.reads.requantize_items for plan in plans)
    position = 0
    for number in pairs:
        codes, scales = together[number].numpy(), together[number + 1].numpy()
        values = decoded(codes, scales, FOUR)
        truth = part.values[position : position + len(codes)]
        position += len(codes)
        assert (np.abs(values - truth) <= (FOUR.codebook.bound + ROUNDING) * np.repeat(scales, 4)[: len(codes)]).all()


def test_targets_that_are_read_together_go_to_whoever_has_least() -> None:
    offered = [(100, 10), (8, 2), (8, 2), (50, 1), (0, 0), (200, 50), (1, 1)]
    mine = []
    for rank in range(2):
        sharing = BroadcastRanges(2, rank)
        both = [(TargetTensor("m", 0, "", c, "uint8"), TargetTensor("s", 0, "", s, "float32")) for c, s in offered]
        mine.append([sharing.mine(2 * number, targets).numel > 0 for number, targets in enumerate(both)])
        owners = {share.target: share.owner for share in sharing.shares}
        # bytes so far: 140|0, 140|16, 140|32, 140|86, 140|86, 140|486
        assert owners == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 10: 1, 11: 1, 12: 0, 13: 0}
        assert mine[rank] == [(0, 1, 1, 1, None, 1, 0)[n] == rank for n in range(len(offered))]


def test_a_coded_state_of_another_shape_does_not_fit() -> None:
    disk = Disk()
    states, _ = coded_states(disk, {"a": (2, 3)})
    metadata = catalog_of(disk, {"a": (2, 3)}, states)
    turned = replace(states["a", "state1"], shape=(3, 2))
    metadata = replace(metadata, tensors={**metadata.tensors, ("a", "state1"): turned})
    with pytest.raises(MismatchError, match="shape of state1 differs"):
        plan_load(metadata, engine_of({"a": (2, 3)}, [CODED]), LoadOptions())


def test_a_decoded_state_that_would_lose_precision_does_not_fit() -> None:
    disk = Disk()
    states, _ = coded_states(disk, {"a": (4,)})
    live = LiveState("state1", "bfloat16")
    with pytest.raises(MismatchError, match="state1 of this parameter would lose precision"):
        plan_load(catalog_of(disk, {"a": (4,)}, states), engine_of({"a": (4,)}, [live]), LoadOptions())


# --- parts of a plan, and reading it ----------------------------------------------------------------------------


def test_a_plan_is_divided_by_flat_partitions_and_requantize_items_go_with_their_targets(tmp_path: Path) -> None:
    shapes = {"a": (6,), "b": (5,), "c": (5,)}
    disk = Disk()
    states, part = coded_states(disk, shapes)
    wide = LiveState("state1", "float32")
    engine = one_flat_each(shapes, [CODED], dp=1, rank=0, replicated=False)
    flats = (engine.flats[0], replace(engine.flats[1], states=(wide,)), engine.flats[2])
    plan = plan_load(catalog_of(disk, shapes, states), replace(engine, flats=flats), LoadOptions())
    parts = plan.reads.by_flat()
    assert {flat: numbers for flat, (numbers, _) in parts.items()} == {0: [0, 1, 2], 1: [3, 4], 2: [5, 6, 7]}
    every = [each for _, each in parts.values()]
    assert sum(len(each.requantize_items) for each in every) == len(plan.reads.requantize_items) > 0
    assert sum(len(each.items) for each in every) == len(plan.reads.items)
    (widened,) = parts[1][1].requantize_items
    assert (widened.target, widened.scales_target, widened.blocks) == (1, -1, None)
    assert {(item.target, item.scales_target) for item in parts[2][1].requantize_items} == {(1, 2)}
    at_once = memory_of(plan.reads)
    carry_out(plan.reads, disk, tmp_path, at_once)
    for members, each in parts.values():
        assert each.targets == tuple(plan.reads.targets[number] for number in members)
        tensors = memory_of(each)
        carry_out(each, disk, tmp_path, tensors)
        for number, tensor in zip(members, tensors, strict=True):
            assert torch.equal(tensor, at_once[number])
    assert at_once[4].tolist() == part.values[6:11].tolist()


def test_targets_of_one_flat_partition_need_not_be_neighbours() -> None:
    part = Disk().coded(range(8), (1.0, 2.0), FOUR)
    targets = [TargetTensor("state1", flat, "", 4, "uint8") for flat in (1, 0)] + [
        TargetTensor("absmax1", 0, "", 1, "float32")
    ]
    targets += [TargetTensor("buffer", -1, "x", 4, "float32"), TargetTensor("absmax1", 1, "", 1, "float32")]
    sources = (part.piece(2, 0, 4),)
    requantize = tuple(RequantizeItem(target, 0, 4, FOUR, scales, 0, sources) for target, scales in ((0, 4), (1, 2)))
    plan = ReadPlan((), tuple(targets), (ReadItem(0, 0, 3, 0, 4, "float32"),), requantize)
    parts = plan.by_flat()
    assert {flat: (members, each.requantize_items, each.items) for flat, (members, each) in parts.items()} == {
        1: ([0, 4], (RequantizeItem(0, 0, 4, FOUR, 1, 0, sources),), ()),
        0: ([1, 2], (RequantizeItem(0, 0, 4, FOUR, 1, 0, sources),), ()),
        -1: ([3], (), (ReadItem(0, 0, 0, 0, 4, "float32"),)),
    }


@pytest.mark.parametrize("kind", ["ordinary", "with gaps", "transposed"])
@pytest.mark.parametrize("staging", [1, 200, 1 << 20])
def test_recodes_are_read_into_tensors_of_any_strides(tmp_path: Path, kind: str, staging: int) -> None:
    disk = Disk()
    states, part = coded_states(disk, {"a": (4, 6)})
    live = LiveState("state1", "float32")
    plan = plan_load(catalog_of(disk, {"a": (4, 6)}, states), engine_of({"a": (4, 6)}, [live]), LoadOptions())
    memory = torch.full((48,), float(UNTOUCHED))
    target = {"ordinary": memory[:24], "with gaps": memory[::2], "transposed": memory[:24].view(6, 4).t()}[kind]
    stats = carry_out(
        plan.reads, disk, tmp_path, [torch.zeros(24), target], ReadOptions(staging_nbytes=staging, threads=2)
    )
    assert target.flatten().tolist() == part.values.tolist()
    assert (memory == UNTOUCHED).sum() == 24
    assert stats.blocks == 0
    assert stats.staged_nbytes >= 24 + 6 * 4
    assert stats.nbytes == 24 * 4 + stats.staged_nbytes


def test_the_reader_tells_what_was_quantized_anew(tmp_path: Path) -> None:
    disk = Disk()
    part = disk.coded(range(50, 62), (1.0, 2.0, 3.0), FOUR)
    states = {("a", "state1"): tensor_in(part, "a", "state1", (9,), 3)}
    plan = plan_load(catalog_of(disk, {"a": (9,)}, states), engine_of({"a": (9,)}, [CODED]), LoadOptions())
    tensors = memory_of(plan.reads)
    stats = carry_out(plan.reads, disk, tmp_path, tensors)
    values = decoded(tensors[1].numpy(), tensors[2].numpy(), FOUR)
    scales = np.repeat(tensors[2].numpy(), 4)[:9]
    worst = float((np.abs(values - part.values[3:]) / scales).max())
    assert (stats.blocks, stats.worst_error) == (2, pytest.approx(worst, abs=ROUNDING))
    assert worst > 0.0
    assert (stats.nbytes, stats.staged_nbytes, stats.calls) == (9 * 4 + 9 + 12, 9 + 12, 3)  # masters, codes, scales
    small = memory_of(plan.reads)
    again = carry_out(plan.reads, disk, tmp_path, small, ReadOptions(staging_nbytes=1, threads=3))
    assert all(torch.equal(one, other) for one, other in zip(tensors, small, strict=True))
    assert (again.blocks, again.worst_error) == (2, stats.worst_error)
    assert again.calls == 7  # a block at a time


def test_shares_of_an_empty_flat_partition_are_not_dealt_out() -> None:
    shapes = {"a": (0,), "b": (3,)}
    disk = Disk()
    part = coded(disk, 3)
    states = {("b", "state1"): tensor_in(part, "b", "state1", (3,))}
    states["a", "state1"] = TensorMetadata("a", "state1", (0,), "uint8", chunks_of())
    metadata = catalog_of(disk, {"b": (3,)}, states)
    empty = TensorMetadata("a", MASTER, (0,), "float32", chunks_of())
    metadata = replace(
        metadata,
        parameters={**metadata.parameters, "a": SavedParameter((0,), 0, (("step", 4.0),))},
        tensors={**metadata.tensors, ("a", MASTER): empty},
    )
    engine = one_flat_each(shapes, [CODED], dp=1, rank=0, replicated=True)
    plan = plan_load(metadata, engine, LoadOptions())
    assert [target.numel for target in plan.reads.targets] == [0, 0, 0, 3, 3, 1]
    assert plan.reads.shares == tuple(
        BroadcastRange(target, FlatRange(0, plan.reads.targets[target].numel), 0) for target in (3, 4, 5)
    )

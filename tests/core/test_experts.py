"""FQNs of experts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import PartitionRule, StorageChunk, chunks_of, placements
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.fqn import (
    EXPERTS,
    ExpertName,
    expert_name,
    sliced,
    slices,
    with_slices,
    with_stacks,
)
from elastic_ckpt.core.metadata import CheckpointMetadata, SavedParameter, SourceFacts, TensorMetadata
from elastic_ckpt.errors import DamagedError, LayoutError, UnsupportedError


@given(st.sampled_from(["", "layers.3.mlp.", "a."]), st.integers(0, 999), st.sampled_from(["w", "fc1.weight"]))
def test_the_parts_of_a_name_make_the_name(layer: str, number: int, rest: str) -> None:
    parts = ExpertName(layer, number, rest)
    assert expert_name(str(parts)) == parts


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_number_their_experts_one_after_the_other(ep: int, local: int) -> None:
    names = [ExpertName("", number, "w").on(rank, local).number for rank in range(ep) for number in range(local)]
    assert names == list(range(ep * local))


def test_other_names_are_of_no_expert() -> None:
    for name in (f"a.{EXPERTS}", f"{EXPERTS}x.weight", f"a{EXPERTS}0.weight", "mlp.experts.0.weight", f"{EXPERTS}0"):
        assert expert_name(name) is None, name


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    st.sampled_from([(), (3,), (2, 3)]),
    st.integers(1, 9),
    st.integers(0, 9),
)
def test_slices_are_partitioned_where_their_stacked_parameter_is(
    experts: list[int], shape: tuple[int, ...], step: int, shift: int
) -> None:
    """Element by element: rank, and place in the flat tensor."""
    parts = list(slices("w1", (len(experts), *shape), experts))
    assert [(part.name, part.shape) for part in parts] == [(f"w1.{expert}", shape) for expert in experts]
    rule = PartitionRule(len(experts) * math.prod(shape), step, shift, start=5)

    def places(rule: PartitionRule) -> list[tuple[int, int]]:
        held = {rank: part.range for rank in rule.ranks for part in placements([rule], rank)}
        found = {e: rank for rank, part in held.items() for e in range(part.start, part.stop)}
        return [(found[e], rule.start + (e + rule.shift) % rule.step) for e in range(rule.numel)]

    other = PartitionRule(2, step)
    shapes, rules = sliced([("w1", (len(experts), *shape)), ("gate", (2,))], [rule, other], {"w1": experts})
    assert (shapes, rules[-1]) == ([*((part.name, part.shape) for part in parts), ("gate", (2,))], other)
    assert list(chain.from_iterable(map(places, rules[:-1]))) == places(rule)


def saved_slices(*states: str, rows: int = 1, steps: tuple[float, ...] = (4.0, 4.0)) -> CheckpointMetadata:
    """Two experts of three elements, one in a file of its own, the other in two halves of another."""
    row = (rows,) if rows > 1 else ()
    wholes = [StorageChunk(FlatRange(3 * r, 3 * r + 3), 0, 12 * r) for r in range(rows)]
    halves = [StorageChunk(FlatRange(3 * r + at, 3 * r + 1 + 2 * at), 1 + at, r) for r in range(rows) for at in (0, 1)]
    sources = (chunks_of(*wholes), chunks_of(*halves))
    tensors = [
        TensorMetadata(f"w1.{expert}", key, (*row, 3), "float32", sources[expert])
        for expert in (0, 1)
        for key in states
    ]
    return CheckpointMetadata(
        SourceFacts("native", "here", "step4", 1, 2, "0.19.8"),
        (),
        {f"w1.{expert}": SavedParameter((3,), 0, (("step", step),)) for expert, step in enumerate(steps)},
        {(tensor.name, tensor.key): tensor for tensor in tensors},
        (),
        stacked={"w1": 2, "frozen": 2},
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_slices_are_stacked_again(rows: int) -> None:
    found = with_stacks(saved_slices("fp32", "exp_avg", rows=rows))
    assert found.parameters == {"w1": SavedParameter((2, 3), 0, (("step", 4.0),))}
    assert found.tensors.keys() == {("w1", "fp32"), ("w1", "exp_avg")}
    tensor = found.tensors["w1", "fp32"]
    assert tensor.shape == ((rows,) if rows > 1 else ()) + (2, 3)
    assert tensor.sources[0].tile(rows * 6)
    assert [chunk.file for chunk in tensor.chunks] == [0, 1, 2] * rows


def test_slices_with_different_states_are_not_stacked() -> None:
    whole = saved_slices("fp32", "exp_avg")
    tensors = {name: tensor for name, tensor in whole.tensors.items() if name != ("w1.1", "exp_avg")}
    without = replace(whole, tensors=tensors)
    for metadata in (without, saved_slices("fp32", steps=(4.0, 3.0)), saved_slices("fp32", steps=(4.0,))):
        with pytest.raises(DamagedError, match=r"(?s)same states.*w1"):
            with_stacks(metadata)


def universal(shape: tuple[int, ...] = (4, 3), has_own_shape: bool = False) -> CheckpointMetadata:
    """A stacked parameter whose elements begin at byte 100 of a file."""
    source = chunks_of(StorageChunk(FlatRange(0, math.prod(shape)), 7, 100))
    return CheckpointMetadata(
        SourceFacts("universal", "here", "step4", 1, 2, "0.19.8", by_rank=False),
        (),
        {"w1": SavedParameter(shape, 0, ()), "head": SavedParameter((1,), 0, ())},
        {("w1", "fp32"): TensorMetadata("w1", "fp32", shape, "float32", source, has_own_shape)},
        (),
        stacked={"w1": 4, "w2": 4},
    )


def test_a_universal_checkpoints_stacked_parameters_are_sliced() -> None:
    found = with_slices(universal())
    assert {name: saved.shape for name, saved in found.parameters.items()} == {"head": (1,)} | {
        f"w1.{expert}": (3,) for expert in range(4)
    }
    for expert in range(4):
        (chunk,) = found.tensors[f"w1.{expert}", "fp32"].chunks
        assert chunk == StorageChunk(FlatRange(0, 3), 7, 100 + 12 * expert)
    assert with_stacks(found).parameters == universal().parameters
    with pytest.raises(LayoutError, match=r"(?s)does not have the experts.*4 experts.*\(5, 3\)"):
        with_slices(universal((5, 3)))
    with pytest.raises(UnsupportedError, match="as a whole"):
        with_slices(universal(has_own_shape=True))
    without = with_slices(universal(has_own_shape=True), with_states=False)
    assert without.parameters == found.parameters and not without.tensors

"""Tensors in closed form, beside those that are listed."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import FlatTensors, PartitionedChunks, PartitionRule, chunks_of, parameter_rules
from elastic_ckpt.core.metadata import BUFFER, MASTER, DerivedTensors, Place, TensorMetadata, TensorTable


def flat(offset: int, numel: int, rows: int = 1) -> FlatTensors:
    return FlatTensors(range(2), array("q", [offset]), numel, "float32", 4, rows)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3), st.booleans())
def test_a_table_has_what_a_dict_of_all_tensors_has(groups: list[list[int]], with_listed: bool) -> None:
    table, expected = TensorTable(), {}
    for number, numels in enumerate(groups):
        shapes = [(f"p{number}.{at}", (numel,)) for at, numel in enumerate(numels)]
        rules = parameter_rules(numels, [-(-numel // 2) for numel in numels])
        states = {MASTER: flat(0, sum(numels)), "exp_avg": flat(100, sum(numels)), "wide": flat(200, sum(numels), 2)}
        table.add_flat(shapes, rules, states)
        for (name, shape), rule in zip(shapes, rules, strict=True):
            for key, state in states.items():
                sources = (PartitionedChunks(rule, state),) if rule.numel else chunks_of()
                whole = (2, *shape) if key == "wide" else shape
                expected[name, key] = TensorMetadata(name, key, whole, "float32", sources)
    if with_listed:
        more = {("b", BUFFER): TensorMetadata("b", BUFFER, (1,), "int64", chunks_of())}
        table.add(more)
        expected |= more
    assert table == expected and list(table) == list(expected) and len(table) == len(expected)
    for place in [*expected, ("p0.0", "other"), ("unknown", MASTER)]:
        assert (place in table) == (place in expected)
        assert table.get(place) == expected.get(place) and table.get(place) is table.get(place)


def test_what_is_not_there_is_no_tensor() -> None:
    table = TensorTable()
    table.add_flat([("a", (4,))], [PartitionRule(4, 2)], {MASTER: flat(0, 4)})
    for place in (("a", "exp_avg"), ("b", MASTER)):
        with pytest.raises(KeyError):
            table[place]
    assert "a" not in table


def test_a_tensor_that_is_listed_too_is_there_once() -> None:
    """Masters of experts without ZeRO are the weights in their own files."""
    table, own = TensorTable(), TensorMetadata("a", MASTER, (4,), "float32", chunks_of())
    table.add_flat([("a", (4,)), ("b", (2,))], [PartitionRule(4, 6), PartitionRule(2, 6, 4)], {MASTER: flat(0, 6)})
    assert table["a", MASTER] != own
    table.add({("a", MASTER): own})
    assert table["a", MASTER] is own and ("a", MASTER) in table
    assert sorted(table) == [("a", MASTER), ("b", MASTER)] and len(table) == 2
    assert table == dict(table) and [tensor.name for tensor in table.values()].count("a") == 1


def test_tensors_that_derive_from_others_are_made_when_they_are_first_asked_for() -> None:
    made: list[Place] = []

    def make(new: Place, old: Place) -> TensorMetadata:
        made.append(old)
        return TensorMetadata(new[0], new[1], (1,), "float32", ())

    table = DerivedTensors({("b", "fp32"): ("a", "fp32")}, make)
    assert list(table) == [("b", "fp32")] and len(table) == 1 and ("b", "fp32") in table and ("a", "fp32") not in table
    assert made == []
    assert table["b", "fp32"] is table["b", "fp32"] and table["b", "fp32"].name == "b" and made == [("a", "fp32")]
    assert table.get(("a", "fp32")) is None

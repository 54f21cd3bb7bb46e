"""Scalar states and hyperparameters in which ranks differ."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.values import (
    LeftInFile,
    PerRank,
    TensorValue,
    common,
    differing,
    left_in_file,
    merged,
    moved,
    of_rank,
    refuse_left_in_file,
)
from elastic_ckpt.errors import UnsupportedError

TENSOR = LeftInFile("a tensor")
NUMBERS = st.sampled_from([0.0, -0.0, 1, 1.0, True, None, math.nan, "a"])
POINTS = st.builds(TensorValue, st.sampled_from(["float32", "int32"]), st.just(()), st.tuples(st.sampled_from([0, 1])))
RANKS = st.lists(st.dictionaries(st.sampled_from("abc"), NUMBERS | POINTS), min_size=1, max_size=4)


def by_file(ranks: list[dict[str, Any]], first: int = 0) -> dict[str, Any]:
    return merged((range(at, at + 1), values) for at, values in enumerate(ranks, start=first))


@given(RANKS, st.integers(0, 3))
def test_each_rank_finds_what_it_saved_and_nothing_else(ranks: list[dict[str, Any]], before: int) -> None:
    found = moved(by_file(ranks), before)
    for number, values in enumerate(ranks):
        assert repr(sorted(of_rank(found, number + before).items())) == repr(sorted(values.items()))
    same = {key for key in found if len({repr(values.get(key, "-")) for values in ranks}) == 1}
    assert common(found).keys() == same and set(differing([found])) == found.keys() - same


@given(RANKS, RANKS)
def test_model_parallel_ranks_keep_the_values_of_their_own_files(one: Any, two: Any) -> None:
    found = merged([(range(len(one)), by_file(one)), (range(len(one), len(one) + len(two)), by_file(two))])
    for number, values in enumerate([*one, *two]):
        assert repr(sorted(of_rank(found, number).items())) == repr(sorted(values.items()))


def test_a_tensor_equals_its_number_and_tells_its_dtype() -> None:
    step = TensorValue("float32", (), (3.0,))
    assert step == 3 and {step} == {3.0} and (int(step), float(step)) == (3, 3.0)
    assert step != TensorValue("float32", (1,), (3.0,)) and repr(step) == "tensor(3.0, float32)"
    assert repr(PerRank(((0, 0.5), (1, step), (2, 0.5)))) == "0.5, tensor(3.0, float32) (by rank)"


@pytest.mark.parametrize(
    "value",
    [
        TENSOR,
        [1, TENSOR],
        (TENSOR,),
        {"a": TENSOR},
        {TENSOR: 1},
        {TENSOR},
        frozenset({TENSOR}),
        Namespace(a=[TENSOR]),
        {"a": [({"b": TENSOR},)]},
    ],
)
def test_what_was_not_read_is_found_and_refused(value: Any) -> None:
    assert list(left_in_file(value)) == [TENSOR]
    with pytest.raises(UnsupportedError, match='"mine" of a param group holds a tensor') as caught:
        refuse_left_in_file({"lr": 0.1, "mine": value}, ["b", "a"], "here")
    error = caught.value
    assert (error.parameter, error.file, error.found) == ("a, b", "here", "a tensor")
    assert error.expected and "keep_live" in str(error.remedy)


@pytest.mark.parametrize("value", [0.5, "a tensor", None, {"a": [1, ("b", {2})]}, Namespace(a=1)])
def test_what_was_read_is_not_refused(value: Any) -> None:
    assert list(left_in_file(value)) == []
    refuse_left_in_file({"mine": value}, ["a"], "here")

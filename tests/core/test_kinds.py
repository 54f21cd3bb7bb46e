"""Kinds of values: what counts as a number is one, whatever holds it."""

from __future__ import annotations

from numbers import Real
from typing import Any

import pytest

from elastic_ckpt.core.kinds import NUMBER, is_finite, kind_of, number_of, strange_value
from tests.distributed.malformed import VALUES


@pytest.mark.parametrize("name", VALUES)
def test_a_number_is_a_number_of_pythons(name: str) -> None:
    value: Any = VALUES[name]
    if kind_of(value) == NUMBER:
        assert isinstance(number_of(value), Real)
        is_finite(value)


@pytest.mark.parametrize("live", [0.1, [0.1], {"lr": 0.1}, None, [], "x"])
@pytest.mark.parametrize("name", VALUES)
def test_any_value_in_the_place_of_any_is_judged(name: str, live: Any) -> None:
    value = VALUES[name]
    for saved in (value, [value], {"lr": value}):
        strange = strange_value("lr", live, saved)
        assert strange is None or strange.found


@pytest.mark.parametrize("name", ["no time of no unit", "text in an array", "a scalar array", "bytes in an array"])
def test_no_date_and_no_text_takes_the_place_of_a_number(name: str) -> None:
    value = VALUES[name].reshape(-1)[:1]
    is_number = name == "a scalar array"
    assert (strange_value("lr", 0.1, value) is None) is is_number

"""Hyperparameters that were not read, wherever they are in a collection."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from elastic_ckpt.core.hyperparameters import LeftInFile, left_in_file, refuse_left_in_file
from elastic_ckpt.errors import UnsupportedError

TENSOR = LeftInFile("a tensor")


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

"""Bounds on what a walk through a tree costs."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict
from typing import Any

import pytest

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.stand_ins import StandIn
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.torch_archive.tree import check_tree, replace_leaves

REF = TensorRef("float32", (2, 3), (3, 1), 64)


def nested(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


def doubled(levels: int) -> list[Any]:
    tree: list[Any] = [1]
    for _ in range(levels):
        tree = [tree, tree]
    return tree


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {"list": []}
    tree["list"].append(tree)
    return tree


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (nested(100_000), "deep"),
        (doubled(60), "again and again"),
        (cyclic(), "contains itself"),
        ({"x": Holder(REF)}, "Holder"),
        ({"x": {REF}}, "set"),
    ],
    ids=["deep", "exponential", "cyclic", "hidden in an object", "hidden in a set"],
)
def test_what_cannot_be_walked_through_is_refused(tree: Any, found: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_tree(tree)
    assert found in str(caught.value.found)


@pytest.mark.parametrize(
    "tree",
    [
        REF,
        {"a": [REF, (REF, {"b": Namespace(c=REF)})]},
        nested(60),
        [[betas := (0.9, 0.999)] * 500, betas],
        {"x": Holder({"y": [1, 2]}), "z": {1, 2}},
    ],
    ids=["tensor", "containers", "60 deep", "shared tuples", "objects"],
)
def test_what_can_be_walked_through_is_not(tree: Any) -> None:
    check_tree(tree)


def test_leaves_are_replaced_in_a_copy() -> None:
    tree = {"a": [1, (2,)], "b": OrderedDict(z=3, y=4), "c": Namespace(d=5)}
    copied = replace_leaves(tree, lambda leaf: -leaf)
    assert copied == {"a": [-1, (-2,)], "b": OrderedDict(z=-3, y=-4), "c": Namespace(d=-5)}
    assert tree["a"] == [1, (2,)] and type(copied["b"]) is OrderedDict


def test_keys_members_attributes_and_sharing_are_copied_too() -> None:
    stand_in = StandIn("deepspeed.Enum", (3,))
    vars(stand_in)["scale"] = shared = [4]
    ordered = OrderedDict(a=shared)
    ordered._metadata = shared  # type: ignore[attr-defined]
    tree = [{stand_in: 5}, {(6, 7)}, ordered, shared, Counter(n=2)]
    keys, members, copied, again, counter = replace_leaves(tree, lambda leaf: -leaf if type(leaf) is int else leaf)
    (key,) = keys
    assert key.args == (-3,) and key.scale is again and keys[key] == -5
    assert members == {(-6, -7)} and again == [-4] and again is not shared
    assert copied["a"] is again and copied._metadata is again
    assert counter == Counter(n=-2) and stand_in.args == (3,)

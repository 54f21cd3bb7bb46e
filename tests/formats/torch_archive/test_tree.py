"""Bounds on what a walk through a tree costs."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict
from typing import Any

import pytest

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import Call, Global
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
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


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (nested(100_000), "deep"),
        (doubled(60), "again and again"),
        (cyclic(), "contains itself"),
    ],
    ids=["deep", "exponential", "cyclic"],
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
        {"x": Call(Global("a", users=dict), (REF, {"y": [1, 2]})), "z": {1, 2, REF}},
    ],
    ids=["tensor", "containers", "60 deep", "shared tuples", "objects"],
)
def test_what_can_be_walked_through_is_not(tree: Any) -> None:
    check_tree(tree)


def test_leaves_are_replaced_in_a_copy() -> None:
    tree = {"a": [REF, (REF, 1)], "b": OrderedDict(z=REF, y=4), "c": Namespace(d=REF)}
    copied = replace_leaves(tree, lambda leaf: leaf.shape)
    assert copied == {"a": [(2, 3), ((2, 3), 1)], "b": OrderedDict(z=(2, 3), y=4), "c": Namespace(d=(2, 3))}
    assert tree["a"] == [REF, (REF, 1)] and type(copied["b"]) is OrderedDict


def test_what_contains_itself_does_so_in_the_copy() -> None:
    tree = cyclic()
    tree["pair"] = pair = ([], 1)
    pair[0].append(pair)
    tree["deep"] = nested(100_000)
    copied = replace_leaves(tree, lambda leaf: leaf)
    assert copied["list"][0] is copied is not tree
    assert copied["pair"][0][0] is copied["pair"] is not pair


def test_keys_members_attributes_and_sharing_are_copied_too() -> None:
    stand_in = Call(Global("deepspeed.Enum"), (3,))
    vars(stand_in)["scale"] = shared = [4]
    ordered = OrderedDict(a=shared)
    ordered._metadata = shared  # type: ignore[attr-defined]
    tree = [{stand_in: 5}, {(REF, 7)}, ordered, shared, Counter(n=2)]
    keys, members, copied, again, counter = replace_leaves(tree, lambda leaf: leaf if leaf != REF else 6)
    (key,) = keys
    assert key is not stand_in and key.args == (3,) and key.scale is again and keys[key] == 5
    assert members == {(6, 7)} and again == [4] and again is not shared
    assert copied["a"] is again and copied._metadata is again
    assert counter == Counter(n=2)

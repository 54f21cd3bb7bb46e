"""Keys: of a few plain parts, and few of those that can be made to collide."""

from __future__ import annotations

import pickle
from pathlib import PurePosixPath
from typing import Any

import pytest

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import Call, Global, Size, check_key, checked_keys


@pytest.mark.parametrize("key", ["a", 3, -(1 << 59), True, None, b"b", 1.5, 1 << 80, (1, ("a", 2.5)), Size((2, 3))])
def test_plain_keys_are_taken(key: Any) -> None:
    check_key(key, others=100)
    assert checked_keys([key]) == [key]


def test_names_and_stand_ins_are_keys() -> None:
    check_key((Global("torch.float32"), Call(Global("deepspeed.Enum"), (1,))), others=0)


@pytest.mark.parametrize("key", [PurePosixPath("a"), [(1,)], ({},)])
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="a key of type"):
        check_key(key, others=0)


@pytest.mark.parametrize("key", [frozenset(range(40)), (0,) * 40, ((0,) * 20, (0,) * 20)])
def test_keys_of_many_parts_are_beyond_a_limit(key: Any) -> None:
    with pytest.raises(UnsupportedError, match="a limit of elastic_ckpt"):
        check_key(key, others=0)


@pytest.mark.parametrize("key", [1.5, 1 << 61, (1, 2)])
def test_only_a_few_may_be_of_kinds_that_can_collide(key: Any) -> None:
    check_key("a", others=1 << 30)
    with pytest.raises(UnsupportedError, match="a limit of elastic_ckpt"):
        check_key(key, others=1 << 13)


@pytest.mark.parametrize("part", ["x" * 1025, b"x" * 1025])
def test_long_texts_in_keys_of_several_parts_are_a_limit(part: str | bytes) -> None:
    """Two that are equal are compared whole for each pair of keys that collide."""
    with pytest.raises(UnsupportedError, match="up to a limit"):
        check_key((part, 1), others=0)
    check_key((part[:1024], 1), others=0)
    check_key(part, others=0)

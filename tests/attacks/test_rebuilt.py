"""Calls that rebuild tensors, with arguments that torch never writes: each is refused in words, before torch sees it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled
from tests.attacks.assembly import LEGACY_START, archive, call, legacy, name, number, storage, tensor, text, tuple_of

FLOAT32 = name("torch", "float32")
STRIDED = name("torch.serialization", "_get_layout") + tuple_of(text("torch.strided")) + b"R"
ONE = tensor(storage("0", 2), 0, [2], [1])
NOTHING = b")"


def rebuilt(function: str, *arguments: bytes) -> bytes:
    return call(name("torch._utils", function), *arguments)


def of_type(*arguments: bytes) -> bytes:
    return call(name("torch._tensor", "_rebuild_from_type_v2"), *arguments)


def parameter_with(state: bytes) -> bytes:
    rebuild = name("torch._utils", "_rebuild_parameter_with_state")
    return call(rebuild, ONE, b"\x88", b"}", state)


REFUSED = {
    "v3 without a dtype": (
        rebuilt(
            "_rebuild_tensor_v3",
            storage("0", 2),
            number(0),
            tuple_of(number(2)),
            tuple_of(number(1)),
            b"\x89",
            b"}",
            text("float32"),
        ),
        "a tensor without a dtype",
    ),
    "a parameter of no tensor": (
        rebuilt("_rebuild_parameter", text("x"), b"\x88", b"}"),
        "a parameter that is no tensor",
    ),
    "attributes in a list": (parameter_with(b"]" + number(1) + b"a"), "attributes of a tensor that are no dictionary"),
    "nested of two parts": (rebuilt("_rebuild_nested_tensor", ONE, ONE), "a nested tensor of 2 parts"),
    "a wrapper without a class": (
        rebuilt("_rebuild_wrapper_subclass", text("x"), FLOAT32, NOTHING, NOTHING, number(0), STRIDED),
        "a tensor without a class",
    ),
    "a type without a class": (
        of_type(name("torch._utils", "_rebuild_tensor_v2"), text("x"), NOTHING, b"}"),
        "a tensor without class or arguments",
    ),
    "a type by a function that is not read": (
        of_type(name("torch._utils", "_rebuild_xla_tensor"), name("torch", "Tensor"), NOTHING, b"}"),
        "_rebuild_xla_tensor",
    ),
    "an ordered dictionary of a number": (
        call(name("collections", "OrderedDict"), number(5)),
        "an OrderedDict of",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_rebuilds_no_tensor_is_refused(tmp_path: Path, what: str) -> None:
    value, words = REFUSED[what]
    path = archive(tmp_path, b"\x80\x02}" + text("entry") + value + b"s.", bytes(8))
    with pytest.raises(ElasticCkptError) as caught:
        file = open_pickled(path)
        materialise(file, file.tree["entry"])
    assert words in str(caught.value) and path in str(caught.value)


def header(version: int, little_endian: bool) -> bytes:
    magic = LEGACY_START[: LEGACY_START.index(b"\x80\x02M\xe9\x03.")]
    return magic + pickle.dumps(version, 2) + pickle.dumps({"little_endian": little_endian}, 2)


@pytest.mark.parametrize(
    ("version", "is_little", "words"), [(1002, True, "of another version"), (1001, False, "not little-endian")]
)
def test_legacy_archives_of_other_kinds_are_refused(tmp_path: Path, version: int, is_little: bool, words: str) -> None:
    path = legacy(tmp_path, b"\x80\x02}.", b"\x80\x02].")
    raw = Path(path).read_bytes().removeprefix(LEGACY_START)
    Path(path).write_bytes(header(version, is_little) + raw)
    with pytest.raises(ElasticCkptError, match=words):
        open_pickled(path)


def test_an_archive_begins_with_a_record(tmp_path: Path) -> None:
    path = Path(archive(tmp_path, b"\x80\x02}."))
    path.write_bytes(b"QK" + path.read_bytes()[2:])
    with pytest.raises(ElasticCkptError, match="does not begin with a record"):
        open_pickled(str(path))

"""The pickle interpreter, against Python's own for plain data, and against what is hostile."""

from __future__ import annotations

import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.errors import UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.torch_archive.globals import find_global
from elastic_ckpt.formats.torch_archive.unpickler import Unpickler
from tests.attacks.guard import counted

KEYS = st.one_of(
    st.text(max_size=8), st.integers(-(2**40), 2**40), st.booleans(), st.none(), st.tuples(st.integers(0, 9))
)
PLAIN = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=300)),
        *(st.complex_numbers(allow_nan=False), st.binary(max_size=9).map(bytearray), st.sets(KEYS, max_size=3)),
        *(st.frozensets(KEYS, max_size=3), st.integers(2**255, 2**300), st.text(min_size=250, max_size=300)),
    ),
    lambda inner: st.one_of(
        *(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(KEYS, inner, max_size=5),
        ),
        st.dictionaries(st.text(max_size=5), inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=30,
)


def no_storages(_id: Any) -> Any:
    raise AssertionError("no persistent ids here")


def interpreted(data: bytes) -> Any:
    return Unpickler(data, find_global, no_storages).run()


@given(PLAIN, st.integers(2, 5))
def test_plain_data_of_every_protocol_is_what_python_reads(tree: Any, protocol: int) -> None:
    data = pickle.dumps(tree, protocol)
    read = interpreted(data + b"what follows is not looked at")
    assert read == tree
    assert pickle.dumps(read, protocol) == pickle.dumps(pickle.loads(data), protocol), "types and sharing too"


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_protocols_are_no_damage(protocol: int) -> None:
    with pytest.raises(UnsupportedError, match="protocol 0 or 1"):
        interpreted(pickle.dumps({"a": [1 << 40, "text"]}, protocol))


@given(PLAIN, st.integers(2, 5))
def test_shared_objects_stay_shared(tree: Any, protocol: int) -> None:
    shared = [tree, tree, {"again": tree}]
    first, second, third = interpreted(pickle.dumps(shared, protocol))
    assert first == tree
    if isinstance(tree, (list, dict, OrderedDict)):
        assert first is second is third["again"]


def test_where_a_pickle_ends_is_known() -> None:
    data = pickle.dumps([1, 2], 2)
    machine = Unpickler(b"xyz" + data + b"more", find_global, no_storages, at=3)
    assert machine.run() == [1, 2]
    assert machine.at == 3 + len(data)


@given(PLAIN, st.data())
def test_a_truncated_pickle_ends_in_an_error(tree: Any, data: st.DataObject) -> None:
    pickled = pickle.dumps(tree, data.draw(st.integers(2, 5)))
    kept = data.draw(st.integers(0, len(pickled) - 1))
    with pytest.raises((pickle.UnpicklingError, IndexError, KeyError, ValueError, TypeError, Exception)):
        interpreted(pickled[:kept])


def doubled(levels: int) -> bytes:
    """A tuple that contains the one below it twice, ``levels`` deep."""
    build = b"".join(b"h%ch%c\x86q%c" % (level, level, level + 1) for level in range(levels))
    return b"\x80\x02)q\x00" + build


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x02}" + doubled(60)[2:] + b"K\x01s.", id="key that takes 2 ** 60 steps to hash"),
        pytest.param(b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.", id="key 200,000 deep"),
        pytest.param(b"\x80\x02K\x01r\xff\xff\xff\x7f", id="memo index of 2 GiB"),
        pytest.param(b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x00", id="bytearray of 64 PiB"),
        pytest.param(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff", id="string of 16 EiB"),
        pytest.param(b"\x80\x02\x8b\xff\xff\xff\x7f" + bytes(100), id="integer of 2 GiB"),
        pytest.param(b"\x80\x02\x8b\x00\x00\x01\x00" + b"\x01" * 65536 + b".", id="integer of 64 KiB"),
        pytest.param(b"L" + b"9" * 60_000 + b"L\n.", id="integer of 60,000 digits"),
        pytest.param(b"\x80\x02\x82\x01.", id="extension code"),
        pytest.param(b"(cbuiltins\nobject\no.", id="instance of Python 2"),
        pytest.param(b"\x80\x05\x97.", id="out-of-band buffer"),
        pytest.param(b"\x80\x02K\x01K\x02R.", id="a number is called"),
        pytest.param(b"\x80\x02ctorch\nfloat32\n)R.", id="a dtype is called"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\nX\x01\x00\x00\x00aR.", id="no tuple of arguments"),
        pytest.param(b"\x80\x02]K\x01K\x02s.", id="an item of a list is set"),
        pytest.param(b"\x80\x02}K\x01a.", id="an item is appended to a dictionary"),
        pytest.param(b"\x80\x02}}K\x01s.", id="a dictionary as key"),
        pytest.param(b"\x80\x02ctorch\nfloat32\n}X\x01\x00\x00\x00aK\x01sb.", id="a state for a name of the list"),
        pytest.param(b"\x80\x02t.", id="no mark"),
        pytest.param(b"\x80\x02\x85.", id="a tuple of one item, of which there is none"),
        pytest.param(b"\x80\x02K\x01\x86.", id="a tuple of two items, of which there is one"),
        pytest.param(b"\x80\x02K\x01K\x02\x87.", id="a tuple of three items, of which there are two"),
    ],
)
def test_what_is_hostile_ends_in_an_error_at_once(data: bytes) -> None:
    refused = (pickle.UnpicklingError, IndexError, KeyError, ValueError, UnsafePickleError, UnsupportedError)
    with counted(2_000_000), pytest.raises(refused):
        interpreted(data)


def test_many_integers_that_collide_are_no_keys() -> None:
    modulus = 2**61 - 1
    with pytest.raises(UnsupportedError, match="key"):
        interpreted(pickle.dumps({modulus * number: None for number in range(5000)}, 2))
    few = {modulus * number: (1.5, number) for number in range(100)}
    assert interpreted(pickle.dumps(few, 2)) == few


def test_every_opcode_of_plain_data_is_known() -> None:
    """What remains are codes that no pickler writes for it."""
    unknown = []
    for opcode in pickletools.opcodes:
        data = b"\x80\x02" + opcode.code.encode("latin-1") + bytes(16)
        try:
            Unpickler(data, find_global, no_storages).run()
        except pickle.UnpicklingError as error:
            if f"the opcode {data[2]:#04x}, which data of protocols 2 to 5 does not need" == str(error):
                unknown.append(opcode.name)
        except Exception:
            pass
    refused = "BINSTRING DICT DUP EXT1 EXT2 EXT4 FLOAT GET INST INT LONG NEWOBJ_EX NEXT_BUFFER OBJ PERSID PUT"
    refused += " READONLY_BUFFER SHORT_BINSTRING STRING UNICODE"
    assert sorted(unknown) == refused.split()

"""What is charged of memory is at least what CPython takes: measured by tracemalloc, of each kind of object."""

from __future__ import annotations

import gc
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.torch_archive import charges, unpickler
from elastic_ckpt.formats.torch_archive.globals import find_global
from elastic_ckpt.formats.torch_archive.tensors import StorageRef
from elastic_ckpt.formats.torch_archive.tree import check_tree, replace_leaves
from elastic_ckpt.formats.torch_archive.unpickler import Unpickler

#: Bytes of what is there whatever a file has.
SLACK_NBYTES = 16 << 10
#: Of the smaller kinds, around the sizes at which tables of dictionaries and sets grow. Objects differ by 8 bytes at least:
#: what is charged too little for each of the largest count is more than the slack.
COUNTS = (0, 1, 6, 11, 100, 2731)
assert COUNTS[-1] * 8 > SLACK_NBYTES


def integer(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, qualname: str) -> bytes:
    return f"c{module}\n{qualname}\n".encode()


def integers(count: int, behind: bytes = b"") -> bytes:
    return b"(" + b"".join(integer(1000 + each) + behind for each in range(count))


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def called(cls: bytes, arguments: bytes, count: int, behind: bytes = b"") -> bytes:
    """Results of many calls with the same arguments, in a list."""
    return b"](" + cls + b"q\x00" + arguments + b"q\x010" + b"0" + (b"h\x00h\x01R" + behind) * count + b"e"


ORDERED, COUNTER, DEQUE = (name("collections", each) for each in ("OrderedDict", "Counter", "deque"))
PAIRS = b"](" + b"".join(integer(1000 + each) + b"N\x86" for each in range(300)) + b"e"
PERSISTENT = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x01t"

KINDS: dict[str, Callable[[int], bytes]] = {
    "integers in a list": lambda count: b"]" + integers(count) + b"e",
    "integers, one after another": lambda count: b"]" + integers(count, b"a")[1:],
    "integers in a tuple": lambda count: integers(count) + b"t",
    "integers of 9 bytes": lambda count: b"](" + b"".join(b"\x8a\x09" + bytes(7) + struct.pack("<H", each) for each in range(count)) + b"e",
    "reals": lambda count: b"](" + b"".join(b"G" + struct.pack(">d", each) for each in range(count)) + b"e",
    "short strings": lambda count: b"](" + b"".join(text(f"{each:05}"[-2:]) for each in range(count)) + b"e",
    "short bytes": lambda count: b"](" + b"C\x02ab" * count + b"e",
    "None": lambda count: b"](" + b"N" * count + b"e",
    "empty tuples": lambda count: b"](" + b")" * count + b"e",
    "tuples of one": lambda count: b"](" + b"N\x85" * count + b"e",
    "tuples of three": lambda count: b"](" + b"NNN\x87" * count + b"e",
    "lists": lambda count: b"](" + b"]" * count + b"e",
    "lists of one": lambda count: b"](" + b"]Na" * count + b"e",
    "dictionaries": lambda count: b"](" + b"}" * count + b"e",
    "dictionaries of one": lambda count: b"](" + b"}K\x01Ns" * count + b"e",
    "sets": lambda count: b"](" + b"\x8f" * count + b"e",
    "sets of five": lambda count: b"](" + (b"\x8f" + integers(5) + b"\x90") * count + b"e",
    "a dictionary": lambda count: b"}" + integers(count, b"N") + b"u",
    "a dictionary, pair by pair": lambda count: b"}" + integers(count, b"Ns")[1:],
    "a dictionary of strings": lambda count: b"}(" + b"".join(text(f"{each:05}") + b"N" for each in range(count)) + b"u",
    "a set": lambda count: b"\x8f" + integers(count) + b"\x90",
    "a frozenset": lambda count: integers(count) + b"\x91",
    "an ordered dictionary": lambda count: ORDERED + b")R" + integers(count, b"N") + b"u",
    "ordered dictionaries": lambda count: called(ORDERED, b")", count),
    "ordered dictionaries of pairs": lambda count: called(ORDERED, PAIRS + b"\x85", count // 100),
    "ordered dictionaries with attributes": lambda count: called(ORDERED, b")", count, b"}" + text("a") + b"Nsb"),
    "counters of one dictionary": lambda count: called(COUNTER, b"}" + integers(300, b"N") + b"u\x85", count // 100),
    "sets of one list": lambda count: called(name("builtins", "set"), b"]" + integers(300) + b"e\x85", count // 100),
    "deques": lambda count: called(DEQUE, b")", count),
    "a deque": lambda count: DEQUE + b")R(" + b"N" * count + b"e",
    "a deque, one after another": lambda count: DEQUE + b")R" + b"Na" * count,
    "slices": lambda count: called(name("builtins", "slice"), b"K\x01\x85", count),
    "namespaces": lambda count: called(name("argparse", "Namespace"), b")", count, b"}" + text("a") + b"Nsb"),
    "states": lambda count: name("types", "SimpleNamespace") + b")R" + (b"}" + text("a") + b"Nsb") * count,
    "paths": lambda count: called(name("pathlib", "PosixPath"), text("a") + b"\x85", count),
    "bytes that are encoded": lambda count: called(name("_codecs", "encode"), text("a" * 200) + text("latin1") + b"\x86", count),
    "refused names": lambda count: b"](" + b"".join(name("a", f"{each:x}") for each in range(min(count, 10_000))) + b"e",
    "refused calls": lambda count: called(name("os", "system"), b")", count),
    "refused arguments": lambda count: called(name("numpy", "dtype"), text("O") + b"\x85", count),
    "storages": lambda count: b"](" + PERSISTENT + b"q\x000" + b"h\x00Q" * count + b"e",
    "the memo": lambda count: b"]" + b"".join(put(each) for each in range(count)),
    "one list, again and again": lambda count: b"](]q\x00" + b"h\x00" * count + b"e",
    "one tuple, again and again": lambda count: b"](K\x01\x85q\x00" + b"h\x00" * count + b"e",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Measured:
    """Bytes of memory, at the end and at most, above those at the start."""

    def __enter__(self) -> Measured:
        self._was_tracing = tracemalloc.is_tracing()
        if not self._was_tracing:
            tracemalloc.start()
        tracemalloc.reset_peak()
        self._start = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(self, *_: object) -> None:
        now, peak = tracemalloc.get_traced_memory()
        self.nbytes, self.most_nbytes = now - self._start, peak - self._start
        if not self._was_tracing:
            tracemalloc.stop()


def interpreter(pickled: bytes, kept: list[Any]) -> Unpickler:
    """One whose storages are noted as a file's are."""

    def load(_persistent_id: Any) -> StorageRef:
        number = 1000 + len(kept)
        kept.append((str(number), number))
        kept.append((number, number + 1, number + 2))
        return StorageRef("float32", number, number)

    return Unpickler(pickled, find_global, load, keeps=(ElasticCkptError,))


@pytest.mark.parametrize("kind", KINDS)
def test_objects_take_no_more_than_is_charged(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(unpickler, "_MOST_COPIED", 1 << 20)  # which is less than these files make of their parts
    interpreter(b"\x80\x04" + KINDS[kind](10) + b".", []).run()  # what is made but once
    for count in COUNTS:
        pickled, kept = b"\x80\x04" + KINDS[kind](count) + b".", list[Any]()
        machine = interpreter(pickled, kept)
        with Measured() as read:
            tree = machine.run()
        assert read.most_nbytes <= machine.memory.used + SLACK_NBYTES, count
        machine.memo.clear()
        behind = charges.left_behind(machine.memory, len(pickled))
        made = charges.MemoryBudget(0)
        with Measured() as walked:
            copy = replace_leaves(tree, made_of, lambda *_: None, charging(made))
        assert walked.most_nbytes <= made.used + SLACK_NBYTES, count
        if not any(word in kind for word in ("refused",)):
            with Measured() as checked:
                check_tree(tree)
            assert (
                read.nbytes + checked.most_nbytes <= behind + charges._NBYTES_WHILE_READ * len(pickled) + SLACK_NBYTES
            )
        del tree, copy


def charging(memory: charges.MemoryBudget) -> Callable[[int, int], None]:
    """What charges the memory of a walk alone."""
    return lambda _count, nbytes: memory.charge(nbytes)


def made_of(leaf: Any) -> Any:
    """Leaves stay: what is made of them is charged by who makes it."""
    return leaf


def test_what_is_refused_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five counters of many entries, in a small file: what they take is charged, and not the names of their keys."""
    most = 32 << 20
    monkeypatch.setattr(charges, "_MOST_NBYTES", most)
    monkeypatch.setattr(unpickler, "_MOST_COPIED", 1 << 20)
    for kind in ("counters of one dictionary", "storages", "a deque, one after another", "refused calls", "states"):
        machine = interpreter(b"\x80\x04" + KINDS[kind](400_000) + b".", [])
        with Measured() as read, pytest.raises(UnsupportedError, match="take more memory than elastic_ckpt spends"):
            machine.run()
        assert read.most_nbytes <= most


def test_the_size_of_the_file_is_what_counts() -> None:
    pickled = pickle.dumps([[]] * 3, 2)
    small, large = (Unpickler(pickled, find_global, made_of, file_nbytes=nbytes) for nbytes in (0, 1 << 32))
    assert (small.memory.most, large.memory.most) == (2 << 30, 8 << 32)
    assert Unpickler(pickled, find_global, made_of, is_trusted=True).memory.most > 1 << 60

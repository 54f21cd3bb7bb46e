"""Names and numbers of closed sets: what is read of them, torch can read, and the rest is refused at the reading."""

from __future__ import annotations

import importlib
from pathlib import Path

import deepspeed.runtime.zero.config  # noqa: F401  of whose classes objects are made if they are imported
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from elastic_ckpt.errors import DamagedError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.formats.pickled import open_pickled, refuse_unmade
from elastic_ckpt.formats.torch_archive.known_values import DTYPES, LAYOUTS, QSCHEMES
from elastic_ckpt.formats.torch_archive.tensors import STORAGE_NAMES
from elastic_ckpt.formats.torch_archive.writer import pickled_tree
from tests.attacks.assembly import archive, call, name, number, text, tuple_of

SETS = {torch.dtype: DTYPES, torch.qscheme: QSCHEMES, torch.layout: LAYOUTS}
NAMES = sorted(frozenset.union(DTYPES, QSCHEMES, STORAGE_NAMES))


@pytest.mark.parametrize("kind", SETS)
def test_the_sets_have_all_that_torch_has(kind: type) -> None:
    had = {str(value) for value in vars(torch).values() if isinstance(value, kind)}
    assert {each if each.startswith("torch.") else f"torch.{each}" for each in had} <= SETS[kind]


def global_of(path: str) -> bytes:
    module, _, last = path.rpartition(".")
    return name(module, last)


@pytest.mark.parametrize("path", NAMES)
def test_torch_has_what_is_read(path: str, tmp_path: Path) -> None:
    """All but dtypes that this version has not yet or no longer."""
    read = archive(tmp_path, b"\x80\x02" + global_of(path) + b".")
    assert open_pickled(read).tree.error is None
    module, _, last = path.rpartition(".")
    if path in STORAGE_NAMES or hasattr(torch, last):
        loaded = torch.load(read, weights_only=False)
        assert path in STORAGE_NAMES or loaded is getattr(importlib.import_module(module), last)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(path=st.sampled_from([*NAMES, *sorted(LAYOUTS)]), end=st.text("_abc0128", min_size=1, max_size=4))
def test_a_name_that_only_begins_like_one_of_torchs_is_refused(tmp_path: Path, path: str, end: str) -> None:
    assume(path + end not in {*NAMES, *LAYOUTS})
    program = global_of(path + end) if path in NAMES else call(GET_LAYOUT, text(path + end))
    with pytest.raises((UnsafePickleError, DamagedError)):
        refuse_unmade(open_pickled(archive(tmp_path, b"\x80\x02}" + text("x") + program + b"s.")))


GET_LAYOUT = name("torch.serialization", "_get_layout")
STAGE = name("deepspeed.runtime.zero.config", "ZeroStageEnum")
DELTA, RANGE, DECIMAL = name("datetime", "timedelta"), name("builtins", "range"), name("decimal", "Decimal")
DEVICE, SIZE = name("torch", "device"), name("torch", "Size")
DCP = "torch.distributed.checkpoint"
META = name("torch._utils", "_rebuild_meta_tensor_no_storage")
#: What no Python or torch can make.
MALFORMED = {
    **{f"stage {value}": call(STAGE, number(value)) for value in (-1, 4, 9, 1 << 40)},
    "a stage of text": call(STAGE, text("weights")),
    "a stage by a name that it has not": call(name("builtins", "getattr"), STAGE, text("heavy")),
    "a memory format": call(name(f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"), number(4)),
    "a kind of entry": call(name(f"{DCP}.planner", "WriteItemType"), number(4)),
    "an enum of Megatron": call(name("megatron.core.enums", "ModelType"), number(1 << 20)),
    "a long duration": call(DELTA, number(1 << 70)),
    "a duration of text": call(DELTA, text("x")),
    "a date of month 13": call(name("datetime", "date"), number(2020), number(13), number(1)),
    "a time of raw bytes": call(name("datetime", "datetime"), b"C\x0a" + b"\xff" * 10),
    "a zone of a week": call(name("datetime", "timezone"), call(DELTA, number(7))),
    "a range of steps of 0": call(RANGE, number(0), number(1), number(0)),
    "a range of text": call(RANGE, text("x")),
    "no decimal": call(DECIMAL, text("x")),
    "a fraction of nothing": call(name("fractions", "Fraction"), number(1), number(0)),
    "a deque of a number": call(name("collections", "deque"), number(1)),
    "a slice of nothing": call(name("builtins", "slice")),
    "a device of other letters": call(DEVICE, text("\x1b[31m")),
    "a device of index -1": call(DEVICE, text("cuda"), number(-1)),
    "a device of index 999": call(DEVICE, text("cuda:999")),
    "a device of two indices": call(DEVICE, text("cuda:1"), number(1)),
    "a size of 2 ** 70": call(SIZE, tuple_of(number(1 << 70))),
    "a meta tensor whose dtype is a layout": call(META, call(GET_LAYOUT, text("torch.strided")), b")", b")", b"\x89"),
    "a meta tensor whose dtype is a class": call(META, name("torch", "Tensor"), b")", b")", b"\x89"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_nobody_can_make_is_refused_at_the_reading(what: str, tmp_path: Path) -> None:
    path = archive(tmp_path, b"\x80\x02}" + text("x") + MALFORMED[what] + b"s.")
    with pytest.raises((UnsafePickleError, DamagedError)):
        refuse_unmade(open_pickled(path))


def test_a_device_of_an_unknown_backend_is_no_damage(tmp_path: Path) -> None:
    path = archive(tmp_path, b"\x80\x02}" + text("x") + call(DEVICE, text("zzz:0")) + b"s.")
    with pytest.raises(UnsupportedError, match="a backend that elastic_ckpt does not know"):
        refuse_unmade(open_pickled(path))


SOUND = {
    **{f"stage {value}": call(STAGE, number(value)) for value in range(4)},
    "a duration": call(DELTA, number(3), number(-5)),
    "a zone": call(name("datetime", "timezone"), call(DELTA, number(0), number(3600))),
    "a range": call(RANGE, number(1 << 70)),
    "a factory": call(name("collections", "defaultdict"), name("builtins", "list")),
    "a device": call(DEVICE, text("cuda:1")),
    "a device with its index": call(DEVICE, text("cuda"), number(127)),
    "a layout": call(GET_LAYOUT, text("torch.sparse_bsc")),
}


@pytest.mark.parametrize("what", SOUND)
def test_what_can_be_made_is_read_as_torch_reads_it(what: str, tmp_path: Path) -> None:
    path = archive(tmp_path, b"\x80\x02" + SOUND[what] + b".")
    assert read_objects(path) == torch.load(path, weights_only=False)


def test_the_old_name_of_an_untyped_storage_is_written_by_its_new_one(tmp_path: Path) -> None:
    old = archive(tmp_path, b"\x80\x02" + name("torch.storage", "_UntypedStorage") + b".")
    pickled, _ = pickled_tree(open_pickled(old).tree)
    assert torch.load(archive(tmp_path, pickled), weights_only=False) is torch.UntypedStorage

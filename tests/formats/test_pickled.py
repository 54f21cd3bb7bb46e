"""Metadata of torch.save files, against the bytes in the files and against torch.load."""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.errors import DamagedError, ElasticCkptError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.objects import materialise, materialise_entries
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import read_numbers
from tests.trees import bits, spelled_out

#: Written by tests that run under hypothesis: one folder for all examples is enough.
REUSED_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def saved(folder: Path, tree: Any) -> str:
    path = str(folder / "file.pt")
    torch.save(tree, path)
    return path


def by_hand(path: str, ref: TensorRef) -> torch.Tensor:
    """The tensor that a ref describes, read element by element at the offsets it gives."""
    dtype = getattr(torch, ref.dtype)
    raw = Path(path).read_bytes()
    values = []
    for index in np.ndindex(ref.shape):
        start = ref.byte_offset + dtype.itemsize * sum(i * step for i, step in zip(index, ref.stride, strict=True))
        values.append(torch.frombuffer(bytearray(raw[start : start + dtype.itemsize]), dtype=dtype))
    return torch.cat(values).reshape(ref.shape) if values else torch.empty(ref.shape, dtype=dtype)


def as_torch_loads(path: str) -> Any:
    return spelled_out(torch.load(path, weights_only=False))


def ref(file: PickledFile, *keys: Any) -> TensorRef:
    node = file.tree
    for key in keys:
        node = node[key]
    assert isinstance(node, TensorRef)
    return node


# --- offsets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int8", "uint8", "bool", "complex64", "uint16"]
)
def test_tensors_are_found_where_their_bytes_lie(tmp_path: Path, dtype: str) -> None:
    values = torch.tensor([[1, 0, 3], [4, 5, 0]]).to(getattr(torch, dtype))
    path = saved(tmp_path, {"first": torch.ones(7), "values": values})
    found = ref(open_pickled(path), "values")
    assert (found.dtype, found.shape, found.numel, found.is_contiguous) == (dtype, (2, 3), 6, True)
    assert Path(path).read_bytes()[found.byte_offset :].startswith(bits(values))


def test_a_file_knows_its_path_and_size(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": 1})
    file = open_pickled(path)
    assert (file.path, file.nbytes, file.tree) == (path, os.path.getsize(path), {"a": 1})


def test_views_share_the_bytes_of_their_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {"base": base, "row": base[2], "column": base[:, 1], "turned": base.t(), "inner": base[1:3, 2:5]}
    file = open_pickled(saved(tmp_path, views))
    start = ref(file, "base").byte_offset
    offsets = {name: (ref(file, name).byte_offset - start) // 4 for name in views}
    assert offsets == {"base": 0, "row": 12, "column": 1, "turned": 0, "inner": 8}
    contiguous = {name: ref(file, name).is_contiguous for name in views}
    assert contiguous == {"base": True, "row": True, "column": False, "turned": False, "inner": False}
    for name, view in views.items():
        assert torch.equal(by_hand(file.path, ref(file, name)), view)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view of some numbered memory: any sizes, strides and offset."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    stride = tuple(draw(st.integers(0, 5)) for _ in shape)
    offset = draw(st.integers(0, 5))
    reach = offset + 1 + sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
    return torch.arange(float(reach + draw(st.integers(0, 3)))).as_strided(shape, stride, offset)


@settings(REUSED_FOLDER, max_examples=60)
@given(st.lists(strided(), min_size=1, max_size=4))
def test_any_view_is_found_and_read_back(tmp_path: Path, views: list[torch.Tensor]) -> None:
    file = open_pickled(saved(tmp_path, views))
    read = materialise(file, file.tree)
    for number, view in enumerate(views):
        found = ref(file, number)
        assert (found.shape, found.numel) == (tuple(view.shape), view.numel())
        assert torch.equal(by_hand(file.path, found), view)
        assert torch.equal(read[number], view)
        if view.numel():
            assert found.is_contiguous == view.is_contiguous()


def test_parameters_are_marked_and_plain_tensors_are_not(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    file = open_pickled(saved(tmp_path, {"parameter": weight, "tensor": weight.detach()}))
    assert ref(file, "parameter").is_parameter
    assert not ref(file, "tensor").is_parameter
    assert ref(file, "parameter").byte_offset == ref(file, "tensor").byte_offset
    assert torch.equal(by_hand(file.path, ref(file, "parameter")), weight)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
def test_empty_tensors_have_their_shape_and_nothing_to_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file = open_pickled(saved(tmp_path, {"empty": torch.empty(shape), "other": torch.ones(2)}))
    assert (ref(file, "empty").shape, ref(file, "empty").numel) == (shape, 0)
    assert materialise(file, file.tree)["empty"].shape == shape


def test_tensors_without_dimensions_hold_one_element(tmp_path: Path) -> None:
    file = open_pickled(saved(tmp_path, {"step": torch.tensor(7.0), "last": torch.arange(9)[8]}))
    assert (ref(file, "step").shape, ref(file, "step").numel, ref(file, "step").is_contiguous) == ((), 1, True)
    assert by_hand(file.path, ref(file, "step")).item() == 7
    assert by_hand(file.path, ref(file, "last")).item() == 8


def test_containers_keep_their_kind_and_order(tmp_path: Path) -> None:
    tree = {
        "ordered": collections.OrderedDict([("z", 1), ("a", torch.ones(1))]),
        "nested": [(torch.ones(1), [torch.ones(2)]), {"deep": {"deeper": torch.ones(3)}}],
        "size": torch.ones(2, 3).shape,
        3: None,
    }
    file = open_pickled(saved(tmp_path, tree))
    assert list(file.tree) == list(tree)
    assert type(file.tree["ordered"]) is collections.OrderedDict
    assert list(file.tree["ordered"]) == ["z", "a"]
    assert type(file.tree["nested"][0]) is tuple
    assert ref(file, "nested", 1, "deep", "deeper").shape == (3,)
    assert file.tree["size"] == (2, 3)
    assert type(materialise(file, file.tree)["size"]) is torch.Size


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    values = torch.full((1000,), 3.0)
    path = saved(tmp_path, values)
    raw = Path(path).read_bytes()
    Path(path).write_bytes(raw.replace(bits(values), bits(values * 2)))
    file = open_pickled(path)
    assert by_hand(path, file.tree).tolist() == [6.0] * 1000


def test_sections_are_found_by_their_path(tmp_path: Path) -> None:
    file = open_pickled(saved(tmp_path, {"optimizer": {"state": {"step": 3}}, "list": [1]}))
    assert file.section("optimizer", "state", "step") == 3
    assert file.section("list") == [1]
    assert file.section() == file.tree


@pytest.mark.parametrize("keys", [("nothing",), ("optimizer", "nothing"), ("optimizer", "state", "step")])
def test_a_missing_section_is_damage_and_says_what_is_there(tmp_path: Path, keys: tuple[str, ...]) -> None:
    file = open_pickled(saved(tmp_path, {"optimizer": {"state": 3}}))
    with pytest.raises(DamagedError, match="lacks an entry") as caught:
        file.section(*keys)
    assert caught.value.file == file.path
    assert str(caught.value.expected) == " / ".join(keys)
    assert str(caught.value.found) in ("['optimizer']", "['state']", "int")


class Holder:
    """An object with a tensor inside, as a user's own scheduler may be."""

    def __init__(self) -> None:
        self.weights = torch.tensor([1.0, 2.0])

    def __repr__(self) -> str:
        return f"Holder({self.weights!r})"


class Listing(list):
    pass


# --- reading back -----------------------------------------------------------------------------------------------


def test_materialised_trees_are_what_torch_load_gives(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "numbers": [1, 2.5, None, True, "text", b"raw", 2**80, 1j],
        "tensors": (base, base[1], base.t(), base[:, ::2], torch.tensor(3), torch.empty(0, 2), torch.ones(1).expand(4)),
        "parameter": torch.nn.Parameter(torch.ones(2).bfloat16(), requires_grad=False),
        "set": {1, 2},
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "rng": torch.get_rng_state(),
        "ordered": collections.OrderedDict(b=torch.ones(1), a=()),
    }
    path = saved(tmp_path, tree)
    file = open_pickled(path)
    assert spelled_out(materialise(file, file.tree)) == as_torch_loads(path)


def test_a_part_of_a_tree_can_be_materialised_alone(tmp_path: Path) -> None:
    file = open_pickled(saved(tmp_path, {"a": torch.ones(1), "b": {"step": torch.tensor(5.0)}}))
    assert materialise(file, file.section("b"))["step"].item() == 5
    assert isinstance(file.tree["a"], TensorRef)


def test_a_file_that_shrinks_after_it_was_opened_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.ones(1000))
    file = open_pickled(path)
    with open(path, "r+b") as stream:
        stream.truncate(file.tree.byte_offset + 100)
    with pytest.raises(DamagedError, match="truncated") as caught:
        materialise(file, file.tree)
    assert caught.value.file == path


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.arange(3, dtype=np.uint16),
        np.arange(3, dtype=">i4"),
        np.float32(2.5),
        np.int64(7),
        np.random.RandomState(3).get_state(),
        np.random.RandomState(3).get_state(legacy=False),
        np.random.default_rng(3).bit_generator.state,
        random.Random(3).getstate(),
        argparse.Namespace(lr=0.1, betas=(0.9, 0.95), name="run", nested={"a": [1]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_people_keep_in_their_client_state_is_allowed(tmp_path: Path, value: Any) -> None:
    file = open_pickled(saved(tmp_path, {"client": value}))
    assert spelled_out(materialise(file, file.tree)) == as_torch_loads(file.path)


@pytest.mark.parametrize(
    ("value", "trust_pickle"),
    [
        pytest.param(collections.Counter({"ham": 2, "spam": 1}), False, id="Counter"),
        pytest.param(collections.defaultdict(list, {"a": [1]}), True, id="defaultdict"),
        pytest.param(argparse.Namespace(weights=torch.tensor([1.0, 2.0])), False, id="tensor in a Namespace"),
        pytest.param(argparse.Namespace(deep=argparse.Namespace(w=[torch.ones(1)])), False, id="Namespace in it"),
        pytest.param({"seen": (1, {2: [torch.tensor([1.0])]})}, False, id="nested"),
        pytest.param({torch.tensor([1.0])}, False, id="tensor in a set"),
        pytest.param(collections.deque([torch.tensor([1.0])]), True, id="tensor in a deque"),
        pytest.param(Holder(), True, id="tensor in an object"),
        pytest.param(Listing([1, 2]), True, id="a kind of list"),
        pytest.param([torch.ones(2, dtype=torch.uint16), torch.float16, torch.Size([2])], True, id="names of torch"),
        pytest.param(torch.tensor([1 + 2j]).conj(), False, id="conjugated tensor"),
        pytest.param(torch.eye(2).to_sparse(), False, id="sparse tensor"),
        pytest.param(torch.ones(2, device="meta"), False, id="meta tensor"),
    ],
)
def test_what_cannot_be_read_back_exactly_is_refused_and_never_changed(
    tmp_path: Path, value: Any, trust_pickle: bool
) -> None:
    path = saved(tmp_path, {"client": value})
    try:
        file = open_pickled(path, trust_pickle)
        read = materialise(file, file.tree)
    except ElasticCkptError as error:
        assert error.file == path
        return
    assert spelled_out(read) == as_torch_loads(path)


def test_a_tree_that_holds_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"a": 1}
    tree["self"] = tree
    with pytest.raises(ElasticCkptError):
        open_pickled(saved(tmp_path, tree))


# --- damage -----------------------------------------------------------------------------------------------------

TREE = {
    "module": collections.OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.ones(3).bfloat16()),
    "global_steps": 4711,
    "args": argparse.Namespace(name="run"),
}


def pickle_of(path: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read("file/data.pkl")


def with_pickle(path: str, pickled: bytes) -> str:
    """The same archive around another pickle, checksums in order."""
    changed = path + ".changed"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, pickled if name == "file/data.pkl" else source.read(name))
    return changed


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="missing") as caught:
        open_pickled(str(tmp_path / "not there.pt"))
    assert caught.value.file == str(tmp_path / "not there.pt")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="cannot be read"):
        open_pickled(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PK", b"not a zip" * 100, bytes(4096)])
def test_what_is_not_a_zip_archive_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(DamagedError, match="truncated or unreadable") as caught:
        open_pickled(str(tmp_path / "file.pt"))
    assert str(len(content)) in str(caught.value.found)


def legacy(folder: Path, tree: Any) -> str:
    path = str(folder / "legacy.pt")
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    return path


@settings(REUSED_FOLDER, max_examples=30)
@given(st.lists(strided(), min_size=1, max_size=4))
def test_the_old_format_of_torch_save_is_read_like_the_new_one(tmp_path: Path, views: list[torch.Tensor]) -> None:
    views = [view for view in views if view.numel()]
    path = legacy(tmp_path, {**TREE, "views": views, "shared": [view[:1] for view in views if view.dim()]})
    file = open_pickled(path)
    for number, view in enumerate(views):
        assert torch.equal(by_hand(path, ref(file, "views", number)), view)
    assert spelled_out(materialise(file, file.tree)) == as_torch_loads(path)


def test_pickles_of_the_old_format_may_be_longer_than_its_first_part(tmp_path: Path) -> None:
    path = legacy(tmp_path, {"text": "x" * 3_000_000, "weight": torch.arange(5.0)})
    file = open_pickled(path)
    assert by_hand(path, ref(file, "weight")).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kept", [0.2, 0.9, 0.999])
def test_a_truncated_file_of_the_old_format_is_damage(tmp_path: Path, kept: float) -> None:
    path = legacy(tmp_path, {"weight": torch.ones(3000)})
    raw = Path(path).read_bytes()
    Path(path).write_bytes(raw[: int(kept * len(raw))])
    with pytest.raises(DamagedError, match="truncated or unreadable"):
        open_pickled(path)


def test_a_zip_archive_of_something_else_is_damage(tmp_path: Path) -> None:
    path = str(tmp_path / "file.pt")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DamagedError, match="truncated or unreadable"):
        open_pickled(path)


def test_an_archive_that_was_compressed_since_is_damage(tmp_path: Path) -> None:
    """Tensors are read by the place of their bytes, which hold something else then."""
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save({"w": torch.zeros(1000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w") as target:
        for entry in source.infolist():
            kind = zipfile.ZIP_DEFLATED if entry.filename.endswith("data/0") else zipfile.ZIP_STORED
            target.writestr(entry.filename, source.read(entry), compress_type=kind)
    with pytest.raises(DamagedError) as error:
        open_pickled(str(packed))
    assert "data/0 is compressed" in str(error.value)


@pytest.mark.parametrize("order", [1, -1])
def test_an_archive_that_was_packed_anew_is_read_where_its_records_are(tmp_path: Path, order: int) -> None:
    plain, packed = saved(tmp_path, {"a": torch.arange(10.0), "b": torch.arange(100.0, 105.0)}), tmp_path / "packed.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist()[::order]:
            target.writestr(entry.filename, source.read(entry))
    file = open_pickled(str(packed))
    assert by_hand(file.path, ref(file, "a")).tolist() == list(range(10))
    assert by_hand(file.path, ref(file, "b")).tolist() == [100.0, 101.0, 102.0, 103.0, 104.0]


@settings(REUSED_FOLDER, max_examples=60)
@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_damage(tmp_path: Path, part: float) -> None:
    path = saved(tmp_path, TREE)
    raw = Path(path).read_bytes()
    Path(path).write_bytes(raw[: int(part * len(raw))])
    with pytest.raises(DamagedError) as caught:
        open_pickled(path)
    assert caught.value.file == path


@pytest.mark.parametrize("trust_pickle", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda pickled: pickled[: len(pickled) // 2], id="ends early"),
        pytest.param(lambda pickled: b"", id="empty"),
        pytest.param(lambda pickled: pickled[:2] + b"\xf1" + pickled[3:], id="opcode that does not exist"),
        pytest.param(lambda pickled: pickled.replace(b"\x85", b"\xff"), id="several flipped opcodes"),
        pytest.param(lambda pickled: bytes(len(pickled)), id="zeros"),
        pytest.param(lambda pickled: pickled[:2] + b"s" * 40 + b".", id="takes from an empty stack"),
    ],
)
def test_a_broken_pickle_is_damage_and_nobody_is_told_to_trust_it(
    tmp_path: Path, change: Callable[[bytes], bytes], trust_pickle: bool
) -> None:
    path = saved(tmp_path, TREE)
    broken = with_pickle(path, change(pickle_of(path)))
    with pytest.raises(ElasticCkptError) as caught:
        open_pickled(broken, trust_pickle)
    assert type(caught.value) is DamagedError, caught.value
    assert "trust" not in str(caught.value), caught.value
    assert caught.value.file == broken


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(REUSED_FOLDER, max_examples=100)
@given(st.data())
def test_noise_in_a_pickle_ends_in_an_error_of_ours_or_in_none(tmp_path: Path, data: st.DataObject) -> None:
    path = saved(tmp_path, TREE)
    pickled = bytearray(pickle_of(path))
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    broken = with_pickle(path, bytes(pickled[: data.draw(st.integers(len(pickled) // 2, len(pickled)))]))
    try:
        open_pickled(broken)
    except ElasticCkptError as error:
        assert error.file == broken


@settings(REUSED_FOLDER, max_examples=60)
@given(st.data())
def test_a_flipped_bit_in_the_pickle_is_damage_because_the_archive_has_its_checksum(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = saved(tmp_path, TREE)
    raw, pickled = bytearray(Path(path).read_bytes()), pickle_of(path)
    position = raw.index(pickled) + data.draw(st.integers(0, len(pickled) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    Path(path).write_bytes(raw)
    with pytest.raises(DamagedError) as caught:
        open_pickled(path)
    assert caught.value.file == path


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, TREE)
    finally:
        torch.serialization.set_crc32_options(before)
    file = open_pickled(path)
    assert spelled_out(materialise(file, file.tree)) == as_torch_loads(path)


def test_a_file_shorter_than_its_tensors_claim_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path, {"weight": torch.ones(999)})
    claims = pickle_of(path).replace((999).to_bytes(2, "little"), (65535).to_bytes(2, "little"))
    with pytest.raises(DamagedError, match=r"a record of 3996 bytes"):
        open_pickled(with_pickle(path, claims))


# --- code in pickles --------------------------------------------------------------------------------------------


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


class Plain:
    """Harmless, but not on the list."""

    def __init__(self) -> None:
        self.epoch = 3


@pytest.mark.parametrize("place", ["top", "beside tensors", "in a list"])
def test_a_forbidden_function_is_named_and_does_not_run(tmp_path: Path, place: str) -> None:
    marker = tmp_path / "it ran"
    trees = {
        "top": RunsCode(str(marker)),
        "beside tensors": {**TREE, "client": RunsCode(str(marker))},
        "in a list": [torch.ones(1), [RunsCode(str(marker))]],
    }
    path = saved(tmp_path, trees[place])
    with pytest.raises(UnsafePickleError) as caught:
        file = open_pickled(path)
        materialise_entries(file, file.tree, lambda _: False)
    assert not marker.exists()
    assert caught.value.file == path
    assert re.search(r"(posix|os|nt)\.mkdir", str(caught.value.found))
    assert "add_safe_globals" in str(caught.value.remedy)
    assert "trust_pickle" in str(caught.value.remedy)


def test_a_forbidden_function_runs_where_the_user_trusts_the_file(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    file = open_pickled(saved(tmp_path, {"client": RunsCode(str(marker))}), trust_pickle=True)
    assert not marker.exists(), "before its result is wanted"
    materialise(file, file.tree)
    assert marker.exists(), "or the tests above prove nothing"


def test_a_class_that_is_not_on_the_list_is_refused_by_name_until_the_user_adds_it(tmp_path: Path) -> None:
    path = saved(tmp_path, {"client": Plain(), "weight": torch.ones(2)})
    with pytest.raises(UnsafePickleError) as caught:
        open_pickled(path)
    assert "test_pickled.Plain" in str(caught.value.found)
    with torch.serialization.safe_globals([Plain]):
        file = open_pickled(path)
        assert materialise(file, file.tree)["client"].epoch == 3
    with pytest.raises(UnsafePickleError):
        open_pickled(path)
    trusted = open_pickled(path, trust_pickle=True)
    assert materialise(trusted, trusted.tree["client"]).epoch == 3
    assert isinstance(trusted.tree["weight"], TensorRef)


class WithArguments:
    """A class that cannot be made without arguments."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


def test_an_object_of_a_class_that_the_user_allowed_is_not_initialized_again(tmp_path: Path) -> None:
    path = saved(tmp_path, {"client": WithArguments(3), "class": WithArguments})
    with torch.serialization.safe_globals([WithArguments]):
        file = open_pickled(path)
        assert vars(materialise(file, file.tree["client"])) == {"epoch": 3}
        assert materialise(file, file.tree["class"]) is WithArguments


def test_objects_of_deepspeed_come_back_with_all_their_parts(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**16, 500, 0.5, 3, False)
    steps = {"total_curriculum_step": 10, "difficulty_step": 8}
    config = {"schedule_type": "fixed_linear", "min_difficulty": 8, "max_difficulty": 64, "schedule_config": steps}
    curriculum = CurriculumScheduler(config)
    curriculum.update_difficulty(4)
    client = {"args": argparse.Namespace(curriculum_scheduler=curriculum), "scaler": scaler}  # args of Megatron
    stages = {ZeroStageEnum.weights: {ZeroStageEnum.weights}}
    file = open_pickled(saved(tmp_path, {**client, "stages": stages}))
    read = materialise(file, file.tree)
    assert vars(read["scaler"]) == vars(scaler)
    assert read["args"].curriculum_scheduler.update_difficulty(9) == curriculum.update_difficulty(9) == 56
    assert read["stages"] == {ZeroStageEnum.weights: {ZeroStageEnum.weights}}


def test_tensors_that_are_many_times_larger_than_their_file_take_no_more_memory(tmp_path: Path) -> None:
    base = torch.zeros(40_000)
    for tree in ([torch.zeros(1).expand(1 << 40)], [base[number:] for number in range(100)]):
        file = open_pickled(saved(tmp_path, tree))
        read = materialise(file, file.tree)
        assert [each.shape for each in read] == [each.shape for each in tree]
        assert len({each.untyped_storage().data_ptr() for each in read}) == 1
        with pytest.raises(UnsupportedError, match="larger than the file"):
            read_numbers(file, [replace(file.tree[0], shape=(1 << 40,), stride=(0,))])


@pytest.mark.parametrize("value", [np.array([{"a": 1}], dtype=object), np.zeros(2, dtype=[("a", "i4")])])
def test_a_numpy_array_of_a_kind_that_is_not_on_the_list_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsafePickleError) as caught:
        open_pickled(saved(tmp_path, {"client": value}))
    assert "numpy.dtype" in str(caught.value.found), caught.value
    assert "numbers, strings and dates only" in str(caught.value.found), caught.value


def test_opening_a_file_leaves_torchs_own_list_of_safe_globals_alone(tmp_path: Path) -> None:
    before = sorted(torch.serialization.get_safe_globals(), key=repr)  # a set: in no order of its own
    open_pickled(saved(tmp_path, TREE))
    with pytest.raises(UnsafePickleError):
        open_pickled(saved(tmp_path, {"client": Plain()}))
    assert sorted(torch.serialization.get_safe_globals(), key=repr) == before


class _Quantized(torch.Tensor):
    """A tensor class of somebody else's, as torchao keeps optimizer states in."""


def test_a_tensor_of_a_class_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "subclass.pt"
    torch.save({"exp_avg": torch.arange(4.0).as_subclass(_Quantized)}, path)
    with torch.serialization.safe_globals([_Quantized]), pytest.raises(UnsupportedError) as caught:
        open_pickled(str(path))
    assert "class of its own" in str(caught.value.found)
    assert caught.value.file == str(path)
    with pytest.raises(UnsafePickleError, match="safe globals") as refused:
        open_pickled(str(path))
    assert "_Quantized" in str(refused.value.found)


def test_a_state_of_torchao_is_refused_by_name_without_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torchao.optim.subclass_8bit")
    module.OptimState8bit = type("OptimState8bit", (), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save({"exp_avg": module.OptimState8bit()}, tmp_path / "torchao.pt")
    with pytest.raises(UnsupportedError, match="class of its own") as caught:
        open_pickled(str(tmp_path / "torchao.pt"))
    assert "torchao.optim.subclass_8bit.OptimState8bit" in str(caught.value.found)

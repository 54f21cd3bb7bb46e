"""Tensor claims of a pickle, checked against the storage that they are of."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import Call, Global, Size
from elastic_ckpt.formats.torch_archive.tensors import REBUILD, StorageRef, TensorRef, storage_id

STORAGE = StorageRef("float32", 40, 1000)
V2, V3 = REBUILD["torch._utils._rebuild_tensor_v2"], REBUILD["torch._utils._rebuild_tensor_v3"]
FROM_TYPE = REBUILD["torch._tensor._rebuild_from_type_v2"]


def test_a_tensor_is_where_its_storage_and_offset_say() -> None:
    assert V2(STORAGE, 2, (2, 3), (3, 1), False, None) == TensorRef("float32", (2, 3), (3, 1), 1008)
    untyped = StorageRef("uint8", 40, 1000)
    ref = V3(untyped, 2, (2, 3), (3, 1), False, None, Global("torch.uint16"))
    assert ref == TensorRef("uint16", (2, 3), (3, 1), 1004)
    assert (ref.numel, ref.reach, ref.is_contiguous) == (6, 6, True)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (5, (2, 3), (3, 1)),
        (0, (11,), (1,)),
        (0, (2, 2), (9, 1)),
        (-1, (2,), (1,)),
        (0, (-2,), (1,)),
        (0, (2,), (-1,)),
        (0, (2,), ()),
        (0, (1 << 62,), (1,)),
        (0, (True,), (1,)),
        (0, (1,) * 65, (1,) * 65),
        (1 << 70, (1,), (1,)),
        ("0", (1,), (1,)),
        (0, [1], [1]),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(offset: Any, size: Any, stride: Any) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        V2(STORAGE, offset, size, stride, False, None)


def test_an_empty_tensor_needs_no_bytes() -> None:
    assert V2(StorageRef("float32", 0, 0), 0, (3, 0), (1, 1), False, None).numel == 0


@pytest.mark.parametrize("metadata", [{"conj": True}, {"neg": True}])
def test_lazily_changed_tensors_are_no_references(metadata: dict[str, bool]) -> None:
    made = V2(StorageRef("complex64", 40, 1000), 0, (1,), (1,), False, None, metadata)
    assert type(made) is Call and made.args == (TensorRef("complex64", (1,), (1,), 1000), (*metadata,))
    with pytest.raises(UnsupportedError, match="cannot be read by its bytes"):
        V2(STORAGE, 0, (1,), (1,), False, None, {"fake": True})
    with pytest.raises(pickle.UnpicklingError, match="conjugated or negated"):
        V2(StorageRef("int32", 40, 1000), 0, (1,), (1,), False, None, metadata)


def test_attributes_name_the_swap_file_and_a_class_of_its_own_is_refused() -> None:
    rebuild = Global("torch._utils._rebuild_tensor_v2", V2)
    arguments = (STORAGE, 0, (1,), (1,), False, None)
    assert FROM_TYPE(rebuild, Global("torch.Tensor"), arguments, {"ds_id": "3_4"}).swap_id == "3_4"
    assert FROM_TYPE(rebuild, Global("torch.nn.parameter.Parameter"), arguments, {}).is_parameter
    with pytest.raises(UnsupportedError, match="class of its own"):
        FROM_TYPE(rebuild, Global("somebody.Quantized"), arguments, {})
    with pytest.raises(pickle.UnpicklingError):
        FROM_TYPE(Global("collections.OrderedDict", dict), Global("torch.Tensor"), (), {})


@pytest.mark.parametrize(
    "persistent_id",
    [
        "storage",
        ("storage",),
        ("module", Global("torch.FloatStorage"), "0", "cpu", 3),
        ("storage", "torch.FloatStorage", "0", "cpu", 3),
        ("storage", Global("torch.FloatStorage"), 0, "cpu", 3),
        ("storage", Global("torch.FloatStorage"), "0", "cpu", -3),
        ("storage", Global("torch.FloatStorage"), "0", "cpu", 1 << 63),
    ],
)
def test_persistent_ids_of_anything_but_a_storage_are_refused(persistent_id: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        storage_id(persistent_id)


def test_a_storage_has_dtype_key_and_size() -> None:
    found = storage_id(("storage", Global("torch.cuda.BFloat16Storage"), "7", "cuda:3", 5))
    assert found == ("bfloat16", "7", 10, None)


def test_a_size_is_integers() -> None:
    assert Size((2, 3)) == (2, 3)
    with pytest.raises(pickle.UnpicklingError):
        Size(("2",))

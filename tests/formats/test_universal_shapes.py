"""Files of a parameter that differ in shape: the one that is named is the one that was changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.formats.universal_shapes import parameter_shape
from elastic_ckpt.load.metadata import read_checkpoint
from tests.formats.universal_folders import written

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
LISTED = {"matrix": (16, 48), "bias": (16,)}
#: How a file's tensor is changed.
WAYS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "transposed": lambda tensor: tensor.t().contiguous(),
        "half": lambda tensor: tensor[: len(tensor) // 2].clone(),
        "empty": lambda tensor: tensor[:0].clone(),
        "longer": lambda tensor: torch.cat([tensor, tensor]),
        "with a dimension": lambda tensor: tensor.reshape(*tensor.shape, 1),
    }
)
#: Rows of the matrix in all of its files: as listed, or fewer, as of a vocabulary whose padding was stripped.
ROWS = {"listed": 16, "stripped": 15}


def read(zero: Path) -> dict[str, Shape]:
    found = look_at(str(zero.parent.parent), "tag")
    assert found is not None
    metadata = read_checkpoint(found, MetadataOptions(with_client_state=False)).metadata
    return {name: saved.shape for name, saved in metadata.parameters.items()}


def folder(tmp_path: Path, rows: int, is_flat: bool = False) -> Path:
    zero = written(tmp_path, shapes=LISTED)
    for name, shape in (("matrix", (rows, 48)), ("bias", (16,))):
        (zero / name / "trail.pt").unlink()
        for key in KEYS:
            values = torch.zeros(shape)
            torch.save(values.flatten() if is_flat else {"param": values}, zero / name / f"{key}.pt")
    return zero


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("way", WAYS)
def test_the_file_of_another_shape_is_named_with_the_right_one(way: str, key: str, rows: int, tmp_path: Path) -> None:
    zero = folder(tmp_path, rows)
    assert read(zero) == {"matrix": (rows, 48), "bias": (16,)}
    changed = WAYS[way](torch.zeros(rows, 48))
    torch.save({"param": changed}, zero / "matrix" / f"{key}.pt")
    with pytest.raises(MismatchError) as caught:
        read(zero)
    error = caught.value
    assert (error.file, error.parameter) == (str(zero / "matrix" / f"{key}.pt"), "matrix")
    assert (error.expected or "").startswith(f"({rows}, 48)") and error.found == str(tuple(changed.shape))
    assert f"{key} of this parameter" in error.problem
    assert ("that the model-states file lists" in error.problem) == (rows == LISTED["matrix"][0])


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("way", ["half", "empty", "longer"])
def test_so_is_one_of_a_vector_and_one_that_is_flat(way: str, key: str, is_flat: bool, tmp_path: Path) -> None:
    zero = folder(tmp_path, 16, is_flat)
    for name, shape in LISTED.items():
        whole = torch.load(zero / name / f"{key}.pt")
        changed = WAYS[way](whole if is_flat else whole["param"])
        torch.save(changed if is_flat else {"param": changed}, zero / name / f"{key}.pt")
        with pytest.raises(MismatchError) as caught:
            read(zero)
        assert caught.value.file == str(zero / name / f"{key}.pt")
        assert caught.value.expected == f"{shape}, as listed"
        torch.save(whole, zero / name / f"{key}.pt")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [(32, 48), (31, 48), (16, 96), (16, 48)], ids=str)
def test_joined_shards_are_a_parameter_of_two_ranks(whole: Shape, way: str, key: str) -> None:
    shapes = dict.fromkeys(KEYS, whole)
    assert parameter_shape(shapes, (16, 48), 2) == whole
    shapes[key] = tuple(WAYS[way](torch.empty(whole, device="meta")).shape)
    assert parameter_shape(shapes, (16, 48), 2) == whole

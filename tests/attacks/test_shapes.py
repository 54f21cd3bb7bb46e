"""Shapes whose product would take minutes, in every place in which a file claims one: refused before it is computed."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from elastic_ckpt.errors import DamagedError, ElasticCkptError, LayoutError, UnsupportedError
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.safetensors import find_safetensors, read_safetensors
from tests.attacks.guard import counted
from tests.unpartitioned import indexed

MANY, LARGE = (3,) * 400_000, (10**1000,) * 300


_product = math.prod


def bounded_product(sizes: Iterable[int], **start: int) -> int:
    """A product, of which no test should have to wait for the digits."""
    sizes = [*sizes]
    assert sum(size.bit_length() for size in sizes) < 1 << 16, f"a product of {len(sizes)} sizes"
    return _product(sizes, **start)


def safetensors(folder: Path, shape: tuple[int, ...]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    found = find_safetensors(str(folder))
    assert found is not None
    read_safetensors(found, MetadataOptions())


def of_parameters(folder: Path, shape: tuple[int, ...]) -> None:
    indexed(folder, {"a": torch.zeros(2)}, None, param_shapes=[{"a": torch.Size((2,)), "b": shape}])


def of_frozen_parameters(folder: Path, shape: tuple[int, ...]) -> None:
    indexed(folder, {"a": torch.zeros(2)}, None, frozen_param_shapes={"a": shape})


@pytest.mark.parametrize("shape", [MANY, LARGE], ids=["many dimensions", "large sizes"])
@pytest.mark.parametrize("claim", [safetensors, of_parameters, of_frozen_parameters])
def test_nothing_is_multiplied_that_no_tensor_can_have(
    tmp_path: Path, claim: Callable[[Path, Any], None], shape: tuple[int, ...]
) -> None:
    refused = pytest.raises(
        DamagedError, match=r"dimensions|a size, stride or offset that is none|an integer of \d+ digits"
    )
    with mock.patch.object(math, "prod", bounded_product), refused:
        claim(tmp_path, shape)


CLAIMS: dict[str, dict[str, Any]] = {
    "ranks": {"dp_world_size": 1 << 62, "ds_config": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}},
    "experts": {"ds_autoep_layers": [{"num_local_experts": 1 << 40, "ep_size": 1 << 40, "num_experts": 1 << 80}]},
    "none": {"ds_autoep_layers": [{"num_local_experts": 0, "ep_size": 1 << 40, "num_experts": 0}]},
    "less": {"ds_autoep_layers": [{"num_local_experts": 1 << 40, "ep_size": 1 << 40, "num_experts": -1}]},
}


#: What each is but the ranks: a limit of the reader's, a layout that contradicts itself, and no numbers of experts.
REFUSED: dict[str, tuple[type[ElasticCkptError], str]] = {
    "experts": (UnsupportedError, "at most 131072 experts"),
    "none": (LayoutError, "experts of AutoEP are not placed"),
    "less": (DamagedError, "ds_autoep_layers"),
}


@pytest.mark.parametrize("what", CLAIMS)
def test_nothing_is_counted_up_to_what_a_file_claims(tmp_path: Path, what: str) -> None:
    claim = CLAIMS[what]
    for layer in claim.get("ds_autoep_layers", ()):
        layer["expert_key_prefix"] = "layer"
    with counted(1_000_000):
        if what == "ranks":
            assert not indexed(tmp_path, {"a": torch.zeros(2)}, None, **claim).stated.possible
        else:
            kind, words = REFUSED[what]
            with pytest.raises(kind, match=words):
                indexed(tmp_path, {"a": torch.zeros(2)}, None, **claim)

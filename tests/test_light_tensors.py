"""Tensors without data: the same references, whatever they are made of; and nobody else's loads change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from elastic_ckpt.formats.light_tensors import light_tensors
from elastic_ckpt.formats.pickled import TensorRef, open_pickled


def saved(path: Path) -> str:
    flat = torch.arange(24.0)
    tree = {
        "view": flat[4:16].view(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 5),
        "shared": flat[20:],
    }
    torch.save(tree, path)
    return str(path)


def test_references_are_those_of_fake_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.pt")
    light = open_pickled(path).tree
    monkeypatch.setattr("elastic_ckpt.formats.pickled.light_tensors", nullcontext)
    assert light == open_pickled(path).tree
    view, shared = light["view"], light["shared"]
    assert isinstance(view, TensorRef) and (view.shape, view.stride) == ((4, 3), (1, 4))
    assert shared.byte_offset - view.byte_offset == 16 * 4
    assert light["parameter"].is_parameter


def test_torch_is_as_before_and_loads_in_other_threads_are_real(tmp_path: Path) -> None:
    path, before = saved(tmp_path / "a.pt"), torch._utils._rebuild_tensor
    with light_tensors(), light_tensors(), ThreadPoolExecutor(1) as other:
        assert torch._utils._rebuild_tensor is not before
        values = other.submit(torch.load, path, weights_only=True).result()
    assert torch._utils._rebuild_tensor is before
    assert values["view"].tolist() == torch.arange(4.0, 16.0).view(3, 4).t().tolist()
    with pytest.raises(ZeroDivisionError), light_tensors():
        1 / 0  # noqa: B018
    assert torch._utils._rebuild_tensor is before

"""Modules whose parameters have no memory, or no ranks to divide them, are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.engines.modules import ModuleAdapter
from elastic_ckpt.errors import UnsupportedError


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_without_process_group_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="without process group"):
        ModuleAdapter(torch.nn.Linear(2, 3), None, ExitStack())


@pytest.mark.usefixtures("process_group")
def test_parameters_on_the_meta_device_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="meta device") as raised:
        ModuleAdapter(torch.nn.Linear(2, 3, device="meta"), None, ExitStack())
    assert raised.value.parameter == "weight, bias"


@pytest.mark.usefixtures("process_group")
def test_a_module_that_is_whole_is_described_as_such() -> None:
    (weight, bias) = ModuleAdapter(torch.nn.Linear(2, 3), None, ExitStack()).local_state().wholes
    assert (weight.name, weight.shape, weight.range, bias.name) == ("weight", (3, 2), FlatRange(0, 6), "bias")

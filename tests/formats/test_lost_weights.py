"""Entries of a module that are no tensors: a lost weight is named, what the module makes of itself is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.model_states import FUSED, PLAIN, UNFUSED
from tests.formats.zero0_states import NAMES, adamw, with_masters
from tests.unpartitioned import FILE, Model, catalog_of, indexed, trained

#: What may stand in a weight's place, and the name of the entry then.
VALUES: dict[str, tuple[Any, str]] = {
    "None": (None, "b"),
    "a number": (5, "b"),
    "text": ("x", "b"),
    "a list": ([torch.zeros(5)], "b"),
    "a dictionary": ({"x": 1}, "b.x"),
}


def optimizer_of(model: Model, kind: str) -> Any:
    if kind == PLAIN:
        return trained(model, adamw(model, " ".join(NAMES)))
    return with_masters(model, kind, [NAMES])[0]


@pytest.mark.parametrize("kind", [PLAIN, UNFUSED, FUSED])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("live", [[], [NAMES]], ids=["offline", "live"])
def test_a_weight_that_is_no_tensor_is_named(tmp_path: Path, kind: str, value: str, live: list[list[str]]) -> None:
    model = Model()
    optimizer = optimizer_of(model, kind)
    instead, name = VALUES[value]
    shard = indexed(tmp_path, {**model.state_dict(), "b": instead}, optimizer)
    with pytest.raises(DamagedError) as error:
        catalog_of(tmp_path, shard, live)
    assert error.value.parameters == (name,) and error.value.file == str(tmp_path / FILE)


def test_names_of_the_optimizers_own_tell_too(tmp_path: Path) -> None:
    """Where weights that do not train make up for the lost one."""
    model = Model()
    optimizer = trained(model, torch.optim.AdamW([(name, param) for name, param in model.named_parameters()]))
    module = {**model.state_dict(), "b": 5, "frozen": torch.zeros(5)}
    with pytest.raises(DamagedError) as error:
        catalog_of(tmp_path, indexed(tmp_path, module, optimizer))
    assert error.value.parameters == ("b",)


@pytest.mark.parametrize("kind", [PLAIN, UNFUSED, FUSED])
def test_names_of_live_parameters_tell_too(tmp_path: Path, kind: str) -> None:
    model = Model()
    module = {"frozen": torch.zeros(5), **model.state_dict(), "b": 5}
    shard = indexed(tmp_path, module, optimizer_of(model, kind))
    with pytest.raises(DamagedError) as error:
        catalog_of(tmp_path, shard, [NAMES])
    assert error.value.parameters == ("b",)


@pytest.mark.parametrize("entries", ["buffer", "frozen", "parameter"])
def test_names_that_the_file_lists_tell_as_it_is_read(tmp_path: Path, entries: str) -> None:
    model = Model()
    optimizer = trained(model, adamw(model, " ".join(NAMES)))
    name = {"buffer": "mask"}.get(entries, "b")
    more = {
        "buffer": {},
        "frozen": {"frozen_param_shapes": {"b": torch.Size([5])}},
        "parameter": {"param_shapes": [{"b": torch.Size([5])}]},
    }
    with pytest.raises(DamagedError) as error:
        indexed(tmp_path, {**model.state_dict(), name: "text"}, optimizer, **more[entries])
    assert error.value.parameters == (name,)


@pytest.mark.parametrize("kind", [PLAIN, UNFUSED, FUSED])
@pytest.mark.parametrize("live", [[], [NAMES]], ids=["offline", "live"])
def test_what_a_module_makes_of_itself_is_left_alone(tmp_path: Path, kind: str, live: list[list[str]]) -> None:
    model = Model()
    module = {**model.state_dict(), "version": 3, "layer.note": "text", "layer._extra_state": None}
    metadata = catalog_of(tmp_path, indexed(tmp_path, module, optimizer_of(model, kind)), live)
    assert set(metadata.parameters) == set(NAMES)

"""Folders of parameters in wrapped modules: DeepSpeed's converter gives one with states, and one of the module's entry."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import elastic_ckpt
from elastic_ckpt.errors import DamagedError
from tests.formats.universal_folders import written

PART = "_checkpoint_wrapped_module"
PLAIN, WRAPPED, OTHERWISE = "layer.weight", f"layer.{PART}.weight", "layer._fsdp_wrapped_module.weight"


def add_states(zero: Path, name: str, of: str) -> None:
    shutil.copytree(zero / of, zero / name)


def add_entry(zero: Path, name: str, of: str) -> None:
    (zero / name).mkdir()
    shutil.copy(zero / of / "fp32.pt", zero / name)


@pytest.mark.parametrize(
    ("listed", "other", "add"),
    [(WRAPPED, None, None), (WRAPPED, PLAIN, add_entry), (PLAIN, WRAPPED, add_entry), (PLAIN, None, None)],
)
def test_the_folder_that_is_listed_has_the_states(
    listed: str, other: str | None, add: Callable[[Path, str, str], None] | None, tmp_path: Path
) -> None:
    zero = written(tmp_path, shapes={listed: (3, 4), "bias": (5,)})
    if add is not None and other is not None:
        add(zero, other, listed)
    checkpoint = elastic_ckpt.open(tmp_path / "tag")
    assert {PLAIN, "bias"} <= set(checkpoint)
    assert set(checkpoint.optimizer_state(PLAIN)) == {"trail", "step"}


@pytest.mark.parametrize(
    ("listed", "other"),
    [
        (WRAPPED, PLAIN),
        (PLAIN, WRAPPED),
        (WRAPPED, OTHERWISE),
        (PLAIN, f"{PART}.{PLAIN}"),
        (WRAPPED, f"{PART}.{PLAIN}"),
    ],
)
@pytest.mark.parametrize("stays", [True, False])
def test_states_under_another_name_of_the_same_parameter_are_damage(
    listed: str, other: str, stays: bool, tmp_path: Path
) -> None:
    zero = written(tmp_path, shapes={listed: (3, 4), "bias": (5,)})
    add_states(zero, other, listed)
    if not stays:
        shutil.rmtree(zero / listed)
    with pytest.raises(DamagedError, match="two folders of a parameter") as caught:
        elastic_ckpt.open(tmp_path / "tag")
    assert other in str(caught.value)

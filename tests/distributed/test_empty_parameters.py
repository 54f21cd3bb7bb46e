"""Parameters without elements, which ZeRO's groups leave out and others number: every stage to every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.cells import Cell, Save, Saves, cells, crossing
from tests.distributed.facts import Loaded, Resumes
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup

HOLLOW = {"model": "HollowLM"}
SAVED = [
    Save(setup, more=HOLLOW)
    for setup in (Setup(0), Setup(1), Setup(2), Setup(3), Setup(0, "bf16"), Setup(1, "bf16_fp32acc"))
]
Z0, Z1, Z2, Z3, *_ = SAVED
BY_DEEPSPEED = [Save(save.setup, more=HOLLOW, converted=True) for save in (Z1, Z3)]
#: By the command, which converts what was saved with ZeRO.
BY_COMMAND = [
    Save(save.setup, more=HOLLOW, converted=True, converter="convert.convert_by_command")
    for save in SAVED
    if save.setup.stage
]
TARGETS = [Setup(0), Setup(1), Setup(2), Setup(3), Setup(3, "bf16")]


@cells(
    [
        crossing(save, target, 3, expected=Resumes(save.format, float("inf")), note=note, format=save.format, **HOLLOW)
        for target in TARGETS
        for note, saves in (("", SAVED), ("", BY_DEEPSPEED), ("by our command", BY_COMMAND))
        for save in saves
    ]
)
def test_every_stage_loads_them_from_every_stage(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@pytest.mark.parametrize("save", [save for save in SAVED if save.setup.stage == 0], ids=lambda save: save.setup.name)
def test_what_was_saved_without_zero_is_not_converted(save: Save, saves: Saves, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(saves.folder(save)), str(tmp_path / "step4_universal")])
    assert result.exit_code, result.output


@cells(
    [
        crossing(save, target, 1, "weights_only", **HOLLOW)
        for save in (Z0, Z2, Z3)
        for target in (Setup(0), Setup(2), Setup(3))
    ]
)
def test_weights_alone_have_them(cell: Cell, facts: list[Loaded]) -> None:
    Resumes().check(facts)


@pytest.mark.parametrize("save", SAVED, ids=lambda save: save.setup.name)
def test_exports_have_them(save: Save, saves: Saves, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(saves.folder(save)), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    found: dict[str, torch.Tensor] = load_file(next((tmp_path / "out").glob("*.safetensors")))
    weights: dict[str, torch.Tensor] = truth_of(saves.folder(save))["weights"]
    empty = {name: tuple(value.shape) for name, value in weights.items() if not value.numel()}
    assert {name: tuple(found[name].shape) for name in empty if name in found} == empty

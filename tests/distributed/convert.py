"""``python -m tests.distributed.convert NATIVE UNIVERSAL NAME ...``: DeepSpeed's own offline converter, run here."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import torch
from deepspeed.checkpoint import ds_to_universal
from typer.testing import CliRunner

from elastic_ckpt.cli import app


def convert_each(cases: list[dict[str, str]]) -> None:
    """:func:`convert` the ``native`` of each to its ``folder``: a job of one rank."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # converters of old versions need it
    for case in cases:
        convert(Path(case["native"]), Path(case["folder"]))


def convert_by_command(cases: list[dict[str, str]]) -> None:
    """``elastic-ckpt convert`` of the ``native`` of each to a universal one in its ``folder``: a job of one rank."""
    for case in cases:
        _command(Path(case["native"]), Path(case["folder"]), "step4_universal")


def convert_to_dcp(cases: list[dict[str, str]]) -> None:
    """The same to one of ``torch.distributed.checkpoint``, ``dcp`` in its ``folder``."""
    for case in cases:
        _command(Path(case["native"]), Path(case["folder"]), "dcp", "--to", "dcp")


def _command(native: Path, target: Path, name: str, *options: str) -> None:
    target.mkdir()
    result = CliRunner().invoke(app, ["convert", *options, str(native / "step4"), str(target / name)])
    assert result.exit_code == 0, result.output
    shutil.copy(native / "truth.pt", target / "truth.pt")


def convert(native: Path, target: Path) -> None:
    """Convert ``native/step4`` to ``target/step4_universal``, with its truth beside it."""
    target.mkdir()
    arguments = Namespace(
        input_folder=str(_without_extra_state(native / "step4", target / "native")),
        output_folder=str(target / "step4_universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(None):
        ds_to_universal.main(arguments)
    shutil.copy(native / "truth.pt", target / "truth.pt")


def run(arguments: dict[str, str]) -> None:
    """:func:`convert` as a job of one rank: a fork has imported everything. Converters of old versions need the flag."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    name = arguments["name"]
    convert(Path(arguments["native"], name), Path(arguments["universal"], name))


def _without_extra_state(folder: Path, copy: Path) -> Path:
    """The folder, or a copy without Megatron's empty ``_extra_state`` entries, on which the converter fails."""
    files = sorted(folder.glob("mp_rank_*_model_states.pt"))
    states = [torch.load(file, weights_only=False) for file in files]
    if not any(value is None for state in states for value in (state["module"] or {}).values()):
        return folder
    shutil.copytree(folder, copy)
    for file, state in zip(files, states, strict=True):
        state["module"] = {name: value for name, value in state["module"].items() if value is not None}
        torch.save(state, copy / file.name)
    return copy


if __name__ == "__main__":
    for folder in sys.argv[3:]:
        convert(Path(sys.argv[1], folder), Path(sys.argv[2], folder))

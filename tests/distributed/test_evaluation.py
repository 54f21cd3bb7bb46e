"""Engines without an optimizer take the weights of any checkpoint, at any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.distributed.conftest import SUB_GROUPS, Launch
from tests.distributed.model import Setup

NOTHING_PERSISTS = (("stage3_param_persistence_threshold", 0), ("offload_param", {"device": "cpu"}))
#: DeepSpeed would gather weights in bf16 for it, and what it keeps gathered must not come back rounded.
AUTOCAST = (("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),)
ENGINES = [
    Setup(0),
    Setup(0, "bf16"),
    Setup(3),
    Setup(3, "bf16"),
    Setup(3, zero=NOTHING_PERSISTS),
    Setup(3, config=AUTOCAST),
]
SAVED = [Setup(1), Setup(3, zero=SUB_GROUPS), Setup(2, "bf16")]


def test_weights_of_every_stage_load_into_engines_without_an_optimizer(
    launch: Launch, native: Path, universal: Path, unpartitioned: Path
) -> None:
    folders = [str(native / f"{setup.name}-dp2") for setup in SAVED]
    folders += [str(universal / f"{Setup(3, 'bf16').name}-dp2"), str(unpartitioned / f"{Setup(0).name}-dp2")]
    for load in launch(3, "evaluation_jobs.evaluate", {"setups": ENGINES, "folders": folders}):
        setup, folder = load.case["setup"], load.case["folder"]
        assert load.report is not None and load.differences == {}, load.where
        is_exact = setup.precision == "fp32" and not setup.config and "fp32" in Path(folder).name
        assert load.loss_gap <= (1e-5 if is_exact else 5e-3), load.where


def test_a_folder_without_masters_has_the_weights_below_zero3(launch: Launch, native: Path, tmp_path: Path) -> None:
    """As somebody left it who removed the optimizer files."""
    folder = tmp_path / "weights"
    shutil.copytree(native / f"{Setup(1).name}-dp2", folder)
    for path in (folder / "step4").glob("*optim_states.pt"):
        path.unlink()
    folders = {"folder": str(folder), "zero3": str(native / f"{Setup(3).name}-dp2")}
    for found in launch(2, "evaluation_jobs.without_masters", folders):
        assert found.differences == {} and len(found.reports) == 2
        for report in found.reports:
            assert "own weights, saved in float32" in " | ".join(report.notes)
        # and not DeepSpeed's AttributeError, even at the saved topology
        assert "UnsupportedError" in found.custom_load_fn


def test_a_folder_without_checkpoint_begins_a_run_unless_a_tag_is_asked_for(launch: Launch, tmp_path: Path) -> None:
    """DeepSpeed has no words for the latter, and no checkpoint engine in ZeRO-3 without an optimizer."""
    engines = [(setup, has_optimizer) for setup in (Setup(0), Setup(3)) for has_optimizer in (False, True)]
    (tmp_path / "step4").mkdir()
    for folder in (tmp_path, tmp_path / "none"):
        for found in launch(2, "evaluation_jobs.without_checkpoint", {"engines": engines, "folder": str(folder)}):
            if found.tag is None:
                assert found.returned == (None, None), (found.engine, found.error)
            else:
                assert found.error[0] == "NotFoundError", (found.engine, found.error)

"""``torch.distributed.checkpoint``: what FSDP2 saves is loaded by engines, what engines save by FSDP2, bit by bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

#: As FSDP2 trains: without clipping, which DeepSpeed does by default.
CONFIG = (("gradient_clipping", 0.0),)
LAYOUTS = ("plain", "app", "torchtitan")


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one DCP folder for each layout, saved by two ranks."""
    folder = tmp_path_factory.mktemp("dcp")
    for layout in LAYOUTS:
        launch(2, "dcp_jobs.save_fsdp", {"folder": str(folder / layout), "layout": layout})
    return folder


def test_what_fsdp2_saved_on_two_ranks_is_resumed_by_zero3_on_three(launch: Launch, saved: Path) -> None:
    cases = [
        {"setup": setup, "folder": str(saved / layout)}
        for layout, setup in zip(
            LAYOUTS, (Setup(3, config=CONFIG), Setup(1, config=CONFIG), Setup(0, config=CONFIG)), strict=True
        )
    ]
    for load in launch(3, "dcp_jobs.load_into_engines", cases):
        assert load.format == "dcp" and load.differences == {}, load.where
        assert load.loss_gap < 1e-5, load.where
        assert load.client_state["dcp"]["train_state"] == {"step": 4, "seen": [1, 2, 3]}
        if "torchtitan" not in load.case["folder"]:
            assert "not restored: rng" in load.text


def test_weights_alone_are_restored_and_states_start_fresh(launch: Launch, tmp_path: Path) -> None:
    launch(2, "dcp_jobs.save_fsdp", {"folder": str(tmp_path), "layout": "weights"})
    for load in launch(3, "dcp_jobs.load_into_engines", [{"setup": SOURCE, "folder": str(tmp_path), "states": False}]):
        assert load.format == "dcp" and load.differences == {}, load.where
        assert "the checkpoint holds no optimizer state" in load.text and "counters start from zero" in load.text


def test_states_and_models_that_are_not_recognized_are_refused_on_all_ranks(launch: Launch, tmp_path: Path) -> None:
    layouts = {"ungrouped": "optimizer state 'optim' has a layout", "averaged": "may be the model's"}
    cases = [{"setup": SOURCE, "folder": str(tmp_path / layout)} for layout in layouts]
    for layout in layouts:
        launch(2, "dcp_jobs.save_fsdp", {"folder": str(tmp_path / layout), "layout": layout})
    for refused in launch(3, "dcp_jobs.refuse", cases):
        (text,) = refused.texts
        assert "UnsupportedError" in refused.kinds and layouts[Path(refused.case).name] in text
        assert refused.changed == set()
    weights = {**cases[0], "states": False, "arguments": {"load_optimizer_states": False}}
    for load in launch(3, "dcp_jobs.load_into_engines", [weights]):
        assert load.format == "dcp" and load.differences == {}, load.where


def test_what_an_error_says_of_unknown_states_loads_the_others(launch: Launch, tmp_path: Path) -> None:
    cases = []
    for layout, key in (("ungrouped", "optim"), ("slow", "slow")):
        folder = str(tmp_path / layout)
        launch(2, "dcp_jobs.save_fsdp", {"folder": folder, "layout": layout})
        (refused, *_) = launch(1, "dcp_jobs.refuse", [{"setup": SOURCE, "folder": folder}])
        settled = {"states": {key: "fresh"}}
        assert f'"elastic_checkpoint": {json.dumps(settled)}' in next(iter(refused.texts))
        setup = replace(SOURCE, config=(*CONFIG, ("elastic_checkpoint", settled)))
        cases.append({"setup": setup, "folder": folder, "states": layout != "ungrouped"})
    for load in launch(3, "dcp_jobs.load_into_engines", cases):
        assert load.differences == {}, load.where


def test_a_mesh_may_have_cut_tensors_along_any_dimensions(launch: Launch, tmp_path: Path) -> None:
    launch(4, "dcp_jobs.save_dtensors", {"folder": str(tmp_path)})
    cases = [{"setup": setup, "folder": str(tmp_path)} for setup in (Setup(3, config=CONFIG), Setup(2, config=CONFIG))]
    for load in launch(3, "dcp_jobs.load_into_engines", cases):
        assert load.format == "dcp" and load.differences == {}, load.where


#: What is converted to DCP.
SOURCE = Setup(3, config=CONFIG)


@pytest.fixture(scope="module")
def converted(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<model>/<setup>-dp3/step4`` of engines, and ``<model>.dcp`` made from each by the command."""
    folder = tmp_path_factory.mktemp("converted")
    for model in ("UntiedLM", "TinyLM"):
        launch(3, "save", {"folder": str(folder / model), "setups": [SOURCE], "model": model})
        command = ["convert", "--to", "dcp", str(folder / model / f"{SOURCE.name}-dp3"), str(folder / f"{model}.dcp")]
        result = CliRunner().invoke(app, [*command, "--json"])
        assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("degree", [2, 3])
def test_what_engines_saved_is_loaded_by_fsdp2_once_it_is_converted(
    degree: int, launch: Launch, converted: Path
) -> None:
    cases = [
        {
            "model": model,
            "source": str(converted / model / f"{SOURCE.name}-dp3"),
            "folder": str(converted / f"{model}.dcp"),
        }
        for model in ("UntiedLM", "TinyLM")
    ]
    for load in launch(degree, "dcp_jobs.load_into_fsdp", cases):
        assert load.differences == {} and load.loss_gap < 1e-5, load.where


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_what_megatron_core_saved_at_tp_2_is_loaded_at_tp_1_and_2(launch: Launch, tmp_path: Path, style: str) -> None:
    saved = Parallel("megatron", style, tp=2)
    launch(2, "dcp_jobs.save_megatron", {"setup": saved, "folder": str(tmp_path)})
    targets = [Parallel("megatron", style, tp=1, stage=3), Parallel("megatron", style, tp=2, stage=1)]
    options = {"rename": ["megatron-core-local"]}
    cases = [{"setup": target, "folder": str(tmp_path), "options": options} for target in targets]
    for load in launch(2, "dcp_jobs.load_megatron", cases):
        assert load.format == "dcp" and load.differences == {}, load.where
        assert load.loss_gap < 1e-4, load.where
        assert load.client_state["dcp"]["args"].seed == 5
        assert "does not record the members of its param groups" in load.text

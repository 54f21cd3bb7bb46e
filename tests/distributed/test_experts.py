"""Mixtures of experts: any expert-parallel degree to any other, with data-parallel degree and ZeRO stage."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.tools.opened import config_of, locate, open_checkpoint
from tests.distributed.conftest import Launch
from tests.distributed.expert_jobs import Experts
from tests.distributed.launch import environment

SAVED = [
    Experts(4, 1, 2),
    Experts(4, 2, 4, group_size=400),
    Experts(2, 1, 1, "fp32"),
    Experts(4, 2, 2, data_first=True),
    Experts(4, 0, 2, "fp32"),
    Experts(4, 0, 4),
    Experts(2, 0, 2, "fp32", data_first=True),
]
AUTOEP = [
    Experts(4, 1, 2, autoep=True),
    Experts(4, 3, 2, autoep=True),
    Experts(2, 0, 2, "fp32", autoep=True),
    Experts(4, 3, 4, "fp32", autoep=True),
    Experts(2, 2, 1, autoep=True),
]
CONVERTED = AUTOEP[:2]
PRESETS = [
    Experts(2, 0, 2, "fp32", (4, 4), autoep=True, preset="mixtral"),
    Experts(4, 3, 2, "bf16", (4, 4), autoep=True, preset="mixtral"),
    Experts(2, 1, 2, "bf16", (4, 4), autoep=True, preset="qwen3_moe"),
    Experts(4, 1, 2, "bf16", (4, 4), autoep=True, preset="deepseek_v3"),
]
#: Of a model-states file with experts.
SINCE_0_19_4 = {"buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
SINCE_0_19_4 |= {"shared_params", "ds_config", "ds_version", "ds_autoep_layers"}
ROUND_ROBIN = Experts(4, 2, 2, data_first=True, round_robin=True)
RESIDUAL = [Experts(4, 2, 2, "fp16", residual=True), Experts(2, 0, 1, "fp16", residual=True)]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for world in (2, 4):
        launch(
            world,
            "expert_jobs.save",
            {
                "folder": str(folder),
                "runs": [run for run in [*SAVED, *RESIDUAL, *AUTOEP, *PRESETS, ROUND_ROBIN] if run.world == world],
            },
        )
    return folder


@pytest.fixture(scope="module")
def converted(saved: Path, extensions_dir: str) -> list[Experts]:
    """Saves of AutoEP as DeepSpeed's own converter writes them, beside the native ones."""
    for run in CONVERTED:
        source, target = saved / run.name, saved / f"{run.name}-universal"
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
        command += ["--num_merge_workers", "1", "--input_folder", str(source / "step4")]
        command += ["--output_folder", str(target / "step4")]
        subprocess.run(command, env=environment(extensions_dir), check=True, capture_output=True, timeout=200)
        shutil.copy(source / "truth.pt", target)
    return [replace(run, universal=True) for run in CONVERTED]


@pytest.mark.parametrize(
    "run",
    [
        Experts(4, 1, 1),
        Experts(2, 2, 2, data_first=True),
        Experts(4, 0, 4, "fp32"),
        Experts(1, 1, 1),
        Experts(2, 0, 1),
    ],
    ids=lambda run: run.name,
)
def test_every_source_loads_at_any_expert_parallel_degree(run: Experts, saved: Path, launch: Launch) -> None:
    for load in launch(run.world, "expert_jobs.load", {"folder": str(saved), "runs": [run], "sources": SAVED}):
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap < 0.05, load.where
        assert "100 %" in str(load.report.verified), load.text


def test_files_without_shapes_names_of_buffers_and_config_load_as_the_others(
    saved: Path, tmp_path: Path, launch: Launch
) -> None:
    """As DeepSpeed before 0.19.4 writes them, which ``launch/matrix.sh`` tries on the old versions themselves.

    Every second one has a dictionary for each submodule, as Megatron-DeepSpeed saves without a pipeline.
    """
    lost = "layer_0_expert_0_mp_rank_00_model_states.pt"
    without_what_0_19_4_added(saved, SAVED[0], tmp_path / "lost")
    (tmp_path / "lost" / SAVED[0].name / "step4" / lost).unlink()
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "lost" / SAVED[0].name)])
    assert result.exit_code == 1 and lost in re.sub(r"[\s│]", "", result.output), result.output
    for number, source in enumerate(SAVED):
        without_what_0_19_4_added(saved, source, tmp_path, by_child=number % 2 == 0)
        result = CliRunner().invoke(app, ["verify", str(tmp_path / source.name)])
        assert result.exit_code == 0, result.output
    run = Experts(4, 1, 1)
    for load in launch(run.world, "expert_jobs.load", {"folder": str(tmp_path), "runs": [run], "sources": SAVED}):
        assert load.format == "native" and load.differences == {}, load.where


@pytest.mark.parametrize("run", [Experts(4, 1, 4, "fp16", residual=True), Experts(1, 0, 1, "fp16", residual=True)])
def test_a_dense_branch_beside_the_experts_and_the_loss_scale_are_restored(
    run: Experts, saved: Path, launch: Launch
) -> None:
    for load in launch(run.world, "expert_jobs.load", {"folder": str(saved), "runs": [run], "sources": RESIDUAL}):
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap < 0.05, load.where


def without_what_0_19_4_added(saved: Path, run: Experts, to: Path, by_child: bool = False) -> None:
    """A copy of a checkpoint below a folder; ``by_child``: with a dictionary for each child of the module."""
    path = changed(saved, run.name, to / run.name) / "mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=False)
    module = nested(tree["module"]) if by_child else tree["module"]
    torch.save({key: value for key, value in tree.items() if key not in SINCE_0_19_4} | {"module": module}, path)


def test_parameters_in_round_robin_order_are_found_without_their_shapes(saved: Path, tmp_path: Path) -> None:
    without_what_0_19_4_added(saved, ROUND_ROBIN, tmp_path)
    found = []
    for folder in (saved, tmp_path):
        metadata = open_checkpoint(locate(str(folder / ROUND_ROBIN.name), None), config_of(None)).metadata
        names = [Path(file.path).name for file in metadata.files]
        chunks = {
            key: [(chunk.range, names[chunk.file], chunk.byte_offset) for chunk in tensor.chunks]
            for key, tensor in metadata.tensors.items()
            if key[1] not in ("buffer", "frozen")
        }
        found.append(chunks)
    assert len(found[0]) > 100 and found[0] == found[1]


def changed(saved: Path, name: str, to: Path) -> Path:
    """A copy of a checkpoint, and the folder of its tag."""
    shutil.copytree(saved / name, to)
    return to / "step4"


def nested(module: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Entries of a module, those of each child in a dictionary of their own."""
    found: dict[str, Any] = {}
    for name, tensor in module.items():
        child, _, rest = name.partition(".")
        found |= {child: {**found.get(child, {}), rest: tensor}} if rest else {name: tensor}
    return found


def test_what_is_missing_mixed_or_of_another_model_is_named(saved: Path, tmp_path: Path, launch: Launch) -> None:
    run, source = Experts(2, 1, 2, "fp32"), SAVED[0].name
    other = changed(saved, RESIDUAL[0].name, tmp_path / "other")
    expert = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
    (changed(saved, source, tmp_path / "missing") / expert.format(1, 3)).unlink()
    tag = changed(saved, source, tmp_path / "exchanged")
    (tag / expert.format(0, 1)).rename(tag / "aside")
    (tag / expert.format(0, 2)).rename(tag / expert.format(0, 1))
    (tag / "aside").rename(tag / expert.format(0, 2))
    shutil.copy(other / expert.format(1, 5), changed(saved, source, tmp_path / "mixed") / expert.format(1, 5))
    shutil.copy(
        saved / SAVED[5].name / "step4" / "expp_rank_0_mp_rank_00_optim_states.pt",
        changed(saved, SAVED[4].name, tmp_path / "optimizer"),
    )
    (changed(saved, SAVED[4].name, tmp_path / "lost") / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    expected = {
        "missing": r"the file of an expert is missing.*layer_1_expert_3_mp",
        "exchanged": r"(changed places|the expert that its name says)",
        "mixed": r"the fp32 masters in this file are not those of the weights",
        "optimizer": r"belongs to another save.*param groups differ",
        "lost": r"is missing.*expp_rank_1_mp_rank_00_optim_states",
    }
    folders = [str(tmp_path / name) for name in expected]
    for refused in launch(2, "expert_jobs.refuse", {"run": run, "folders": folders}):
        (text,) = refused.texts
        print(text)
        assert "DamagedError" in refused.kinds and refused.changed == set(), text
        assert re.search(expected[Path(refused.case).name], text.replace("\n", " ")), text


def test_the_failure_of_one_rank_is_that_of_all(saved: Path, launch: Launch) -> None:
    places = [
        ("elastic_ckpt.formats.merging", "index_expert"),
        ("elastic_ckpt.engines.adapter", "expert_fqns"),
        ("elastic_ckpt.formats.partitioned", "check_experts"),
    ]
    arguments = {"run": Experts(4, 2, 4), "folder": str(saved / SAVED[0].name), "places": places}
    for refused in launch(4, "expert_jobs.fail_alone", arguments):
        (text,) = refused.texts
        assert refused.kinds[0] == "DamagedError" and refused.changed == set(), text
        assert "this rank alone has failed" in text and "rank:      1" in text, text


@pytest.mark.parametrize("experts", [(4, 4), (8, 8), (4,)])
def test_other_experts_than_the_models_are_named(experts: tuple[int, ...], saved: Path, launch: Launch) -> None:
    """In number, with routers of other shapes, or in another number of layers."""
    run = Experts(2, 2, 2, "fp32", experts=experts)
    for refused in launch(2, "expert_jobs.refuse", {"run": run, "folders": [str(saved / SAVED[0].name)]}):
        (text,) = refused.texts
        print(text)
        assert refused.kinds[0] == "MismatchError" and refused.changed == set(), text
        assert "deepspeed_experts" in text or "shape" in text, text


@pytest.mark.parametrize(
    "run",
    [
        Experts(4, 3, 1, autoep=True),
        Experts(2, 3, 2, "fp32", autoep=True),
        Experts(4, 1, 4, autoep=True),
        Experts(1, 2, 1, autoep=True),
        Experts(2, 0, 1, autoep=True),
    ],
    ids=lambda run: run.name,
)
def test_experts_that_autoep_stacks_load_at_any_degree_and_stage(
    run: Experts, saved: Path, converted: list[Experts], launch: Launch
) -> None:
    arguments = {"folder": str(saved), "runs": [run], "sources": AUTOEP + converted}
    for load in launch(run.world, "expert_jobs.load", arguments):
        assert load.format == ("universal" if load.case.universal else "native"), load.where
        assert load.differences == {}, load.where
        assert load.loss_gap < 0.05, load.where
        assert "100 %" in str(load.report.verified), load.text


@pytest.fixture(scope="module")
def converted_here(saved: Path) -> list[Path]:
    """The same saves as our own command writes them."""
    targets = [saved / f"{run.name}-ours" for run in CONVERTED]
    for run, target in zip(CONVERTED, targets, strict=True):
        result = CliRunner().invoke(app, ["convert", str(saved / run.name / "step4"), str(target / "step4")])
        assert result.exit_code == 0, result.output
        shutil.copy(saved / run.name / "truth.pt", target)
    return targets


def test_our_command_writes_stacked_experts_as_deepspeeds_does(
    converted: list[Experts], converted_here: list[Path], saved: Path
) -> None:
    for run, target in zip(converted, converted_here, strict=True):
        theirs = saved / run.name / "step4/zero"
        tensors = theirs.rglob("*/*.pt")
        files = {path.relative_to(theirs) for path in tensors if path.parent.name != "ticks"}  # a buffer
        more = {path.relative_to(target / "step4/zero") for path in target.rglob("zero/*/*.pt")} - files
        assert files and {file.name for file in more} <= {"step.pt"}  # which DeepSpeed leaves out after ZeRO-3
        for file in sorted(files):
            expected, found = (torch.load(folder / file) for folder in (theirs, target / "step4/zero"))
            ours, its = (each.pop("param") if isinstance(each, dict) else each for each in (found, expected))
            assert torch.equal(*(torch.as_tensor(each).flatten() for each in (ours, its))), file
            is_stacked = re.search(r"experts\.w\d$", str(file.parent)) is not None and file.name != "step.pt"
            assert ("is_expert_param" in found) is is_stacked if isinstance(found, dict) else not is_stacked, file
            assert not is_stacked or (found, ours.shape) == (expected, its.shape), file


@pytest.mark.parametrize(("world", "ep"), [(4, 4), (2, 1)])
def test_deepspeed_loads_what_our_command_writes_of_stacked_experts(
    world: int, ep: int, converted_here: list[Path], launch: Launch
) -> None:
    for run, target in zip(CONVERTED, converted_here, strict=True):
        arguments = {"run": replace(run, world=world, ep=ep), "folders": [str(target)]}
        assert launch(world, "expert_jobs.deepspeed_loads", arguments) == [{}] * world


@pytest.mark.parametrize(
    "run",
    [
        Experts(4, 1, 4, "bf16", (4, 4), autoep=True, preset="mixtral"),
        Experts(1, 2, 1, "fp32", (4, 4), autoep=True, preset="mixtral"),
        Experts(2, 0, 1, "bf16", (4, 4), autoep=True, preset="mixtral"),
        Experts(4, 3, 4, "bf16", (4, 4), autoep=True, preset="qwen3_moe"),
        Experts(2, 3, 1, "bf16", (4, 4), autoep=True, preset="deepseek_v3"),
    ],
    ids=lambda run: run.name,
)
def test_models_of_hugging_face_load_at_any_degree_and_stage(run: Experts, saved: Path, launch: Launch) -> None:
    sources = [source for source in PRESETS if source.preset == run.preset]
    for load in launch(run.world, "expert_jobs.load", {"folder": str(saved), "runs": [run], "sources": sources}):
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap < 0.05, load.where

"""Experts in tensor-parallel models: sliced by tensor-parallel ranks or not, at any degree to any other."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.expert_tensor_jobs import Sharded

pytestmark = pytest.mark.nightly

SAVED = [
    Sharded(4, 1, 2),
    Sharded(4, 2, 1, "fp16", residual=True),
    Sharded(4, 1, 2, slices=False),
    Sharded(4, 2, 4, "fp32", slices=False, group_size=400),
    Sharded(4, 2, 2, data_first=True),
    Sharded(4, 0, 2, "fp32"),
    Sharded(2, 1, 2, "fp32", degree=1),
]

WITHOUT_ZERO = Sharded(4, 0, 2, slices=False)


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for world in (2, 4):
        runs = [run for run in SAVED if run.world == world]
        launch(world, "expert_jobs.save", {"folder": str(folder), "runs": runs})
    return folder


@pytest.mark.parametrize(
    "run",
    [
        Sharded(4, 2, 2),
        Sharded(4, 1, 4, slices=False),
        Sharded(2, 1, 1),
        Sharded(1, 1, 1, "fp32", degree=1),
        Sharded(4, 2, 2, degree=1),
        Sharded(2, 0, 1, "fp32"),
        Sharded(2, 2, 2, "fp32", slices=False),
        Sharded(2, 1, 1, slices=False),  # each tensor-parallel rank has every expert whole
    ],
    ids=lambda run: run.name,
)
def test_sliced_and_whole_experts_load_at_any_degrees(run: Sharded, saved: Path, launch: Launch) -> None:
    sources = [source for source in SAVED if source.residual == run.residual]
    for load in launch(run.world, "expert_jobs.load", {"folder": str(saved), "runs": [run], "sources": sources}):
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap < 0.05, load.where
        assert "100 %" in str(load.report.verified), load.text


#: AutoEP with AutoTP: whole experts, whose expert-parallel groups take in several tensor-parallel ranks.
MIXTRAL = Sharded(4, 1, 2, "bf16", (4, 4), slices=False, autoep=True, preset="mixtral")
FOLDED = [
    MIXTRAL,
    replace(MIXTRAL, stage=3, ep=4),
    replace(MIXTRAL, degree=1),
    replace(MIXTRAL, stage=2, precision="fp32"),
]


@pytest.fixture(scope="module")
def folded(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folded")
    launch(4, "expert_jobs.save", {"folder": str(folder), "runs": FOLDED})
    for run in FOLDED:
        target = folder / replace(run, universal=True).name
        result = CliRunner().invoke(app, ["convert", str(folder / run.name / "step4"), str(target / "step4")])
        assert result.exit_code == 0, result.output
        shutil.copy(folder / run.name / "truth.pt", target)
    return folder


@pytest.mark.parametrize(
    "run",
    [
        replace(MIXTRAL, ep=4),
        replace(MIXTRAL, stage=3),
        replace(MIXTRAL, stage=2, ep=1, degree=1, world=1),
        replace(MIXTRAL, stage=3, degree=1, ep=4),
        replace(MIXTRAL, stage=0, degree=1, world=2),
    ],
    ids=lambda run: run.name,
)
def test_autoep_folded_with_autotp_loads_at_any_degrees(run: Sharded, folded: Path, launch: Launch) -> None:
    sources = FOLDED + [replace(source, universal=True) for source in FOLDED]
    for load in launch(run.world, "expert_jobs.load", {"folder": str(folded), "runs": [run], "sources": sources}):
        assert load.format == ("universal" if load.case.universal else "native"), load.where
        assert load.differences == {}, load.where
        assert load.loss_gap < 0.05, load.where


@pytest.mark.parametrize("run", FOLDED[:2], ids=lambda run: run.name)
def test_deepspeed_loads_what_our_command_writes_at_the_degrees_of_the_save(
    run: Sharded, folded: Path, launch: Launch
) -> None:
    """At others, it refuses what was folded."""
    arguments = {"run": run, "folders": [str(folded / replace(run, universal=True).name)]}
    assert launch(run.world, "expert_jobs.deepspeed_loads", arguments) == [{}] * run.world


def test_what_is_missing_or_saved_without_zero_is_named(saved: Path, tmp_path: Path, launch: Launch) -> None:
    expert, sliced, whole = "layer_1_expert_5_mp_rank_01_model_states.pt", SAVED[0], SAVED[2]
    for name, run in (("slice", sliced), ("whole", whole), ("lane", whole)):
        shutil.copytree(saved / run.name, tmp_path / name)
    (tmp_path / "slice/step4" / expert).unlink()
    (tmp_path / "whole/step4" / expert).unlink()
    for path in (tmp_path / "lane/step4").glob("*mp_rank_01_model_states.pt"):
        path.unlink()
    launch(4, "expert_jobs.save", {"folder": str(tmp_path), "runs": [WITHOUT_ZERO]})
    expected = {
        str(tmp_path / "slice"): rf"the file of an expert is missing.*{expert}",
        str(tmp_path / "whole"): r"the file of an expert is missing.*layer_1_expert_5_mp_rank_\*",
        str(tmp_path / "lane"): r"a file of the checkpoint is missing.*mp_rank_01_model_states",
        str(tmp_path / WITHOUT_ZERO.name): r"without ZeRO, experts that tensor-parallel ranks do not slice",
    }
    for run in (Sharded(2, 1, 2, "fp32", degree=1), Sharded(2, 1, 1, slices=False)):
        for refused in launch(2, "expert_jobs.refuse", {"run": run, "folders": list(expected)}):
            (text,) = refused.texts
            assert refused.kinds and refused.changed == set(), text
            assert re.search(expected[refused.case], text.replace("\n", " ")), text


def test_ranks_that_count_in_another_order_are_found_by_the_weights(tmp_path: Path, launch: Launch) -> None:
    """No file tells which of the ranks are neighbors."""
    launch(4, "expert_tensor_jobs.save_alone", {"folder": str(tmp_path), "run": replace(SAVED[2], ep=4, outer=True)})
    arguments = {"run": Sharded(2, 1, 1, "fp32", degree=1), "folders": [str(tmp_path)]}
    for refused in launch(2, "expert_jobs.refuse", arguments):
        (text,) = refused.texts
        assert refused.kinds and refused.changed == set(), text
        assert "are not those of the weights saved beside it" in text, text

"""Features beyond ZeRO's stages on every supported version: what ``launch/matrix.sh --all`` runs beside test_versions.py.

The other tests of this folder vary what these show once. What a version of DeepSpeed does not have is skipped by name.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from packaging.version import Version

from elastic_ckpt.tools.conversion import convert as write_universal
from elastic_ckpt.tools.opened import config_of, locate, open_checkpoint
from tests.distributed.conftest import ROUND_ROBIN, Launch
from tests.distributed.model import Setup
from tests.distributed.offloading import CPU, PARAM, nvme
from tests.distributed.parallel_models import Parallel

pytestmark = pytest.mark.skipif(
    os.environ.get("ELASTIC_CKPT_TEST_VERSIONS") != "1", reason="launch/matrix.sh --all runs these on every version"
)
BLOCKS = (("elastic_checkpoint", {"align_partitions": 4096}),)
#: By name, what is saved on two ranks and loaded on three: exactly, also with 8-bit states, which are aligned.
CELLS: dict[str, tuple[Setup, Setup]] = {
    "CPU offload": (Setup(2, zero=(CPU,)), Setup(3, "bf16", zero=(CPU, PARAM))),
    "round robin": (Setup(2, zero=ROUND_ROBIN), Setup(1, zero=ROUND_ROBIN)),
    "FP16_Optimizer": (Setup(0, "fp16"), Setup(0, "fp16")),
    "fp16, ZeRO-3": (Setup(3, "fp16"), Setup(3, "fp16")),
}


#: What DeepSpeed 0.17 saves without optimizer states.
STATELESS = {"bf16 without ZeRO": Setup(0, "bf16"), "BF16_Optimizer": Setup(1, "bf16_fp32acc")}
#: DeepSpeed did not save before 0.19.7 how AutoTP cuts biases of fused parameters.
QKV_BIAS = {
    "elastic_checkpoint": {
        "tp_rules": [{"pattern": r".*qkv_proj\.bias", "kind": "column", "sub_parameters": [2, 1, 1]}],
    }
}


@dataclass(frozen=True)
class Degrees:
    """A tensor- or pipeline-parallel engine saved on two ranks, and what loads it on one, or the other way around."""

    wide: Parallel
    narrow: Parallel
    since: str = "0"
    config: dict[str, Any] | None = None


PARALLEL = {
    "PipelineModule": Degrees(Parallel("pipeline", "uniform", pp=2, stage=1), Parallel("pipeline", "uniform", stage=1)),
    "Megatron Core": Degrees(Parallel("megatron", "llama", tp=2, stage=1), Parallel("megatron", "llama", stage=3)),
    "AutoTP": Degrees(Parallel("autotp", "llama", tp=2, stage=1), Parallel("autotp", "llama", stage=1), since="0.16.4"),
    "AutoTP, fused": Degrees(
        Parallel("autotp", "fused", tp=2, stage=1),
        Parallel("autotp", "fused", stage=1),
        since="0.18.5",
        config=QKV_BIAS,
    ),
}
#: What builds the model, where the environment has it.
NEEDS = {"megatron": "megatron.core", "autotp": "transformers"}


def save_and_load(launch: Launch, folder: Path, source: Setup, target: Setup, **model: Any) -> list[Any]:
    """Loads of three ranks of what two saved."""
    launch(2, "save", {"folder": str(folder), "setups": [source], **model})
    sources = [{"folder": str(folder / f"{source.name}-dp2"), "format": "native"}]
    return launch(3, "load", {"targets": [{"setup": target, "sources": sources, **model}]})


@pytest.mark.parametrize("cell", CELLS)
def test_resumes_bit_exactly(cell: str, tmp_path: Path, launch: Launch) -> None:
    for load in save_and_load(launch, tmp_path, *CELLS[cell]):
        assert load.format == "native" and load.differences == {}, load.where


@pytest.mark.parametrize("cell", STATELESS)
def test_what_is_saved_without_states_resumes_with_weights(cell: str, tmp_path: Path, launch: Launch) -> None:
    if Version(torch.__version__) < Version("2.5"):
        pytest.skip("gloo's all-gather of torch 2.4 fails in the step of BF16_Optimizer")
    setup = STATELESS[cell]
    if Version(deepspeed.__version__).release[:2] != (0, 17):
        assert all(load.differences == {} for load in save_and_load(launch, tmp_path, setup, setup))
        return
    launch(2, "save", {"folder": str(tmp_path), "setups": [setup]})
    folder = tmp_path / f"{setup.name}-dp2"
    truth = torch.load(folder / "truth.pt", weights_only=False)
    truth["masters"] = {name: weight.float() for name, weight in truth["weights"].items()}  # masters are not saved
    torch.save(truth, folder / "truth.pt")
    case = {"setup": setup, "folder": str(folder), "stateless": list(truth["masters"])}
    for load in launch(3, "changed", [{**case, "arguments": {"load_optimizer_states": False}}]):
        assert load.format == "native" and load.differences == {}, load.where


@pytest.mark.parametrize("cell", PARALLEL)
def test_changes_its_degree(cell: str, tmp_path: Path, launch: Launch) -> None:
    case = PARALLEL[cell]
    if Version(deepspeed.__version__) < Version(case.since):
        pytest.skip(f"since DeepSpeed {case.since}")
    pytest.importorskip(NEEDS.get(case.wide.kind, "torch"))
    for ranks, source in ((2, case.wide), (1, case.narrow)):
        launch(ranks, "parallel_jobs.save", {"folder": str(tmp_path), "setups": [source]})
    loads = [(1, case.narrow, case.wide), (2, case.wide, case.narrow)]
    if case.wide.kind == "autotp" and Version(deepspeed.__version__) < Version("0.18"):
        loads.pop()  # live parameters say nothing of their cuts, so that it asks for rules
    for ranks, target, source in loads:
        sources = [{"folder": str(tmp_path / f"{source.name}-dp1")}]
        for load in launch(ranks, "parallel_jobs.load", [{"setup": target, "sources": sources, "config": case.config}]):
            assert load.format == "native" and load.differences == {}, load.where


@pytest.mark.parametrize("cell", ["bitsandbytes, align_partitions"])
def test_eight_bit_states_resume_bit_exactly(cell: str, tmp_path: Path, launch: Launch) -> None:
    pytest.importorskip("bitsandbytes")
    if Version(deepspeed.__version__).release[:2] == (0, 17):
        pytest.skip("0.17 cannot step where a rank has no parameter of a param group")
    setup = Setup(2, optimizer="bnb.AdamW8bit", config=BLOCKS)
    case = {"setup": setup, "folder": str(tmp_path / "saved")}
    launch(2, "optimizer_jobs.save", [case])
    for load in launch(3, "optimizer_jobs.load", [case]):
        assert load.differences == load.states == {} and load.requantized == 0, load.where


@pytest.mark.parametrize("cell", ["universal, ZeRO-1 to 3", "universal, ZeRO-3 to 1"])
def test_universal_checkpoints_resume_bit_exactly(cell: str, tmp_path: Path, launch: Launch) -> None:
    source, target = (Setup(int(stage)) for stage in cell.removeprefix("universal, ZeRO-").split(" to "))
    launch(2, "save", {"folder": str(tmp_path / "native"), "setups": [source]})
    (tmp_path / "universal").mkdir()
    saved, converted = (tmp_path / kind / f"{source.name}-dp2" for kind in ("native", "universal"))
    if source.stage == 3 and Version(deepspeed.__version__) < Version(
        "0.18"
    ):  # its converter fails on two param groups
        write_universal(open_checkpoint(locate(str(saved), None), config_of(None)), converted / "step4")
        shutil.copy(saved / "truth.pt", converted)
    else:
        folders = {"native": str(saved.parent), "universal": str(converted.parent)}
        launch(1, "convert.run", {**folders, "name": saved.name})
    sources = [{"folder": str(converted), "format": "universal"}]
    for load in launch(3, "load", {"targets": [{"setup": target, "sources": sources}]}):
        assert load.format == "universal" and load.differences == {}, load.where


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", ["NVMe offload"])
def test_states_on_nvme_resume_bit_exactly(
    cell: str, tmp_path: Path, launch: Launch, request: pytest.FixtureRequest
) -> None:
    if Version(deepspeed.__version__) < Version("0.19.7"):
        pytest.skip("since DeepSpeed 0.19.7; before, it swaps from pinned memory alone, which the CPU has none of")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("needs libaio-dev")
    request.getfixturevalue("aio")
    setup = nvme(tmp_path, "adamw")
    for load in save_and_load(launch, tmp_path, setup, setup, model="HugeLM"):
        assert load.format == "native" and load.differences == {}, load.where


@pytest.mark.parametrize("cell", ["Transformers"])
def test_a_trainer_resumes_bit_exactly(cell: str, tmp_path: Path, launch: Launch) -> None:
    pytest.importorskip("accelerate", reason="with Transformers")
    for ranks, resume in ((2, False), (3, True)):
        arguments = {"folder": str(tmp_path), "stage": 2, "resume": resume}
        for load in launch(ranks, "trainer_jobs.train", arguments):
            assert load.format == "native" and load.differences == {}, load.where

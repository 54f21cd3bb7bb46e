"""Partitions that lie elsewhere: in host memory beside an accelerator's, in sub-groups, on NVMe."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.conftest import Launch
from tests.distributed.facts import Loaded, Resumes
from tests.distributed.model import Setup
from tests.distributed.offloading import CPU, PARAM, nvme

HPZ = Setup(3, "bf16", zero=(("zero_hpz_partition_size", 2), ("stage3_param_persistence_threshold", 0)))
OFFLOADED = [
    Setup(1, "bf16", "cpuadam", zero=(CPU,)),
    Setup(2, zero=(CPU,)),
    Setup(3, optimizer="cpuadam", zero=(CPU, ("sub_group_size", 150))),
    Setup(3, "bf16", zero=(CPU, PARAM)),
    Setup(3, zero=(("stage3_param_persistence_threshold", 50), ("sub_group_size", 400))),
]

needs_aio = pytest.mark.skipif(
    os.environ.get("ELASTIC_CKPT_TEST_NVME") != "1" or not AsyncIOBuilder().is_compatible(verbose=False),
    reason="DeepSpeed's async_io op takes minutes to build, and needs libaio-dev: set ELASTIC_CKPT_TEST_NVME=1",
)


def rounding(source: Setup, target: Setup) -> float:
    """By which losses of the run that goes on may differ."""
    return 1e-5 if source.precision == target.precision == "fp32" else 5e-3


def matrix() -> list[Cell]:
    """On one rank and on four: into what is offloaded, from what is not and from its like; and from all that is."""
    plain = [Setup(1), Setup(3, "bf16")]
    crossings = [(target, [*plain, target], ranks) for ranks in (1, 4) for target in OFFLOADED]
    crossings += [(target, [*OFFLOADED, HPZ], ranks) for ranks in (1, 4) for target in (*plain, Setup(0))]
    crossings.append((HPZ, [*plain, HPZ], 4))
    return [
        crossing(Save(source), target, ranks, expected=Resumes(loss_gap=rounding(source, target)), trained=place > 0)
        for target, sources, ranks in crossings
        for place, source in enumerate(sources)
    ]


@cells(matrix())
def test_offloaded_and_split_partitions_resume_bit_exactly(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@cells([crossing(Save(Setup(1)), target, 3, "save_again") for target in OFFLOADED])
def test_saving_after_an_elastic_load_gives_what_deepspeed_loads_alone(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences == {}, load.where


def targets(crossings: list[tuple[Setup, list[tuple[Path, Setup]]]], **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "setup": target,
            "sources": [
                {"folder": str(folder / f"{s.name}-dp2"), "format": "native", "rounding": rounding(s, target)}
                for folder, s in found
            ],
            "continue": list(range(len(found))),
            **more,
        }
        for target, found in crossings
    ]


@needs_aio
@pytest.mark.usefixtures("aio")
def test_states_on_nvme_come_and_go_bit_exactly(launch: Launch, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    sources = {"plain": Setup(3), "nvme": nvme(swap), "pipeline": nvme(swap, "adamw", pipeline=True)}
    for name, setup in sources.items():
        launch(2, "save", {"folder": str(tmp_path / name), "setups": [setup], "model": "HugeLM"})
    every = [(tmp_path / name, setup) for name, setup in sources.items()]
    loads = []
    for degree in (1, 2, 3):
        crossings = [(Setup(3), every[1:]), (nvme(swap), every)]
        crossings += [(Setup(1), every[1:]), (nvme(swap, "adamw", pipeline=True), every)] if degree == 2 else []
        loads += launch(degree, "load", {"targets": targets(crossings, model="HugeLM")})
    bf16 = nvme(
        swap, precision="bf16", offload_param={"device": "nvme", "nvme_path": str(swap), "buffer_size": 1 << 20}
    )
    loads += launch(2, "load", {"targets": targets([(bf16, every[:2])], model="HugeLM")})
    for load in loads:
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap <= load.case["rounding"], load.where


@needs_aio
@pytest.mark.usefixtures("aio")
def test_what_is_wrong_with_swap_files_is_named(launch: Launch, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    setup = nvme(swap)
    launch(2, "save", {"folder": str(tmp_path), "setups": [setup], "model": "HugeLM"})
    whole = tmp_path / f"{setup.name}-dp2"
    swapped = sorted((whole / "step4" / "offloaded_tensors" / "rank01").glob("exp_avg-*.swp"))
    gone = swapped[0].name
    cases = []
    for words in ("missing", "wrong size"):
        copy = tmp_path / words
        shutil.copytree(whole, copy)
        file = copy / "step4" / "offloaded_tensors" / "rank01" / gone
        file.unlink() if words == "missing" else file.write_bytes(file.read_bytes()[:-4096])
        cases.append({"folder": str(copy), "words": words, "model": "HugeLM", "setup": Setup(1)})
    for refused in launch(2, "refusal_jobs.refuse", cases):
        (text,) = refused.texts
        assert "DamagedError" in refused.kinds and refused.changed == set()
        assert gone in text and refused.case["words"] in text


@needs_aio
@pytest.mark.usefixtures("aio")
def test_a_fresh_start_and_weights_alone_reach_states_on_nvme(launch: Launch, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    plain = Setup(3)
    launch(2, "save", {"folder": str(tmp_path / "0"), "setups": [plain], "model": "HugeLM", "steps": 0})
    launch(2, "save", {"folder": str(tmp_path / "4"), "setups": [plain], "model": "HugeLM"})
    never = {"setup": nvme(swap, "adamw"), "folder": str(tmp_path / "0" / f"{plain.name}-dp2"), "model": "HugeLM"}
    for load in launch(2, "never_stepped", [never]):
        assert load.differences == {} and load.loss_gap == 0, load.where
        assert any("before the first step" in outcome.reason for outcome in load.report.outcomes)
    case = {"folder": str(tmp_path / "4" / f"{plain.name}-dp2"), "model": "HugeLM"}
    for load in launch(2, "weights_only", [{**case, "setup": setup} for setup in (nvme(swap), Setup(1))]):
        assert load.differences == {}, load.where

"""Two saves and their loads at other stages and degrees: what ``launch/matrix.sh`` runs on every supported version.

The other tests of this folder vary what these show once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ckpt.engines.versions import needed
from tests.distributed.conftest import Launch
from tests.distributed.expert_jobs import Experts
from tests.distributed.model import Setup
from tests.source import missing

BF16, FP32 = Setup(1, "bf16"), Setup(3)
#: By name, source and target; fp32 without ZeRO has no masters of its own.
CELLS = {
    "ZeRO-1 to ZeRO-3, bf16": (BF16, Setup(3, "bf16")),
    "ZeRO-1, bf16, to no ZeRO, fp32": (BF16, Setup(0)),
    "ZeRO-3 to ZeRO-2": (FP32, Setup(2)),
    "ZeRO-3": (FP32, FP32),
}
#: Saved on four ranks, and loaded on two and on one.
EXPERTS = [Experts(4, 1, 2), Experts(4, 2, 2, data_first=True), Experts(4, 0, 4, "fp32")]


@pytest.fixture(scope="session")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    launch(2, "save", {"folder": str(folder), "setups": [BF16, FP32]})
    return folder


@pytest.mark.parametrize("cell", CELLS)
def test_resumes_bit_exactly(cell: str, saved: Path, launch: Launch) -> None:
    source, target = CELLS[cell]
    sources = [{"folder": str(saved / f"{source.name}-dp2"), "format": "native"}]
    for load in launch(3, "load", {"targets": [{"setup": target, "sources": sources}]}):
        assert load.format == "native" and load.differences == {}, load.where


def test_every_private_name_is_there() -> None:
    assert [name for each in needed() for name in missing(each)] == []


@pytest.mark.parametrize("cell", ["mixture of experts"])
def test_experts_resume_bit_exactly_at_other_degrees(cell: str, tmp_path: Path, launch: Launch) -> None:
    launch(4, "expert_jobs.save", {"folder": str(tmp_path), "runs": EXPERTS})
    for run in (Experts(2, 2, 2), Experts(1, 1, 1)):
        for load in launch(run.world, "expert_jobs.load", {"folder": str(tmp_path), "runs": [run], "sources": EXPERTS}):
            assert load.format == "native" and load.differences == {}, load.where

"""Sequence parallelism (Ulysses): any degree to any other, with data-parallel degree and ZeRO stage."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.launch import environment
from tests.distributed.model import Setup


def case(world: int, kind: str, sp: int, stage: int) -> dict[str, Any]:
    """A run that saves: of so many ranks, with sequence-parallel groups of ``sp``."""
    name = f"{kind}{sp}-z{stage}-n{world}"
    return {"name": name, "kind": kind, "sp": sp, "setup": Setup(stage, "bf16"), "data": world // sp}


SAVED = {
    4: [case(4, "mpu", 2, 1), case(4, "mpu", 2, 3), case(4, "mpu", 4, 2), case(4, "mpu", 2, 0)],
    2: [case(2, "mpu", 2, 3), case(2, "mesh", 2, 1), case(2, "mpu", 1, 3)],
}
CONVERTED = ["mpu2-z1-n4", "mpu2-z3-n4"]


@pytest.fixture(scope="module")
def saved(launch: Launch, extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case of :data:`SAVED`, and two of them as universal checkpoints, converted by ``elastic-ckpt``."""
    folder = tmp_path_factory.mktemp("sequence")
    for world, cases in SAVED.items():
        launch(world, "sequence_jobs.save", {"folder": str(folder), "cases": cases})
    for name in CONVERTED:
        command = [sys.executable, "-m", "elastic_ckpt", "convert", str(folder / name), str(folder / f"{name}-u" / "u")]
        (folder / f"{name}-u").mkdir()
        subprocess.run(command, env=environment(extensions_dir), check=True, capture_output=True, timeout=100)
    return folder


def sources(saved: Path) -> list[dict[str, Any]]:
    """Native ones, and the universal ones beside them."""
    every = {case["name"]: case for cases in SAVED.values() for case in cases}
    found = []
    for name in [*every, *(f"{name}-u" for name in CONVERTED)]:
        base = every[name.removesuffix("-u")]
        form = "universal" if name.endswith("-u") else "native"
        found.append({**base, "name": name, "format": form, "truth": str(saved / base["name"])})
    return found


@pytest.mark.parametrize(
    ("world", "kind", "sp", "stage"),
    [
        (1, "mpu", 1, 3),
        (2, "mpu", 1, 1),
        (2, "mpu", 2, 3),
        (2, "mesh", 2, 1),
        (2, "mesh", 2, 3),
        (4, "mpu", 2, 2),
        (4, "mpu", 2, 3),
        (4, "mpu", 4, 1),
        (4, "mesh", 2, 3),
    ],
)
def test_every_source_loads_at_any_sequence_and_data_parallel_degree_and_stage(
    world: int, kind: str, sp: int, stage: int, saved: Path, launch: Launch
) -> None:
    arguments = {"folder": str(saved), "case": case(world, kind, sp, stage), "sources": sources(saved)}
    data = world // sp
    loads = launch(world, "sequence_jobs.load", arguments)
    for number, load in enumerate(loads):
        source, report = load.case, load.report
        assert load.format == source["format"] and load.differences == {}, load.where
        assert (report.live.sequence.degree, report.source.sequence.degree) == (sp, source["sp"]), load.where
        assert report.live.data_degree == data, load.where
        assert report.source.sequence.data_degree(report.source.partition_degree) == source["data"], load.where
        assert not any("batch" in note for note in report.notes), report.notes
        # random states are each rank's own where each saved a file that belongs to one rank here
        rank = number // (len(loads) // world)
        per_rank = source["format"] == "native" and source["setup"].stage == 3 and data == source["data"]
        own = [rank // sp, rank % sp if sp == source["sp"] else 0]
        assert load.client_state["rng"] == (own if per_rank else [0, 0]), load.where


@pytest.mark.parametrize("world", [2, 4])
def test_what_loads_without_elastic_loading_loads_with_it(world: int, saved: Path, launch: Launch) -> None:
    for found in launch(world, "sequence_jobs.same_as_deepspeed", {"folder": str(saved), "cases": SAVED[world]}):
        assert [case for case, differences in found.items() if differences] == [], found


@pytest.mark.parametrize("world", [2, 4])
def test_saves_of_a_mesh_in_zero_3_are_refused_with_what_happened(world: int, tmp_path: Path, launch: Launch) -> None:
    for found in launch(world, "sequence_jobs.incomplete", {"folder": str(tmp_path)}):
        for refused in found.refusals:
            (text,) = refused.texts
            assert "DamagedError" in refused.kinds and refused.changed == set()
            assert f"saved {world // 2} of {world} ZeRO-3 partitions" in text
            assert "parallel_state_sp" in text


def test_the_command_line_names_the_degrees(saved: Path, extensions_dir: str) -> None:
    command = [sys.executable, "-m", "elastic_ckpt", "inspect", str(saved / "mpu2-z3-n4")]
    result = subprocess.run(
        command, env=environment(extensions_dir), check=True, capture_output=True, text=True, timeout=60
    )
    assert "ZeRO-3, DP=2, SP=2" in result.stdout
    assert "6 a rank x 1 micro-batch " in result.stdout


def test_a_lost_file_of_a_sequence_parallel_rank_is_named(saved: Path, tmp_path: Path, extensions_dir: str) -> None:
    shutil.copytree(saved / "mpu2-z3-n4", tmp_path / "copy")
    (tmp_path / "copy" / "step4" / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    command = [sys.executable, "-m", "elastic_ckpt", "verify", str(tmp_path / "copy")]
    result = subprocess.run(
        command, env=environment(extensions_dir), check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0
    assert "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt" in result.stdout.replace("\n", "")

"""Sequence parallelism (Ulysses): any degree to any other, with data-parallel degree and ZeRO stage."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed import damage
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.sequence_jobs import Run


def saved(*run: Any, **more: Any) -> Save:
    return Save(Run(*run), run[0], "sequence_jobs.save_each", **more)


BY_OUR_COMMAND = {"converted": True, "converter": "convert.convert_by_command"}
NATIVE = [
    saved(4, "mpu", 2, 1),
    saved(4, "mpu", 2, 3),
    saved(4, "mpu", 4, 2),
    saved(4, "mpu", 2, 0),
    saved(2, "mpu", 2, 3),
    saved(2, "mesh", 2, 1),
    saved(2, "mpu", 1, 3),
]
UNIVERSAL = [saved(4, "mpu", 2, 1, **BY_OUR_COMMAND), saved(4, "mpu", 2, 3, **BY_OUR_COMMAND)]
ZERO_3 = NATIVE[1]
TARGETS = [
    Run(1, "mpu", 1, 3),
    Run(2, "mpu", 1, 1),
    Run(2, "mpu", 2, 3),
    Run(2, "mesh", 2, 1),
    Run(2, "mesh", 2, 3),
    Run(4, "mpu", 2, 2),
    Run(4, "mpu", 2, 3),
    Run(4, "mpu", 4, 1),
    Run(4, "mesh", 2, 3),
]


def resumed(save: Save, run: Run) -> Cell:
    kind = "universal" if save.converted else "native"
    name = f"{save.setup.name}{' universal' * save.converted} to {run.name}"
    case = {"run": run, "format": kind}
    return Cell(name, save, "sequence_jobs.resume", run.world, case, expected=Resumes(kind))


@cells([resumed(save, run) for run in TARGETS for save in NATIVE + UNIVERSAL])
def test_every_source_loads_at_any_sequence_and_data_parallel_degree_and_stage(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    source, run = cell.save.setup, cell.case["run"]
    # random states are each rank's own where each saved a file that belongs to one rank here
    per_rank = not cell.save.converted and source.stage == 3 and run.data == source.data
    for rank, load in enumerate(facts):
        live, was = load.report.live, load.report.source
        assert (live.sequence.degree, was.sequence.degree) == (run.sp, source.sp), load.where
        assert live.data_degree == run.data, load.where
        assert was.sequence.data_degree(was.partition_degree) == source.data, load.where
        assert not any("batch" in note for note in load.report.notes), load.report.notes
        own = [rank // run.sp, rank % run.sp if run.sp == source.sp else 0]
        assert load.client_state["rng"] == (own if per_rank else [0, 0]), load.where


@cells(
    [Cell(save.setup.name, save, "sequence_jobs.same_as_deepspeed", save.ranks, {"run": save.setup}) for save in NATIVE]
)
def test_what_loads_without_elastic_loading_loads_with_it(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found == {"uninstall": {}, "install": {}}


def refused(world: int, run: Run) -> Cell:
    """ZeRO-3 of a device mesh, into an engine that loads what an ``mpu`` saved."""
    save = Save(Run(world, "mesh", 2, 3), world, "sequence_jobs.save_incomplete")
    words = (f"saved {world // 2} of {world} ZeRO-3 partitions", "parallel_state_sp")
    expected = Refuses("DamagedError", words)
    case = {"run": run}
    return Cell(run.name, save, "sequence_jobs.refuse", world, case, expected=expected, fits=(ZERO_3, case))


@cells(
    [refused(world, Run(world, kind, sp, 3)) for world in (2, 4) for kind, sp in (("mesh", 2), ("mpu", 1), ("mpu", 2))]
)
def test_saves_of_a_mesh_in_zero_3_are_refused_with_what_happened(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


def test_the_command_line_names_the_degrees(saves: Saves) -> None:
    result = CliRunner().invoke(app, ["inspect", str(saves.folder(ZERO_3))])
    assert result.exit_code == 0, result.output
    assert "ZeRO-3, DP=2, SP=2" in result.stdout
    assert "6 per rank x 1 micro-batch " in result.stdout


def test_a_lost_file_of_a_sequence_parallel_rank_is_named(saves: Saves, tmp_path: Path) -> None:
    lost = "bf16_" + damage.OPTIMIZER.format(3)
    copy = Path(shutil.copytree(saves.folder(ZERO_3), tmp_path / "copy"))
    damage.remove(lost)(copy)
    result = CliRunner().invoke(app, ["verify", str(copy)])
    assert result.exit_code == 1, result.output
    assert lost in re.sub(r"\s", "", result.stdout)

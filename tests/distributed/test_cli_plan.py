"""``elastic-ckpt plan``: jobs that do not run, held against live engines and their loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.tools.virtual import Topology
from tests.distributed.conftest import SUB_GROUPS, Launch
from tests.distributed.model import GLOBAL_BATCH, Setup
from tests.distributed.parallel_models import Parallel
from tests.oracle.proof import proof_of_folder

#: Of what a run is resumed from, and as what.
SOURCES = [Setup(1), Setup(3), Setup(2, precision="bf16"), Setup(3, zero=SUB_GROUPS), Setup(1)]
TARGETS = [Setup(0), Setup(1), Setup(2, precision="bf16"), Setup(3), Setup(3, zero=SUB_GROUPS)]


def folder_of(native: Path, setup: Setup, dp: int) -> str:
    return str(native / f"{setup.name}-dp{dp}")


def assert_as_foretold(facts: list[Any]) -> None:
    """Each rank holds and reads what ``plan`` says that it will."""
    for found in facts:
        virtual, live = found.coordinates
        assert virtual == live, found.where
        virtual, live = found.states
        assert virtual == live, found.where
        virtual, live = found.layouts
        assert virtual.items() <= live.items(), found.where
        virtual, live = found.reads
        assert virtual == live and sum(live) > 0, found.where


def test_virtual_ranks_hold_and_read_what_real_ones_do(launch: Launch, native: Path) -> None:
    """Flats, fragments and wholes, states, bytes, and bytes that others send: of DP 2 and 3, from both."""
    for dp in (2, 3):
        targets = [
            {"setup": target, "folder": folder_of(native, source, (number + dp) % 2 + 2)}
            for number, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True))
        ]
        assert_as_foretold(launch(dp, "plan_jobs.compare", targets))


def test_virtual_stages_are_those_of_real_pipelines(launch: Launch, tmp_path: Path) -> None:
    """Heavy tied layers at both ends; as saved, and balanced as DeepSpeed balances other numbers of stages."""
    others = [Parallel("3d", "parameters", pp=pp, stage=1, rows=512) for pp in (4, 1)]
    saved = Parallel("3d", "uniform", pp=2, stage=1, rows=512)
    arguments = {"folder": str(tmp_path), "saved": saved, "targets": others}
    assert_as_foretold(launch(4, "plan_jobs.compare_pipelines", arguments))


def told(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_a_real_checkpoint(native: Path) -> None:
    folder = folder_of(native, Setup(3), 2)
    found = told(folder, "--all")
    assert found["source"]["folder"] == f"{folder}/step4"
    target = {key: found["target"][key] for key in ("zero_stage", "dp", "tp", "pp", "ranks")}
    assert target == {"zero_stage": 3, "dp": 2, "tp": 1, "pp": 1, "ranks": 2}
    assert proof_of_folder(folder, Topology(dp=2, zero_stage=3)).holds
    numel = 37 * 13 + (13 + 1) * 29 + 2 * 29 + 29 * 13 + 1 + 5 * 7  # the tied head counts once
    buffers = 8 + 3 * 5 * 4
    assert found["nbytes_read"]["total"] == 12 * numel + 2 * buffers
    assert found["source"]["files"] == 4
    other = told(folder, "--dp", "3", "--zero", "1")
    assert proof_of_folder(folder, Topology(dp=3)).holds and other["ranks_planned"] == 3
    assert other["nbytes_read"]["total"] == 12 * numel + buffers
    assert other["nbytes_received"]["total"] == 2 * buffers
    every = {rank["rank"]: rank for rank in told(folder, "--dp", "3", "--zero", "1", "--all")["ranks"]}
    one = told(folder, "--dp", "3", "--zero", "1", "--rank", "1")["ranks"]
    assert one == [every[1]]


def test_the_batch_that_ranks_can_keep(native: Path) -> None:
    """The save's micro-batch is 6, of 12 samples on 2 ranks."""
    folder = folder_of(native, Setup(1), 2)
    kept = told(folder, "--dp", "4", "--global-batch", "12")
    assert kept["global_batch"] == {"saved": 12, "now": 12} and kept["answer"].endswith("global batch 12.")
    batch = kept["batch"]
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    assert batch == {**sizes, "learning_rate_factor": 1.0}
    batch = told(folder, "--dp", "5", "--global-batch", "96", "--max-micro-batch", "4")["batch"]
    assert list(batch.values()) == [95, 1, 19, 95 / 96]
    wide = {"COLUMNS": "400"}  # no row is broken
    shown = CliRunner().invoke(app, ["plan", folder, "--dp", "5", "--global-batch", "96"], env=wide).output
    assert "95 samples: micro-batch 1, gradient_accumulation_steps=19; learning rate x 0.9896" in shown


def test_a_job_that_could_not_be(native: Path) -> None:
    folder = folder_of(native, Setup(1), 2)
    refused = told(folder, "--tp", "2", code=1)
    assert refused["error"] == "MismatchError"
    assert refused["parameter"] == "never_used, embedding.weight, hidden.weight, back.weight"
    refused = told(folder, "--pp", "2", code=1)
    assert refused["remedy"] == "a pipeline-parallel degree of 1"


def test_the_answer_follows_the_config(native: Path, tmp_path: Path) -> None:
    """As saved without ``--config``; else its stage, precision, offload and batch."""
    folder, config = folder_of(native, Setup(3, precision="bf16"), 2), tmp_path / "config.json"
    assert told(folder)["answer"].startswith("Loads: yes. ZeRO-3 DP 2, ")
    batches = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config.write_text(json.dumps({"zero_optimization": zero, **batches}))
    found = told(folder, "--dp", "1", "--config", str(config), "--gpu-memory", "1MB", "--all")
    assert (found["precision"], found["offload"]["optimizer"]) == ("float32", "host")
    assert found["global_batch"] == {"saved": GLOBAL_BATCH, "now": 8} and found["fits"] is True
    numel, buffers = 1358, 68  # as counted above
    assert found["gpu_nbytes"] == 4 * numel + buffers
    sizes = "5.50kB per GPU, 16.3kB on host, bfloat16 -> float32"
    first = f"Loads: yes. ZeRO-3 DP 2 -> ZeRO-2 DP 1, {sizes}, global batch {GLOBAL_BATCH} -> 8. Fits into 1.00MB."
    assert found["answer"] == first
    (rank,) = found["ranks"]
    places = {each["key"]: each["place"] for each in rank["after_load"]}
    assert places == {"weights": "GPU", "fp32": "host", "exp_avg": "host", "exp_avg_sq": "host", "buffer": "GPU"}


def test_states_without_names_are_left_out_on_demand(unpartitioned: Path) -> None:
    assert proof_of_folder(folder_of(unpartitioned, Setup(0), 2), Topology(dp=3, zero_stage=3)).holds
    folder = folder_of(unpartitioned, Setup(0, "bf16", "fusedadam"), 2)
    error = told(folder, code=3)
    assert "--weights-only" in error["remedy"]
    (found, *_) = told(folder, "--weights-only", "--zero", "3", "--all")["ranks"]
    assert proof_of_folder(folder, Topology(dp=2, zero_stage=3), with_states=False).holds
    assert {each["key"] for each in found["filled"]} == {"frozen", "buffer"}  # of no optimizer

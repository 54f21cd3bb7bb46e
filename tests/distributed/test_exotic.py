"""What elastic_ckpt leaves to DeepSpeed: its own loader at the saved topology, a refusal by name at any other.

DeepSpeed 0.19.8 has no MiCS and no 1-bit optimizers any more: a stand-in with the same states is the live 1-bit
optimizer, and checkpoints of older versions are made from plain ones by what these wrote otherwise.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import end, environment, free_port, start

EXPERTS, HYBRID, ONEBIT, MICS = r"mixture|expert|AutoEP", r"hybrid engine", r"1-bit|onebit", r"MiCS"

#: By number of ranks: kinds of engines and ZeRO stages that save, and what the line about DeepSpeed's own loader names.
SAVED: dict[int, list[tuple[str, int, str]]] = {
    2: [
        ("sparse-1", 0, EXPERTS),
        ("sparse-1", 1, EXPERTS),
        ("sparse-2", 0, EXPERTS),
        ("sparse-2", 2, EXPERTS),
        ("autoep-2", 1, EXPERTS),
        ("autoep-2", 3, EXPERTS),
        ("hybrid", 0, HYBRID),
        ("hybrid", 1, HYBRID),
        ("hybrid", 3, HYBRID),
        ("onebit", 0, ONEBIT),
        ("plain", 0, ""),
        ("plain", 1, ""),
        ("plain", 3, ""),
    ],
    1: [
        ("sparse-1", 0, EXPERTS),
        ("sparse-1", 1, EXPERTS),
        ("autoep-1", 3, EXPERTS),
        ("hybrid", 1, HYBRID),
        ("onebit", 0, ONEBIT),
        ("plain", 1, ""),
        ("plain", 3, ""),
    ],
}

Case = tuple[str, str, int, str]

#: By number of live ranks: folder, live kind, live stage, what the refusal must name.
ANOTHER_NUMBER_OF_RANKS: dict[int, list[Case]] = {
    1: [
        ("sparse-1-z0-dp2", "sparse-1", 0, EXPERTS),
        ("sparse-2-z2-dp2", "sparse-1", 1, EXPERTS),
        ("sparse-2-z2-dp2", "plain", 1, EXPERTS),
        ("autoep-2-z3-dp2", "autoep-1", 3, EXPERTS),
        ("hybrid-z1-dp2", "hybrid", 1, HYBRID),
        ("plain-z3-dp2", "hybrid", 1, HYBRID),
        ("onebit-z0-dp2", "onebit", 0, ONEBIT),
        ("OnebitAdam", "plain", 1, ONEBIT),
        ("mics-2-of-2", "plain", 1, MICS),
    ],
    2: [
        ("sparse-1-z0-dp1", "sparse-1", 0, EXPERTS),
        ("sparse-1-z1-dp1", "sparse-2", 1, EXPERTS),
        ("autoep-1-z3-dp1", "autoep-1", 3, EXPERTS),
        ("plain-z1-dp1", "sparse-2", 1, EXPERTS),
        ("hybrid-z1-dp1", "hybrid", 3, HYBRID),
        ("onebit-z0-dp1", "onebit", 0, ONEBIT),
        ("plain-z1-dp1", "onebit", 0, ONEBIT),
    ],
}
#: As many ranks as saved it, but another layout all the same. DeepSpeed's own loader overwrites weights and counters
#: and then fails; or, where sizes happen to fit, goes on with masters and states that belong to other weights.
ANOTHER_LAYOUT: list[Case] = [
    ("sparse-1-z1-dp2", "sparse-2", 1, EXPERTS),
    ("sparse-2-z2-dp2", "sparse-1", 1, EXPERTS),
    ("sparse-1-z0-dp2", "sparse-2", 0, EXPERTS),
    ("sparse-2-z0-dp2", "sparse-1", 0, EXPERTS),
    ("autoep-2-z1-dp2", "autoep-1", 1, EXPERTS),
    ("autoep-2-z3-dp2", "autoep-1", 3, EXPERTS),
    ("sparse-1-z1-dp2", "experts-2", 1, EXPERTS),
    ("sparse-1-z1-dp2", "plain", 1, EXPERTS),
    ("sparse-1-z0-dp2", "plain", 0, EXPERTS),
    ("plain-z1-dp2", "sparse-2", 1, EXPERTS),
    ("plain-z0-dp2", "sparse-1", 0, EXPERTS),
    ("plain-z0-dp2", "onebit", 0, ONEBIT),
    ("onebit-z0-dp2", "plain", 0, ONEBIT),
    ("OnebitAdam", "plain", 0, ONEBIT),
    ("ZeroOneAdam", "plain", 0, ONEBIT),
    ("OnebitLamb", "plain", 0, ONEBIT),
    ("mics-1-of-2", "plain", 3, MICS),
]
#: Where the group that shards is the whole job, MiCS lies in files as ZeRO-3 does.
SAME_AS_ZERO3: list[Case] = [("mics-2-of-2", "plain", 3, MICS)]

#: The states that the 1-bit optimizers of DeepSpeed 0.18 keep for a parameter beside ``step`` and Adam's two.
ONEBIT_STATES: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"worker_error": torch.ones(16), "server_error": torch.ones(8), "server_chunk_size": 8},
    "ZeroOneAdam": {"worker_error": torch.ones(16), "momentum_accumulator": torch.ones(12), "var_interval": 1},
    "OnebitLamb": {"lamb_coeff_freeze": 0.5, "last_factor": 1.0, "scaling_coeff": 1.0},
}


def named(case: Case) -> str:
    return f"{case[0]} -> {case[1]}-z{case[2]}"


def run(world_size: int, arguments: dict[str, Any], extensions_dir: str, folder: Path) -> dict[str, str]:
    """Run ``exotic_jobs.py`` on real processes; what it found wrong, by case; fail where it did not end."""
    result = folder / f"{world_size}-ranks-{len(list(folder.iterdir()))}.json"
    values = json.dumps(arguments | {"result": str(result)})
    command = [sys.executable, "-m", "tests.distributed.exotic_jobs", values]
    port, processes = free_port(), []
    logs = [folder / f"{result.stem}-rank{rank}.log" for rank in range(world_size)]
    for rank, log in enumerate(logs):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        texts = {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        processes.append(start(command, environment(extensions_dir) | texts, log))
    try:
        codes = [process.wait(100) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            end(process)
    outputs = "\n".join(f"--- rank {r}, exit {c}\n{logs[r].read_text()[-4000:]}" for r, c in enumerate(codes))
    assert not any(codes) and None not in codes, f"exotic_jobs on {world_size} ranks failed\n{outputs}"
    return json.loads(result.read_text(encoding="utf-8"))


def as_cases(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    keys = ("kind", "stage", "names")
    return [
        {"name": named(case), "folder": str(folder / case[0]), **dict(zip(keys, case[1:], strict=True))}
        for case in cases
    ]


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)


def as_mics(source: Path, copy: Path, shard_size: int) -> None:
    """A ZeRO-3 checkpoint of one shard group, as MiCS of DeepSpeed 0.18 writes it in a job of two ranks."""
    shutil.copytree(source, copy)
    for file in copy.glob("step3/*.pt"):
        edit(file, lambda tree: tree["ds_config"]["zero_optimization"].update(mics_shard_size=shard_size))
        if "model_states" in file.name:
            edit(file, lambda tree: tree.update(dp_world_size=2))


def as_onebit(source: Path, copy: Path, optimizer: str) -> None:
    """A checkpoint without ZeRO, as a 1-bit optimizer of DeepSpeed 0.18 writes it."""
    shutil.copytree(source, copy)

    def change(tree: dict[str, Any]) -> None:
        tree["ds_config"]["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
        for state in tree["optimizer"]["state"].values():
            state.update(ONEBIT_STATES[optimizer], step=3)

    edit(copy / "step3" / "mp_rank_00_model_states.pt", change)


@pytest.fixture(scope="module")
def problems(extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """By number of ranks: what went wrong with every checkpoint that was loaded where it was saved, and every case."""
    folder = tmp_path_factory.mktemp("exotic")
    found: dict[int, dict[str, str]] = {2: run(2, {"folder": str(folder), "save": SAVED[2]}, extensions_dir, folder)}
    as_mics(folder / "plain-z3-dp2", folder / "mics-2-of-2", 2)
    for optimizer in ONEBIT_STATES:
        as_onebit(folder / "plain-z0-dp2", folder / optimizer, optimizer)
    cases = as_cases(ANOTHER_NUMBER_OF_RANKS[1], folder)
    found[1] = run(1, {"folder": str(folder), "save": SAVED[1], "refuse": cases}, extensions_dir, folder)
    as_mics(folder / "plain-z3-dp1", folder / "mics-1-of-2", 1)
    cases = as_cases(ANOTHER_NUMBER_OF_RANKS[2] + ANOTHER_LAYOUT, folder)
    found[2] |= run(2, {"refuse": cases, "restore": as_cases(SAME_AS_ZERO3, folder)}, extensions_dir, folder)
    return found


def test_what_the_stand_ins_stand_for_is_not_in_deepspeed_any_more() -> None:
    assert importlib.util.find_spec("deepspeed.runtime.zero.mics") is None
    for package in ("deepspeed.runtime.fp16.onebit", "deepspeed.runtime.comm.compressed"):
        assert importlib.util.find_spec(package) is None, package


@pytest.mark.parametrize(
    ("size", "kind"),
    [(size, f"{kind}-z{stage}-dp{size}") for size, kinds in SAVED.items() for kind, stage, names in kinds if names],
)
def test_where_it_was_saved_deepspeeds_own_loader_restores_it(
    size: int, kind: str, problems: dict[int, dict[str, str]]
) -> None:
    assert problems[size][kind] == ""


@pytest.mark.parametrize(
    ("size", "case"), [(size, named(case)) for size, cases in ANOTHER_NUMBER_OF_RANKS.items() for case in cases]
)
def test_on_another_number_of_ranks_it_is_refused_by_name(
    size: int, case: str, problems: dict[int, dict[str, str]]
) -> None:
    assert problems[size][case] == ""


@pytest.mark.parametrize("case", [named(case) for case in ANOTHER_LAYOUT])
def test_in_another_layout_it_is_refused_by_name(case: str, problems: dict[int, dict[str, str]]) -> None:
    assert problems[2][case] == ""


@pytest.mark.parametrize("case", [named(case) for case in SAME_AS_ZERO3])
def test_what_lies_in_files_as_zero3_does_is_left_to_deepspeed(case: str, problems: dict[int, dict[str, str]]) -> None:
    assert problems[2][case] == ""

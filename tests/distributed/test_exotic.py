"""What elastic_ckpt leaves to DeepSpeed: its own loader at the saved topology, a refusal by name at any other.

DeepSpeed 0.19.8 has no MiCS and no 1-bit optimizers any more: a stand-in with the same states is the live 1-bit
optimizer, and checkpoints of older versions are made from plain ones by what these wrote otherwise.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import Launch
from tests.distributed.facts import OWN_LOADER, Refused

HYBRID, ONEBIT, MICS = r"hybrid engine", r"1-bit|onebit", r"MiCS"

#: By number of ranks: kinds of engines and ZeRO stages that save, and what the line about DeepSpeed's own loader names.
SAVED: dict[int, list[tuple[str, int, str]]] = {
    2: [
        ("hybrid", 0, HYBRID),
        ("hybrid", 1, HYBRID),
        ("hybrid", 3, HYBRID),
        ("onebit", 0, ONEBIT),
        ("plain", 0, ""),
        ("plain", 1, ""),
        ("plain", 3, ""),
    ],
    1: [
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
        ("hybrid-z1-dp2", "hybrid", 1, HYBRID),
        ("plain-z3-dp2", "hybrid", 1, HYBRID),
        ("onebit-z0-dp2", "onebit", 0, ONEBIT),
        ("OnebitAdam", "plain", 1, ONEBIT),
        ("mics-2-of-2", "plain", 1, MICS),
    ],
    2: [
        ("hybrid-z1-dp1", "hybrid", 3, HYBRID),
        ("onebit-z0-dp1", "onebit", 0, ONEBIT),
        ("plain-z1-dp1", "onebit", 0, ONEBIT),
    ],
}
#: As many ranks as saved it, but another layout all the same. DeepSpeed's own loader overwrites weights and counters
#: and then fails; or, where sizes happen to fit, goes on with masters and states that belong to other weights.
ANOTHER_LAYOUT: list[Case] = [
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


def as_cases(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    return [
        {"name": named(case), "folder": str(folder / source), "kind": kind, "stage": stage}
        for case in cases
        for source, kind, stage, _ in [case]
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


Facts = dict[tuple[int, str], Any]


@pytest.fixture(scope="module")
def facts(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """By number of ranks and name: every load where it was saved, on all ranks, and every refusal."""
    folder = tmp_path_factory.mktemp("exotic")
    found: Facts = {}

    def run(ranks: int, job: str, arguments: Any) -> None:
        for fact in launch(ranks, f"exotic_jobs.{job}", arguments):
            key = (ranks, fact.case["name"])
            found[key] = fact if isinstance(fact, Refused) else [*found.get(key, []), fact]

    def save(ranks: int) -> None:
        kinds = [(kind, stage) for kind, stage, _ in SAVED[ranks]]
        loaded = [(kind, stage) for kind, stage, names in SAVED[ranks] if names]
        run(ranks, "save", {"folder": str(folder), "kinds": kinds, "loaded": loaded})

    save(2)
    as_mics(folder / "plain-z3-dp2", folder / "mics-2-of-2", 2)
    for optimizer in ONEBIT_STATES:
        as_onebit(folder / "plain-z0-dp2", folder / optimizer, optimizer)
    save(1)
    as_mics(folder / "plain-z3-dp1", folder / "mics-1-of-2", 1)
    run(1, "refuse", as_cases(ANOTHER_NUMBER_OF_RANKS[1], folder))
    run(2, "refuse", as_cases(ANOTHER_NUMBER_OF_RANKS[2] + ANOTHER_LAYOUT, folder))
    run(2, "restore", as_cases(SAME_AS_ZERO3, folder))
    return found


def test_what_the_stand_ins_stand_for_is_not_in_deepspeed_any_more() -> None:
    assert importlib.util.find_spec("deepspeed.runtime.zero.mics") is None
    for package in ("deepspeed.runtime.fp16.onebit", "deepspeed.runtime.comm.compressed"):
        assert importlib.util.find_spec(package) is None, package


@pytest.mark.parametrize(
    ("ranks", "name", "names"),
    [
        *(
            (ranks, f"{kind}-z{stage}-dp{ranks}", names)
            for ranks, kinds in SAVED.items()
            for kind, stage, names in kinds
            if names
        ),
        # whose files are like those of ZeRO-3
        *((2, named(case), case[3]) for case in SAME_AS_ZERO3),
    ],
)
def test_where_it_was_saved_deepspeeds_own_loader_restores_it(ranks: int, name: str, names: str, facts: Facts) -> None:
    assert len(facts[ranks, name]) == ranks
    for rank, load in enumerate(facts[ranks, name]):
        assert load.report is None, "elastic_ckpt loaded it"
        assert load.differences == {} and load.client_state["note"] == "hello"
        assert load.loss_gap == 0
        lines = [line for line in load.lines if line.startswith(OWN_LOADER)]
        assert len(lines) == (rank == 0), load.lines
        assert all(re.search(names, line.removeprefix(OWN_LOADER), re.IGNORECASE) for line in lines), lines


@pytest.mark.parametrize(
    ("ranks", "name", "names"),
    [
        *((ranks, named(case), case[3]) for ranks, cases in ANOTHER_NUMBER_OF_RANKS.items() for case in cases),
        *((2, named(case), case[3]) for case in ANOTHER_LAYOUT),
    ],
)
def test_elsewhere_it_is_refused_by_name(ranks: int, name: str, names: str, facts: Facts) -> None:
    """On another number of ranks, or in another layout."""
    refused = facts[ranks, name]
    (text,) = refused.texts
    assert refused.kinds[:1] == ("UnsupportedError",), text
    assert re.search(names, text, re.IGNORECASE), text
    assert refused.changed == set()

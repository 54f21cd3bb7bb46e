"""What elastic_ckpt leaves to DeepSpeed: its own loader at the saved topology, a refusal by name at any other.

DeepSpeed 0.19.8 has no MiCS and no 1-bit optimizers any more: a stand-in with the same states is the live 1-bit
optimizer, and checkpoints of older versions are made from plain ones by what these wrote otherwise.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.distributed import damage
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import OWN_LOADER, Loaded, Refused, Refuses

#: What the line about DeepSpeed's own loader, or the error, names.
NAMES = {"hybrid": r"hybrid engine", "onebit": r"1-bit|onebit", "mics": r"MiCS"}
#: A kind of engine, and its ZeRO stage.
Engine = tuple[str, int]
Change = Callable[[Path], None]


def saved(kind: str, stage: int, ranks: int) -> Save:
    return Save((kind, stage), ranks, "exotic_jobs.save_each")


#: The states that the 1-bit optimizers of DeepSpeed 0.18 keep for a parameter beside ``step`` and Adam's two.
ONEBIT_STATES: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"worker_error": torch.ones(16), "server_error": torch.ones(8), "server_chunk_size": 8},
    "ZeroOneAdam": {"worker_error": torch.ones(16), "momentum_accumulator": torch.ones(12), "var_interval": 1},
    "OnebitLamb": {"lamb_coeff_freeze": 0.5, "last_factor": 1.0, "scaling_coeff": 1.0},
}


def as_mics(shard_size: int) -> Change:
    """A ZeRO-3 checkpoint of one shard group becomes what MiCS of DeepSpeed 0.18 writes in a job of two ranks."""

    def change(tree: dict[str, Any]) -> None:
        tree["ds_config"]["zero_optimization"]["mics_shard_size"] = shard_size
        if "dp_world_size" in tree:  # in model states
            tree["dp_world_size"] = 2

    def apply(copy: Path) -> None:
        for file in damage.tag(copy).glob("*.pt"):
            damage.edit(file.name, change)(copy)

    return apply


def as_onebit(optimizer: str) -> Change:
    """A checkpoint without ZeRO becomes what a 1-bit optimizer of DeepSpeed 0.18 writes."""

    def change(tree: dict[str, Any]) -> None:
        tree["ds_config"]["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
        for state in tree["optimizer"]["state"].values():
            state.update(ONEBIT_STATES[optimizer], step=3)

    return damage.edit("mp_rank_00_model_states.pt", change)


#: What a save becomes, by name.
CHANGES: dict[str, Change | None] = {
    "": None,
    "MiCS of 1": as_mics(1),
    "MiCS of 2": as_mics(2),
    **{optimizer: as_onebit(optimizer) for optimizer in ONEBIT_STATES},
}
PLAIN_3 = saved("plain", 3, 2)
#: What is named; at the topology of the save, and what that becomes.
RESTORED = [
    ("hybrid", saved("hybrid", 0, 2), ""),
    ("hybrid", saved("hybrid", 1, 2), ""),
    ("hybrid", saved("hybrid", 3, 2), ""),
    ("onebit", saved("onebit", 0, 2), ""),
    ("hybrid", saved("hybrid", 1, 1), ""),
    ("onebit", saved("onebit", 0, 1), ""),
    # where the group that shards is the whole job, MiCS lies in files as ZeRO-3 does
    ("mics", PLAIN_3, "MiCS of 2"),
]


def source(save: Save, becomes: str) -> str:
    """For the names of cells."""
    kind, stage = save.setup
    return f"{becomes or kind}-z{stage}-n{save.ranks}"


def restored(named: str, save: Save, becomes: str) -> Cell:
    case = {"setup": save.setup}
    name, change = source(save, becomes), CHANGES[becomes]
    return Cell(name, save, "exotic_jobs.restore", save.ranks, case, change, expected=NAMES[named])


@cells([restored(*row) for row in RESTORED])
def test_where_it_was_saved_deepspeeds_own_loader_restores_it(cell: Cell, facts: list[Loaded]) -> None:
    assert len(facts) == cell.ranks
    for rank, load in enumerate(facts):
        assert load.report is None, "elastic_ckpt loaded it"
        assert load.differences == {} and load.client_state["note"] == "hello"
        assert load.loss_gap == 0
        lines = [line for line in load.lines if line.startswith(OWN_LOADER)]
        assert len(lines) == (rank == 0), load.lines
        for line in lines:
            assert re.search(cell.expected, line.removeprefix(OWN_LOADER), re.IGNORECASE), line


#: What is named; what was saved, and becomes what; the live engine, and its number of ranks.
REFUSED = [
    # on another number of ranks
    ("hybrid", saved("hybrid", 1, 2), "", ("hybrid", 1), 1),
    ("hybrid", PLAIN_3, "", ("hybrid", 1), 1),
    ("onebit", saved("onebit", 0, 2), "", ("onebit", 0), 1),
    ("onebit", saved("plain", 0, 2), "OnebitAdam", ("plain", 1), 1),
    ("mics", PLAIN_3, "MiCS of 2", ("plain", 1), 1),
    ("hybrid", saved("hybrid", 1, 1), "", ("hybrid", 3), 2),
    ("onebit", saved("onebit", 0, 1), "", ("onebit", 0), 2),
    ("onebit", saved("plain", 1, 1), "", ("onebit", 0), 2),
    # as many ranks as saved it, but another layout all the same. DeepSpeed's own loader overwrites weights and counters
    # and then fails; or, where sizes happen to fit, goes on with masters and states that belong to other weights.
    ("onebit", saved("plain", 0, 2), "", ("onebit", 0), 2),
    ("onebit", saved("onebit", 0, 2), "", ("plain", 0), 2),
    *(("onebit", saved("plain", 0, 2), optimizer, ("plain", 0), 2) for optimizer in ONEBIT_STATES),
    ("mics", saved("plain", 3, 1), "MiCS of 1", ("plain", 3), 2),
]
#: What any number of ranks resumes.
FITS = (saved("plain", 1, 2), {"setup": ("plain", 1)})


def refused(named: str, save: Save, becomes: str, live: Engine, ranks: int) -> Cell:
    kind, stage = live
    name = f"{source(save, becomes)} to {kind}-z{stage}-n{ranks}"
    case, change = {"setup": live}, CHANGES[becomes]
    return Cell(name, save, "exotic_jobs.refuse", ranks, case, change, expected=NAMES[named], fits=FITS)


@cells([refused(*row) for row in REFUSED])
def test_elsewhere_it_is_refused_by_name(cell: Cell, facts: list[Refused]) -> None:
    """On another number of ranks, or in another layout."""
    Refuses("UnsupportedError").check(facts)
    (refused,) = facts
    (text,) = refused.texts
    assert refused.kinds[0] == "UnsupportedError", text
    assert re.search(cell.expected, text, re.IGNORECASE), text


def test_what_the_stand_ins_stand_for_is_not_in_deepspeed_any_more() -> None:
    assert importlib.util.find_spec("deepspeed.runtime.zero.mics") is None
    for package in ("deepspeed.runtime.fp16.onebit", "deepspeed.runtime.comm.compressed"):
        assert importlib.util.find_spec(package) is None, package

"""One entry of DeepSpeed's own with another value, in real checkpoints of each kind: an error in words, or right.

``python -m tests.distributed.malformed FOLDER ...`` tries every change; here some are drawn, by a seed.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.verification import verify
from tests.distributed.cells import Cell
from tests.distributed.cells import cells as table
from tests.distributed.malformed import (
    REMOVED,
    VALUES,
    broken,
    cells,
    changed,
    outcome,
    planned,
    saved_files,
    with_change,
)
from tests.distributed.model import Setup

SEED = 11
#: Changes of each kind in a run of all tests, and of a night.
COUNT, COUNT_OF_NIGHT = 24, 200
#: Kind -> session fixture, and folder in it.
SOURCES = {
    "ZeRO-0": ("unpartitioned", "z0-fp32-adamw-dp2"),
    "ZeRO-0 in bf16": ("unpartitioned", "z0-bf16-adamw-dp2"),
    "ZeRO-1": ("native", "z1-fp32-adamw-dp2"),
    "ZeRO-2": ("native", "z2-bf16-adamw-dp2"),
    "ZeRO-3": ("native", "z3-fp32-adamw-dp2"),
    "universal": ("universal", "z1-fp32-adamw-dp2"),
    "universal of ZeRO-3": ("universal", "z3-fp32-adamw-dp2"),
    "dcp": ("dcp_folder", ""),
}


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``dcp.save`` writes of a model and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save({"model": weights, "optim": states, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(params=SOURCES)
def folder(request: pytest.FixtureRequest) -> Path:
    fixture, name = SOURCES[request.param]
    return Path(request.getfixturevalue(fixture)) / name


@pytest.mark.parametrize("count", [COUNT, pytest.param(COUNT_OF_NIGHT, marks=pytest.mark.nightly)])
def test_no_change_of_one_entry_breaks_a_command(folder: Path, count: int) -> None:
    assert broken(folder) == [], "what is not changed is whole"
    tried, problems = 0, []
    for name, place, way, tree in cells(folder, SEED, count):
        tried += 1
        with with_change(folder, name, tree) as target:
            problems += [f"{name} {place} <- {way}: {problem}" for problem in broken(target)]
    assert tried > COUNT // 3
    assert problems == []


OPTIMIZER = "step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"
BASE = ("optimizer_state_dict", "base_optimizer_state")
#: Kind, file, place and way.
REFUSED = [
    *(("ZeRO-1", OPTIMIZER, (*BASE, "param_groups"), way) for way in ("[]", "{}", "7", "[None]", "[[]]", REMOVED)),
    ("ZeRO-1", OPTIMIZER, (*BASE, "param_groups", 0, "params"), REMOVED),
    ("ZeRO-1", OPTIMIZER, (*BASE, "param_groups", 0), "an integer as a key"),
    ("ZeRO-1", OPTIMIZER, (*BASE, "param_groups", 0, "decoupled_weight_decay"), "a tensor"),
    ("ZeRO-1", OPTIMIZER, (*BASE, "state", 0, "exp_avg"), "range"),
    ("ZeRO-1", OPTIMIZER, (*BASE, "state", 0, "exp_avg_sq"), "2 x 2"),
    ("ZeRO-1", OPTIMIZER, ("optimizer_state_dict", "zero_stage"), "-1"),
    ("ZeRO-1", OPTIMIZER, ("optimizer_state_dict", "group_paddings"), "range"),
    ("ZeRO-1", OPTIMIZER, ("optimizer_state_dict", "param_slice_mappings", 0), "{'x': None}"),
    ("ZeRO-1", "step4/mp_rank_00_model_states.pt", ("ds_version",), "a tensor"),
    ("ZeRO-3", OPTIMIZER, ("optimizer_state_dict", "optimizer_state_dict", "param_groups"), "[]"),
    ("ZeRO-3", OPTIMIZER, ("optimizer_state_dict", "optimizer_state_dict"), "7"),
    ("ZeRO-0", "step4/mp_rank_00_model_states.pt", ("optimizer", "param_groups"), "[]"),
    ("universal", "step4_universal/zero/optimizer_state.pt", (), "7"),
    ("universal", "step4_universal/zero/optimizer_state.pt", ("param_groups",), "[]"),
    ("universal", "step4_universal/zero/optimizer_state.pt", ("param_groups", 0, "params"), "7"),
    ("universal", "step4_universal/zero/embedding.weight/exp_avg.pt", (), "7"),
]


@pytest.mark.parametrize(("kind", "name", "place", "way"), REFUSED)
def test_what_is_malformed_is_refused_by_all(
    kind: str, name: str, place: Any, way: str, request: pytest.FixtureRequest
) -> None:
    fixture, inside = SOURCES[kind]
    source = Path(request.getfixturevalue(fixture)) / inside
    tree = torch.load(source / name, weights_only=False)
    with with_change(source, name, changed(tree, place, way)) as target:
        assert broken(target) == []
        result = verify(str(target), None, ElasticConfig(), full=True)
        assert not result.ok, "verify names it"
        assert name.rpartition("/")[2] in repr(result.problems), "by its file"
        assert outcome(lambda: planned(str(target), 1))[0] == "refused"


WARMED = {"last_epoch": 4, "base_lrs": [0.1, 0.1], "_last_lr": [0.1, 0.1], "_schedulers": [{"last_epoch": 2}]}
#: A scheduler's state on rank 1, and whether it may be of the save whose rank 0 has ``WARMED``.
OF_OTHER_RANK: list[tuple[Any, bool]] = [
    (WARMED, True),
    ({**WARMED, "_last_lr": [0.2, 0.1]}, True),  # as of ReduceLROnPlateau, by what each rank measures
    ({**WARMED, "best": 0.5}, True),
    (None, False),
    ({**WARMED, "last_epoch": 1000}, False),
    ({**WARMED, "last_epoch": float("nan")}, False),
    ({**WARMED, "last_epoch": "4"}, False),
    ({**WARMED, "base_lrs": [7.0, 0.1]}, False),
    ({**WARMED, "base_lrs": [0.1]}, False),
    ({**WARMED, "_schedulers": [{"last_epoch": 3}]}, False),
    ({**WARMED, "_schedulers": []}, False),
]


@pytest.mark.parametrize(("other", "is_one_save"), OF_OTHER_RANK)
def test_ranks_have_one_schedule(other: Any, is_one_save: bool, native: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(native / "z3-fp32-adamw-dp2", tmp_path / "c"))
    for rank, state in enumerate((WARMED, other)):
        path = folder / f"step4/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        tree = torch.load(path, weights_only=False)
        torch.save({**tree, "lr_scheduler": state}, path)
    result = verify(str(folder), None, ElasticConfig(), full=True)
    assert result.ok is is_one_save
    assert (outcome(lambda: planned(str(folder), 3))[0] == "ok") is is_one_save
    if not is_one_save:
        assert "lr scheduler" in repr(result.problems)


def test_an_entry_without_chunks_is_refused(dcp_folder: Path) -> None:
    metadata = saved_files(dcp_folder)[".metadata"]
    name = "model.0.weight"
    made, entry = copy.copy(metadata), copy.copy(metadata.state_dict_metadata[name])
    entry.chunks = []
    made.state_dict_metadata = {**metadata.state_dict_metadata, name: entry}
    with with_change(dcp_folder, ".metadata", made) as target:
        assert broken(target) == []
        assert not verify(str(target), None, ElasticConfig(), full=True).ok
        assert outcome(lambda: planned(str(target), 1))[0] == "refused"


MODEL = "step4/mp_rank_00_model_states.pt"
MODEL3 = "step4/zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER0 = "step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"
#: What DeepSpeed's own loader asks a model-states file for, and takes as it is.
ASKED = ("module", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "lr_scheduler")
ASKED_BADLY = (REMOVED, "text", "no code points")
OTHERS = [
    (("lr_scheduler",), "7"),
    (("module",), "{}"),
    (("global_samples",), "a tensor"),
    (("module", "embedding.weight"), "2 x 2"),
]
OF_STATES = [(("optimizer",), REMOVED), (("optimizer", "state", 2, "step"), "text")]
OF_STATES += [(("optimizer", "state", 2, "exp_avg"), way) for way in ("text", "range", "text in an array")]
OF_PARTITION = [
    ("loss_scaler", REMOVED),
    ("loss_scaler", "None"),
    ("overflow", REMOVED),
    ("dynamic_loss_scale", REMOVED),
]


def real_loads(setup: Setup, left: bool, name: str, more: list[tuple[Any, str, str]]) -> dict[str, Any]:
    """Each entry that DeepSpeed's own loader asks a file for, missing and of other types, and ``more``."""
    changes = [(name, (key,), way) for key in ASKED for way in ASKED_BADLY] + [(name, *each) for each in OTHERS]
    return {"setup": setup, "live": setup, "left": left, "changes": [*changes, *more]}


REAL_LOADS = {
    "ZeRO-0": real_loads(Setup(0), False, MODEL, [(MODEL, *each) for each in OF_STATES]),
    "ZeRO-0, left to DeepSpeed": real_loads(Setup(0), True, MODEL, [(MODEL, *each) for each in OF_STATES]),
    "ZeRO-1, left to DeepSpeed": real_loads(Setup(1), True, MODEL, []),
    "ZeRO-3, left to DeepSpeed": real_loads(
        Setup(3, "bf16"),
        True,
        MODEL3,
        [(f"step4/bf16_{OPTIMIZER0[6:]}", ("optimizer_state_dict", key), way) for key, way in OF_PARTITION],
    ),
    **{
        f"drawn, ZeRO-{stage}": {
            "setup": Setup(stage),
            "live": Setup(stage),
            "left": stage == 2,
            "seed": 5,
            "count": 30,
        }
        for stage in (0, 1, 2, 3)
    },
}


#: Objects of numpy's that no reader makes, wherever they are.
UNREADABLE = {"no code points", "times of no unit", "of two fields", "of opaque items"}
IN_STATE = [(*BASE, "state", 0, key) for key in ("step", "exp_avg", "exp_avg_sq")]
WITHOUT_STATES = {
    "setup": Setup(1),
    "live": Setup(1),
    "arguments": {"load_optimizer_states": False},
    "changes": [(OPTIMIZER0, place, way) for place in IN_STATE for way in VALUES if way not in UNREADABLE],
}


@table([Cell("ZeRO-1", None, "malformed_jobs.load_each", ranks=1, case=WITHOUT_STATES)])
def test_states_that_no_load_asks_for_are_not_judged(cell: Cell, facts: list[Any]) -> None:
    (found,) = facts
    assert found.problems == []
    assert found.refused == 0


@table([Cell(name, None, "malformed_jobs.load_each", ranks=1, case=case) for name, case in REAL_LOADS.items()])
def test_no_change_of_one_entry_breaks_a_load(cell: Cell, facts: list[Any]) -> None:
    (found,) = facts
    assert found.problems == [] and found.refused

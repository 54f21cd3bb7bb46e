"""Whether files have what DeepSpeed's own loader reads of them; real loads are in ``tests/distributed``."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.load.entries_read import can_read_model, can_read_partition

MODULE = torch.nn.Linear(2, 3)
MODULE.bias.requires_grad_(False)
STATE = {"step": torch.tensor(4.0), "exp_avg": torch.zeros(3, 2)}
OPTIMIZER = {"state": {0: STATE}, "param_groups": [{"lr": 0.1, "params": [0]}]}
MODEL = {
    "module": MODULE.state_dict(),
    "global_steps": 4,
    "global_samples": 32,
    "skipped_steps": 0,
    "dp_world_size": 2,
    "mp_world_size": 1,
    "lr_scheduler": {"last_epoch": 4},
    "optimizer": OPTIMIZER,
    "frozen_param_fragments": {"bias": MODULE.bias.detach()},
}
PARTITION = {
    "loss_scaler": LossScaler(1.0),
    "dynamic_loss_scale": False,
    "overflow": False,
    "clip_grad": 1.0,
    "ds_version": "0.19.8",
    "base_optimizer_state": OPTIMIZER,
}
#: Param groups with other members than one, whose number is 0.
OTHER_MEMBERS: list[Any] = [{}, None, 7, [], [7], [{"params": [0]}, {"params": [1]}], [{}]]
OTHER_MEMBERS += [[{"params": members}] for members in (0, None, [], [1], [0, 1], [0, 0], ["0"], {0: 0})]
#: A changed entry, and whether DeepSpeed's own loader still reads the file.
MODELS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    *[({key: ...}, False) for key in MODEL if key not in ("global_samples", "frozen_param_fragments")],
    *[({key: value}, False) for key in ("skipped_steps", "mp_world_size") for value in (None, "x", 1.0, -1)],
    ({"global_samples": ...}, True),
    ({"global_samples": "many"}, False),
    ({"frozen_param_fragments": None}, True),
    ({"frozen_param_fragments": {}}, False),
    ({"frozen_param_fragments": {"bias": torch.zeros(1)}}, False),
    ({"module": {}}, False),
    ({"module": {"weight": torch.zeros(3, 3)}}, False),
    ({"module": {"weight": 7}}, False),
    ({"optimizer": {**OPTIMIZER, "fp32_groups_flat": [torch.zeros(3)]}}, False),
]
MODELS += [({"optimizer": {**OPTIMIZER, "param_groups": groups}}, False) for groups in OTHER_MEMBERS]
SCALED = {"dynamic_loss_scale": True, "clip_grad": 0.0, "cur_scale": 2.0, "cur_iter": 1, "fp32_groups_flat": []}
SCALED |= {"last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 100}
MODELS += [({"optimizer": {**OPTIMIZER, **SCALED}}, True)]
MODELS += [({"optimizer": {**OPTIMIZER, **SCALED, key: None}}, False) for key in ("cur_iter", "scale_window")]
MODELS += [({"optimizer": {**OPTIMIZER, **SCALED, "dynamic_loss_scale": False, "scale_window": None}}, True)]
WITHOUT_CLIPPING = {key: value for key, value in SCALED.items() if key != "clip_grad"}
UNFUSED = {"fp32_groups" if key == "fp32_groups_flat" else key: value for key, value in WITHOUT_CLIPPING.items()}
MODELS += [({"optimizer": {**OPTIMIZER, **WITHOUT_CLIPPING}}, False), ({"optimizer": {**OPTIMIZER, **UNFUSED}}, True)]
OF_ALL = {"k": torch.tensor([4])}  # which some optimizers count by, for no parameter alone
MODELS += [({"optimizer": {**OPTIMIZER, "state": {0: STATE, **more}}}, True) for more in (OF_ALL, {"k": 4})]
MODELS += [
    ({"optimizer": {**OPTIMIZER, "state": {0: STATE, **more}}}, False) for more in ({1: OF_ALL["k"]}, {"k": "x"})
]
PARTITIONS: list[tuple[dict[str, Any], set[int]]] = [
    ({}, {1, 3}),
    ({"loss_scaler": ...}, {1}),
    ({"loss_scaler": None}, set()),
    ({"overflow": ...}, {1}),
    ({"dynamic_loss_scale": ...}, {1}),
    ({"ds_version": ...}, {3}),
    ({"ds_version": "a version"}, {3}),
    ({"clip_grad": "x"}, set()),
    *[({"base_optimizer_state": {**OPTIMIZER, "param_groups": groups}}, set()) for groups in OTHER_MEMBERS],
]
#: Values of a state, and whether torch's optimizers take them as they are.
STATES: list[tuple[Any, bool]] = [
    *[(value, True) for value in (None, 1, 2.5, True, b"x", torch.zeros(3), np.float64(2), [1, (torch.zeros(1),)], {})],
    *[
        (value, False)
        for value in ("x", [["x"]], range(3), np.zeros(3), np.array(3), np.str_("x"), deque([1]), {1: "x"})
    ],
    (OrderedDict(a=1), False),
    (torch.Size((2,)), False),
]


def changed(tree: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**tree, **change}.items() if value is not ...}


def can_read(folder: Path, tree: dict[str, Any], **asked: bool) -> bool:
    torch.save(tree, folder / "file.pt")
    return can_read_model(
        open_pickled(str(folder / "file.pt")), live(0), **{"with_counters": True, "with_states": True, **asked}
    )


def live(stage: int) -> Any:
    """What is asked of an engine, with one param group of one member."""
    optimizer = SimpleNamespace(param_groups=[{"params": [MODULE.weight] if stage < 3 else []}])
    if stage == 3:
        optimizer = SimpleNamespace(optimizer=optimizer, sub_group_to_group_id={0: 0})
    return SimpleNamespace(
        zero_optimization_stage=lambda: stage,
        module=MODULE,
        lr_scheduler=object(),
        has_moe_layers=False,
        optimizer=optimizer,
    )


@pytest.mark.parametrize(("change", "is_read"), MODELS)
def test_a_model_states_file_has_all_that_is_asked_of_it(tmp_path: Path, change: dict[str, Any], is_read: bool) -> None:
    assert can_read(tmp_path, changed(MODEL, change)) is is_read


def test_weights_alone_need_no_counters_and_no_states(tmp_path: Path) -> None:
    weights = {key: MODEL[key] for key in ("module", "dp_world_size")}
    assert can_read(tmp_path, weights, with_counters=False, with_states=False)
    assert not can_read(tmp_path, {"module": MODEL["module"]}, with_counters=False, with_states=False)


@pytest.mark.parametrize(("change", "stages"), PARTITIONS)
def test_an_optimizer_states_file_has_all_that_its_stage_asks_for(
    tmp_path: Path, change: dict[str, Any], stages: set[int]
) -> None:
    torch.save({"optimizer_state_dict": changed(PARTITION, change)}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"))
    assert {stage for stage in (1, 3) if can_read_partition(file, live(stage))} == stages


@pytest.mark.parametrize(("value", "is_read"), STATES)
def test_states_are_those_that_torch_takes_as_they_are(tmp_path: Path, value: Any, is_read: bool) -> None:
    odd = {**OPTIMIZER, "state": {0: {**STATE, "odd": value}}}
    assert can_read(tmp_path, {**MODEL, "optimizer": odd}) is is_read
    if is_read:  # by torch itself
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 2))], lr=0.1)
        optimizer.load_state_dict(odd)
        found = optimizer.state[optimizer.param_groups[0]["params"][0]]["odd"]
        assert type(found) is type(value) and repr(found) == repr(value)

"""What the live data sampler and random layerwise token dropping take of a checkpoint: what they can continue with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.data_pipeline.data_sampling.utils import (
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
)

from elastic_ckpt.core.kinds import LARGEST_COUNT
from elastic_ckpt.engines.data_efficiency import clusters_anew, load_own_state, refuse_strange_state, strange_state
from elastic_ckpt.errors import MismatchError
from tests.distributed.malformed import VALUES, WAYS, changed, places

SAMPLES = 96
LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}}
DISCRETE: dict[str, Any] = {
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [1, 2.5], "max_step": [5]},
}
CUSTOM: dict[str, Any] = {"schedule_type": "custom"}
#: Beside those of any entry: numbers and texts that would be of the kind.
HOSTILE: dict[str, Any] = {
    "larger than any count": LARGEST_COUNT + 1,
    "of more digits than Python prints": 1 << 20000,
    "a flag of numpy's": np.bool_(True),
    "a difference of times": np.timedelta64(3),
    "float8": torch.zeros(1).to(torch.float8_e4m3fn),
    "a path": "../../cluster_seqlen8/../users_own",
    "another file": "users_own",
}


def sampler_of(folder: Path, **schedules: dict[str, Any]) -> Any:
    """A sampler of one rank; by metric, the schedules."""
    metrics = {
        name: {
            "clustering_type": "single_cluster",
            "difficulty_type": "value",
            "min_difficulty": 8,
            "max_difficulty": 16,
            **schedule,
        }
        for name, schedule in (schedules or {"seqlen": LINEAR}).items()
    }
    learning = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": metrics}
    config = {"seed": 1, "data_sampling": {"num_epochs": 10, "curriculum_learning": learning}}
    group = SimpleNamespace(size=lambda: 1)
    return DeepSpeedDataSampler(config, SAMPLES, 4, 0, 1, group, 1, 0)


def sampled() -> dict[str, Any]:
    """What a sampler saves after three batches."""
    return {
        "batch": [3, 95],
        "consumed_samples": 12,
        "curriculum_step": 3,
        "current_difficulties": {"seqlen": 16},
        "data_cluster_paths": ["cluster_seqlen8", "/of/an/old/release/cluster_seqlen16"],
        "data_cluster_current_position": [np.int64(8), 0],
        "np_rng_state": np.random.RandomState(5).get_state(),
    }


def dropping() -> Any:
    schedule = {
        "min_value": 2,
        "max_value": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 6, "seq_per_step": 2},
    }
    config = {
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "random_ltd_schedule": schedule,
        "global_batch_size": 4,
        "layer_token_lr_schedule": {"enabled": False},
    }
    return RandomLTDScheduler(config)


def dropped() -> dict[str, Any]:
    scheduler = dropping()
    scheduler.get_total_layer_tokens(4)
    return dict(scheduler.state_dict())


def test_its_own_states_are_taken(tmp_path: Path) -> None:
    sampler = sampler_of(tmp_path)
    assert strange_state(sampler, sampler.state_dict()) is None
    assert strange_state(sampler, sampled()) is None
    assert strange_state(sampler, {**sampled(), "of another release": 3}) is None
    assert strange_state(dropping(), dropped()) is None
    assert strange_state(dropping(), dropping().state_dict()) is None


def test_states_of_classes_of_the_users_own_are_theirs_to_judge() -> None:
    assert strange_state(SimpleNamespace(state_dict=dict), {"batch": "x"}) is None


CASES: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "data_sampler": lambda folder: (sampler_of(folder), sampled()),
    "random_ltd": lambda folder: (dropping(), dropped()),
}


@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("way", [*WAYS, *HOSTILE])
def test_any_value_in_the_place_of_any_is_refused_or_can_be_gone_on_with(key: str, way: str, tmp_path: Path) -> None:
    own, state = CASES[key](tmp_path)
    for place in places(state, most_items=5):
        new = changed(copy.deepcopy(state), place, way, HOSTILE)
        if new is ...:
            continue
        strange = strange_state(own, new)
        if strange is None:
            CHECKS[key](tmp_path, new)
        else:
            assert strange.found and strange.expected, (place, way)


def _goes_on_sampling(folder: Path, state: Any) -> None:
    positions = state["data_cluster_current_position"]
    assert all(0 <= index < SAMPLES for index in state["batch"])
    assert all(0 <= position <= SAMPLES for position in positions)
    assert {path.rpartition("/")[2] for path in state["data_cluster_paths"]} <= {"cluster_seqlen8", "cluster_seqlen16"}
    assert len(positions) == len(state["data_cluster_paths"])
    before = np.random.get_state()
    try:
        np.random.set_state(state["np_rng_state"])
        assert 0 <= np.random.random() < 1
    finally:
        np.random.set_state(before)
    for number in (state["consumed_samples"], state["curriculum_step"]):
        assert type(number) is int and number >= 0


def _goes_on_dropping(folder: Path, state: Any) -> None:
    own = dropping()
    own.load_state_dict(state)
    own.update_seq(5)
    assert type(own.get_current_seq()) is int and 0 <= own.get_current_seq() <= 8
    assert 0 <= own.state["consumed_layer_tokens"] < 1 << 63


CHECKS = {"data_sampler": _goes_on_sampling, "random_ltd": _goes_on_dropping}


@pytest.mark.parametrize(
    ("key", "change", "name"),
    [
        ("data_sampler", {"np_rng_state": ("MT19937", np.zeros(624, np.uint32), 625, 0, 0.0)}, "np_rng_state[2]"),
        ("data_sampler", {"np_rng_state": ("MT19937", np.zeros(624, np.int64), 3, 0, 0.0)}, "np_rng_state[1]"),
        ("data_sampler", {"np_rng_state": ("MT19937", np.zeros(625, np.uint32), 3, 0, 0.0)}, "np_rng_state[1]"),
        ("data_sampler", {"np_rng_state": ("PCG64", np.zeros(624, np.uint32), 3, 0, 0.0)}, "np_rng_state[0]"),
        ("data_sampler", {"np_rng_state": ("MT19937", np.zeros(624, np.uint32), 3, 2, 0.0)}, "np_rng_state[3]"),
        (
            "data_sampler",
            {"np_rng_state": ("MT19937", np.zeros(624, np.uint32), 3, 1, float("nan"))},
            "np_rng_state[4]",
        ),
        ("data_sampler", {"batch": [0, SAMPLES]}, "batch[1]"),
        ("data_sampler", {"consumed_samples": 12 * SAMPLES}, "consumed_samples"),
        ("data_sampler", {"curriculum_step": -1}, "curriculum_step"),
        ("data_sampler", {"current_difficulties": {"seqlen": 12}}, "current_difficulties['seqlen']"),
        ("data_sampler", {"current_difficulties": {"seqlen": 24}}, "current_difficulties['seqlen']"),
        ("data_sampler", {"current_difficulties": {"other": 8}}, "current_difficulties"),
        ("data_sampler", {"data_cluster_paths": ["/x/users_own"] * 2}, "data_cluster_paths[0]"),
        ("data_sampler", {"data_cluster_paths": ["cluster_seqlen8"] * 2}, "data_cluster_paths[1]"),
        ("data_sampler", {"data_cluster_paths": ["cluster_seqlen12"] * 2}, "data_cluster_paths[0]"),
        ("data_sampler", {"data_cluster_paths": ["cluster_seqlen08"] * 2}, "data_cluster_paths[0]"),
        ("data_sampler", {"data_cluster_paths": ["cluster_seqlen8/"] * 2}, "data_cluster_paths[0]"),
        ("data_sampler", {"data_cluster_current_position": [-1, 0]}, "data_cluster_current_position[0]"),
        ("data_sampler", {"data_cluster_current_position": [0]}, "data_cluster_current_position"),
        ("random_ltd", {"max_value": 10}, "max_value"),
        ("random_ltd", {"max_value": ()}, "max_value"),
        ("random_ltd", {"max_value": 4, "current_value": 6}, "current_value"),
        ("random_ltd", {"current_value": 6.0}, "current_value"),
        ("random_ltd", {"min_value": -1}, "min_value"),
        ("random_ltd", {"current_steps": -2}, "current_steps"),
        ("random_ltd", {"consumed_layer_tokens": LARGEST_COUNT + 1}, "consumed_layer_tokens"),
    ],
)
def test_an_error_names_the_entry_and_a_way_out(key: str, change: dict[str, Any], name: str, tmp_path: Path) -> None:
    own, state = CASES[key](tmp_path)
    with pytest.raises(MismatchError) as caught:
        refuse_strange_state(key, own, {**state, **change})
    assert caught.value.parameter == f"{name} of {key}"
    assert caught.value.expected and caught.value.found
    assert [remedy.arguments for remedy in caught.value.remedies] == [{}, {"load_module_only": True}]


def test_clusters_are_those_of_every_kind_of_schedule(tmp_path: Path) -> None:
    own = sampler_of(tmp_path, **{"a1": DISCRETE, "b.c": CUSTOM})

    def is_strange(*names: str) -> bool:
        return strange_state(own, {**state, "data_cluster_paths": [*names], **positions[len(names)]}) is not None

    state = {**sampled(), "current_difficulties": {"a1": 2.5, "b.c": -7}}
    positions = {count: {"data_cluster_current_position": [0] * count} for count in (1, 2)}
    assert not is_strange("cluster_a12.5_b.c-7")
    assert not is_strange("cluster_a11_b.c1e-05")
    assert not is_strange("cluster_a11_b.c3", "cluster_a11_b.c3")  # a function may come back to a difficulty
    assert is_strange("cluster_a12_b.c3")
    assert is_strange("cluster_a11_bxc3")
    assert is_strange("cluster_a11_b.c1e999")
    assert is_strange("cluster_b.c3_a11")
    assert is_strange("cluster_a11_b.c3\n")


def test_what_a_scheduler_cannot_load_is_a_mismatch(tmp_path: Path) -> None:
    own = sampler_of(tmp_path)
    before = np.random.get_state()
    try:
        with pytest.raises(MismatchError, match="could not load the saved state") as caught:
            load_own_state("data_sampler", own, sampled())  # whose clusters are not there
    finally:
        np.random.set_state(before)
    assert caught.value.parameter == "data_sampler" and "data_cluster_path" in str(caught.value.expected)
    assert [remedy.arguments for remedy in caught.value.remedies][-1] == {"load_module_only": True}


def test_a_sampler_that_loads_once_more_has_each_cluster_once(tmp_path: Path) -> None:
    for name, cluster in (("cluster_seqlen8", [3, 95]), ("cluster_seqlen16", [4])):
        builder = create_mmap_dataset_builder(str(tmp_path / name), np.int64)
        builder.add_item_numpy(np.array(cluster))
        close_mmap_dataset_builder(builder, str(tmp_path / name))
    own = sampler_of(tmp_path)
    engine = SimpleNamespace(training_dataloader=SimpleNamespace(data_sampler=own))
    before = np.random.get_state()
    try:
        for _ in range(2):
            load_own_state("data_sampler", own, sampled())
            with clusters_anew(engine):
                own.load_state_dict(sampled())  # as DeepSpeed's own loader
            assert own.data_cluster_sizes == [2, 1]
            assert [[*each[0]] for each in own.data_clusters] == [[3, 95], [4]]
    finally:
        np.random.set_state(before)
    assert "load_state_dict" not in vars(own)


@pytest.mark.parametrize("name", VALUES)
def test_a_state_that_is_no_dictionary_is_refused(name: str, tmp_path: Path) -> None:
    for make in CASES.values():
        own, _ = make(tmp_path)
        assert strange_state(own, VALUES[name]) is not None

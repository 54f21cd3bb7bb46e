"""Batch sizes that keep the global batch; and those of DeepSpeed's elasticity, compared with DeepSpeed where it has any."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.batches import batch_for, compute_elastic_config
from elastic_ckpt.errors import ConfigError, MismatchError

try:
    from deepspeed.elasticity import compute_elastic_config as of_deepspeed
except ImportError:  # dropped by DeepSpeed 0.19
    of_deepspeed = None


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 64))
@settings(deadline=None)
def test_the_global_batch_is_kept_or_the_nearest_is_taken(world_size: int, global_batch: int, largest: int) -> None:
    plan = batch_for(world_size, global_batch, largest)
    assert plan.global_batch == plan.micro_batch * plan.accumulation_steps * world_size
    assert plan.micro_batch <= largest
    assert plan.learning_rate_factor == plan.global_batch / global_batch
    if global_batch % world_size == 0:
        assert plan.global_batch == global_batch
    others = [number * world_size for number in range(1, global_batch // world_size + 2)]
    assert plan.global_batch == min(others, key=lambda other: (abs(other - global_batch), other))
    per_rank = plan.global_batch // world_size
    assert all(per_rank % micro for micro in range(plan.micro_batch + 1, min(largest, per_rank) + 1))


def test_what_deepspeed_is_told() -> None:
    assert batch_for(6, 96, 10).config == {
        "train_batch_size": 96,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
    }
    assert (batch_for(7, 96, 8).global_batch, batch_for(7, 96, 8).learning_rate_factor) == (98, 98 / 96)
    with pytest.raises(ConfigError, match="world_size=0"):
        batch_for(0, 96, 8)


#: Sections, numbers of ranks, and what the ``compute_elastic_config`` of DeepSpeed 0.14.5 returned for them: the batch,
#: how many numbers of ranks and their sum, and the micro-batch.
PAIRS: list[tuple[dict[str, Any], int, Any]] = [
    ({"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}, 0, (1680, 32, 2880)),
    (
        {
            "max_train_batch_size": 10000,
            "micro_batch_sizes": [8, 12, 16, 17],
            "min_gpus": 32,
            "max_gpus": 1500,
            "version": 0.1,
        },
        64,
        (9792, 23, 5934, 17),
    ),
    (
        {
            "max_train_batch_size": 10000,
            "micro_batch_sizes": [8, 12, 16, 17],
            "min_gpus": 32,
            "max_gpus": 1500,
            "version": 0.1,
            "prefer_larger_batch": False,
        },
        48,
        (9792, 23, 5934, 17),
    ),
    (
        {"max_train_batch_size": 4, "micro_batch_sizes": [1, 2, 3, 4], "version": 0.1, "prefer_larger_batch": False},
        0,
        (12, 6, 28),
    ),
    (
        {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "num_gpus_per_node": 8, "max_gpus": 400},
        64,
        (1920, 14, 1440, 6),
    ),
    (
        {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "num_gpus_per_node": 8, "max_gpus": 400},
        56,
        (1904, 1, 56, 2),
    ),
    ({"max_train_batch_size": 800000, "micro_batch_sizes": [1], "version": 0.1}, 1001, (720720, 198, 293442, 1)),
]


@pytest.mark.parametrize(("section", "world_size", "expected"), PAIRS)
def test_elasticity_answers_as_deepspeed_did(section: dict[str, Any], world_size: int, expected: Any) -> None:
    config = {"elasticity": {"enabled": True, **section}}
    found = compute_elastic_config(config, "0.14.5", world_size)
    batch, valid = found[:2]
    assert (batch, len(valid), sum(valid), *found[2:]) == expected


@pytest.mark.skipif(
    of_deepspeed is None, reason="this DeepSpeed has no elasticity; its golden pairs are compared above"
)
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_elasticity_answers_as_the_installed_deepspeed(data: st.DataObject) -> None:
    micro_batches = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4, unique=True))
    section: dict[str, Any] = {"enabled": True, "micro_batch_sizes": micro_batches}
    section["max_train_batch_size"] = data.draw(st.integers(max(micro_batches), 20_000))
    section["version"] = data.draw(st.sampled_from((0.1, 0.2)))
    section["prefer_larger_batch"] = data.draw(st.booleans())
    section["min_gpus"] = data.draw(st.integers(1, 20))
    section["max_gpus"] = data.draw(st.integers(section["min_gpus"], 3_000))
    if section["version"] == 0.2:
        section["model_parallel_size"] = data.draw(st.sampled_from((1, 2, 4)))
        section["num_gpus_per_node"] = section["model_parallel_size"] * data.draw(st.integers(1, 4))
    world_size = data.draw(st.integers(1 if section["version"] == 0.2 else 0, 200))
    try:
        expected = of_deepspeed({"elasticity": section}, "0.14.5", world_size)
    except Exception:
        expected = None
    assume(expected is None or (expected[0] and expected[1]))  # it answers a batch of 0 where it finds none
    try:
        found = compute_elastic_config({"elasticity": section}, "0.14.5", world_size)
    except (ConfigError, MismatchError):
        found = None
    assert found == expected


TWO_PER_NODE = {"max_train_batch_size": 100, "micro_batch_sizes": [2], "version": 0.2, "num_gpus_per_node": 2}


@pytest.mark.parametrize(
    ("section", "world_size", "error"),
    [
        (None, 0, ConfigError),
        ({"enabled": False}, 0, ConfigError),
        ({"enabled": True, "max_train_batch_size": 100}, 4, ConfigError),
        ({"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [0]}, 4, ConfigError),
        ({"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [8]}, 4, ConfigError),
        ({"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2], "version": 0.3}, 4, ConfigError),
        ({"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2], "version": 0.1}, 7, MismatchError),
        ({"enabled": True, **TWO_PER_NODE, "model_parallel_size": 3}, 4, ConfigError),
        ({"enabled": True, **TWO_PER_NODE}, 0, ConfigError),  # nor is WORLD_SIZE set
    ],
)
def test_sections_that_are_refused(
    section: Any, world_size: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(error):
        compute_elastic_config({"elasticity": section}, "0.14.5", world_size)

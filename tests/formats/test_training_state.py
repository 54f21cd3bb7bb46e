"""The training state in a model-states file: batch sizes, loss scale, fp16, counters, client state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_ckpt.core.local_state import SequenceParallel
from elastic_ckpt.core.values import BatchSizes, LossScale, TrainingState
from elastic_ckpt.errors import DamagedError, LayoutError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.saved_config import loss_scale_of, read_training_state

SCALE = LossScale(True, {"cur_scale": 256.0})
KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_from(loss_scale: LossScale | None = None, **tree: Any) -> TrainingState:
    """As it is read from a file without tensors: any file does."""
    return read_training_state(
        PickledFile(__file__, 0, tree), loss_scale, overflow=False, same_ranks=True, sequence=SequenceParallel()
    )


# --- batch sizes ------------------------------------------------------------------------------------------------


def completed_by_deepspeed(sizes: tuple[int | None, ...], dp: int) -> tuple[int | None, ...] | None:
    """What DeepSpeed itself makes of a config's batch sizes; ``None``: it refuses them."""
    config = SimpleNamespace(world_size=dp, **dict(zip(KEYS, sizes, strict=True)))
    config._set_batch_related_parameters = lambda: DeepSpeedConfig._set_batch_related_parameters(config)
    config._batch_assertion = lambda: DeepSpeedConfig._batch_assertion(config)
    try:
        DeepSpeedConfig._configure_train_batch_size(config)
    except (AssertionError, ZeroDivisionError):
        return None
    return tuple(getattr(config, key) for key in KEYS)


sizes = st.none() | st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])


@given(st.tuples(sizes, sizes, sizes), st.integers(1, 4), st.booleans())
def test_batch_sizes_are_completed_as_deepspeed_does_it(
    given_sizes: tuple[int | None, ...], dp: int, as_text: bool
) -> None:
    expected = completed_by_deepspeed(given_sizes, dp)
    assume(expected is not None)
    config: Any = {key: value for key, value in zip(KEYS, given_sizes, strict=True) if value is not None}
    assert read_from(ds_config=json.dumps(config) if as_text else config, dp_world_size=dp).batch == BatchSizes(
        *expected
    )


@pytest.mark.parametrize("config", ["/home/me/ds.json", None, {}, {"train_batch_size": "auto"}, {KEYS[0]: True}])
def test_where_the_config_does_not_tell_nothing_is_known(config: Any) -> None:
    """Counters would give a mean over a run whose batch may have changed."""
    read = read_from(ds_config=config, dp_world_size=2, global_steps=5, global_samples=40).batch
    assert read == BatchSizes(None, None, None)


@pytest.mark.parametrize("value", [0, -4, 2.0, "8", True, None, [8]])
def test_a_batch_size_that_is_no_positive_number_is_not_used(value: Any) -> None:
    assert read_from(ds_config={KEYS[0]: value}, dp_world_size=2).batch == BatchSizes(None, None, None)


@pytest.mark.parametrize("dp", [{}, {"dp_world_size": 0}])
def test_without_the_number_of_ranks_only_what_the_config_says_is_known(dp: dict[str, int]) -> None:
    assert read_from(ds_config={KEYS[0]: 8, KEYS[1]: 2}, **dp).batch == BatchSizes(8, 2, None)
    assert read_from(ds_config={KEYS[1]: 2}, **dp).batch.global_batch is None


# --- fp16 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "in_fp16"),
    [
        ({"fp16": {"enabled": True}}, True),
        ({"fp16": {"enabled": False}}, False),
        ({"fp16": {}}, False),
        ({"fp16": "on"}, False),
        ({"bf16": {"enabled": True}}, False),
        ({}, False),
        ('{"fp16": {"enabled": true}}', True),
        ('{"fp16": {"enabled": false}}', False),
        ("{}", False),
    ],
)
@pytest.mark.parametrize("scale", [SCALE, LossScale(False, {"cur_scale": 1.0})])
def test_the_config_tells_whether_a_run_trained_in_fp16(config: Any, in_fp16: bool, scale: LossScale) -> None:
    assert read_from(scale, ds_config=config).loss_scale == (scale if in_fp16 else None)


@pytest.mark.parametrize("config", ["/home/me/ds.json", None, "[1]"])
@pytest.mark.parametrize(
    ("scale", "in_fp16"),
    [
        (SCALE, True),
        (LossScale(True, {"cur_scale": 1.0}), True),
        (LossScale(False, {"cur_scale": 128.0}), True),
        (LossScale(False, {"cur_scale": 1.0}), False),
    ],
)
def test_without_the_config_a_scale_that_scales_nothing_is_none(config: Any, scale: LossScale, in_fp16: bool) -> None:
    assert read_from(scale, ds_config=config).loss_scale == (scale if in_fp16 else None)


def test_without_a_scale_there_is_none_whatever_the_config_says() -> None:
    assert read_from(None, ds_config={"fp16": {"enabled": True}}).loss_scale is None


def test_a_dynamic_scaler_gives_all_that_moves_it() -> None:
    scaler = DynamicLossScaler(2.0**20, 500, 0.5, 3, consecutive_hysteresis=True, raise_error_at_min_scale=False)
    scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 17, 5, 2
    read = loss_scale_of(scaler)
    assert read is not None
    assert read.kind == "dynamic"
    assert read.values == {
        "cur_scale": 2.0**20,
        "cur_iter": 17,
        "last_overflow_iter": 5,
        "scale_factor": 2.0,
        "scale_window": 500,
        "cur_hysteresis": 2,
        "delayed_shift": 3,
        "consecutive_hysteresis": True,
        "min_scale": 0.5,
        "raise_error_at_min_scale": False,
    }


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_a_scaler_is_the_same_in_its_file(tmp_path: Path, trust_pickle: bool) -> None:
    scaler = DynamicLossScaler(2.0**20, 500, 0.5, 3, consecutive_hysteresis=True)
    torch.save({"loss_scaler": scaler}, tmp_path / "file.pt")
    file = open_pickled(str(tmp_path / "file.pt"), trust_pickle)
    assert loss_scale_of(file.tree["loss_scaler"]) == loss_scale_of(scaler)
    assert vars(materialise(file, file.tree["loss_scaler"])) == vars(scaler)


@pytest.mark.parametrize("value", [None, "7", 7.0, -1, True, [7], torch.tensor(7), float("nan")])
def test_a_counter_that_does_not_count_is_refused_by_name(value: Any) -> None:
    with pytest.raises(DamagedError, match="a counter of this file") as caught:
        read_from(global_steps=7, skipped_steps=value)
    assert caught.value.proves_damage, "so that a load with on_damage goes on to another, as latest does"
    assert "skipped_steps" in str(caught.value.expected)
    assert read_from(global_steps=np.int64(7)).counters == {"global_steps": 7}


#: No scale, whatever the entry.
NO_NUMBERS = [None, "7", [7], torch.tensor(7.0), 10**400, 1j, math.nan, math.inf, -math.inf, 1 << 200, True]
#: Entries of a dynamic loss scaler, and values that none has.
NO_SCALER: dict[str, list[Any]] = {
    "cur_scale": [*NO_NUMBERS, 0, -1.0, 0.0],
    "scale_factor": [*NO_NUMBERS, 0, -2.0],
    "scale_window": [*NO_NUMBERS, 0, -1],
    "min_scale": [*NO_NUMBERS, -1],
    "cur_iter": [*NO_NUMBERS, -2, -(10**30), 0.5],
    "last_overflow_iter": [*NO_NUMBERS, -2, 0.5],
    "cur_hysteresis": [*NO_NUMBERS, 0.5],
    "delayed_shift": [*NO_NUMBERS, 0.5],
    "consecutive_hysteresis": [None, 0, "x"],
    "raise_error_at_min_scale": [None, 1, "x"],
}


@pytest.mark.parametrize("entry", NO_SCALER)
def test_a_dynamic_scaler_has_the_values_of_one(entry: str) -> None:
    whole = vars(DynamicLossScaler(256.0, 10, 1.0, 2, False))
    assert loss_scale_of(SimpleNamespace(**whole)) is not None
    for value in NO_SCALER[entry]:
        with pytest.raises(DamagedError, match="loss scaler") as caught:
            loss_scale_of(SimpleNamespace(**{**whole, entry: value}))
        assert entry in str(caught.value.expected)


@pytest.mark.parametrize("value", [*NO_NUMBERS, "missing"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_scaler_with_other_things_than_numbers_is_refused(value: Any, dynamic: bool) -> None:
    values = {} if value == "missing" else {"cur_scale": value}
    for saved in ({"dynamic_loss_scale": dynamic, "cur_iter": 3, **values}, SimpleNamespace(dynamic=dynamic, **values)):
        if saved == {"dynamic_loss_scale": dynamic, "cur_iter": 3}:
            continue  # an optimizer that scales nothing
        kind = LayoutError if value == "missing" else DamagedError
        with pytest.raises(kind, match="loss scaler") as caught:
            loss_scale_of(saved)
        assert type(caught.value) is kind


def test_a_static_scaler_gives_its_scale_alone() -> None:
    read = loss_scale_of(LossScaler(scale=64.0))
    assert read == LossScale(False, {"cur_scale": 64.0})
    assert read.kind == "static"
    assert loss_scale_of(None) is None


def test_entries_of_an_unpartitioned_optimizer_give_the_same_form() -> None:
    entries = {
        "dynamic_loss_scale": True,
        "cur_scale": 512.0,
        "cur_iter": 9,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "clip_grad": 1.0,
        "overflow": False,
    }
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    assert loss_scale_of(entries) == LossScale(True, {name: entries[name] for name in names})
    assert loss_scale_of({**entries, "dynamic_loss_scale": False}) == LossScale(
        False, {"cur_scale": 512.0, "cur_iter": 9}
    )
    assert loss_scale_of({"clip_grad": 1.0}) is None


# --- the rest ---------------------------------------------------------------------------------------------------


def test_the_rest_of_a_file_is_read_with_its_tensors_and_weights_stay_where_they_are(tmp_path: Path) -> None:
    tree = {
        "module": {"weight": torch.ones(3)},
        "optimizer": {"state": {}},
        "frozen_param_fragments": {"frozen": torch.ones(2)},
        "lr_scheduler": {"last_epoch": 3, "best": torch.tensor(0.5)},
        "global_steps": 4,
        "global_samples": 32,
        "skipped_steps": 1,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "mine": {"seen": torch.tensor([1, 2])},
        "torch_rng_state": torch.get_rng_state(),
    }
    torch.save(tree, tmp_path / "file.pt")
    read = read_training_state(
        open_pickled(str(tmp_path / "file.pt")), None, overflow=True, same_ranks=False, sequence=SequenceParallel()
    )
    assert read.counters == {
        "global_steps": 4,
        "global_samples": 32,
        "skipped_steps": 1,
        "dp_world_size": 2,
        "mp_world_size": 1,
    }
    assert read.lr_scheduler == {"last_epoch": 3, "best": torch.tensor(0.5)}
    assert not {"module", "optimizer", "lr_scheduler", "frozen_param_fragments"} & set(read.checkpoint)
    assert read.checkpoint["mine"]["seen"].tolist() == [1, 2]
    assert torch.equal(read.checkpoint["torch_rng_state"], tree["torch_rng_state"])  # type: ignore[arg-type]
    assert (read.overflow, read.same_ranks) == (True, False)


def test_a_file_without_a_scheduler_has_none() -> None:
    read = read_from(lr_scheduler=None, global_steps=1)
    assert read.lr_scheduler is None
    assert read.counters == {"global_steps": 1}

"""The training state of a live engine: hostile client state, and the fp16 loss scale for every kind of scaler."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig, LossScaler
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.core.values import BatchSizes, LossScale, TrainingState
from elastic_ckpt.engines.training_state import (
    LoadArguments,
    TrainingStateCommit,
    loss_scale_changes,
    warn_of_unscaled_gradients,
)
from elastic_ckpt.errors import MismatchError, errors_of_file
from elastic_ckpt.formats.saved_config import loss_scale_of

STATIC = LossScale(False, {"cur_scale": 64.0})
DYNAMIC = LossScale(
    True, {"cur_scale": 2048.0, "cur_iter": 17, "last_overflow_iter": 5, "scale_factor": 2.0, "scale_window": 100}
)


def host_of(loss_scale: LossScale | None, overflow: bool = False) -> TrainingState:
    return TrainingState({}, BatchSizes(None, None, None), None, loss_scale, overflow, {})


def scaler_of(kind: str, owner: str, scale: float = 8.0) -> Any:
    """A live scaler: an object of the partitioned optimizers, or a config of the others."""
    dynamic = kind == "dynamic"
    if owner == "config":
        arguments = {"init_scale": scale, "scale_window": 7, "min_scale": 1.0, "delayed_shift": 2}
        return LossScaleConfig(
            low_precision_dtype=torch.float16,
            dynamic_loss_scale=dynamic,
            static_loss_scale=scale,
            dynamic_loss_args=arguments if dynamic else None,
        )
    if not dynamic:
        return LossScaler(scale=scale)
    return DynamicLossScaler(scale, scale_window=7, min_scale=1.0, delayed_shift=2, consecutive_hysteresis=False)


def engine_of(scaler: Any, owner: str = "object", fp16: bool = True, stage: int = 1) -> Any:
    name = "loss_scale_config" if owner == "config" else "loss_scaler"
    optimizer = SimpleNamespace(overflow=True, **({} if scaler is None else {name: scaler}))
    return SimpleNamespace(optimizer=optimizer, fp16_enabled=lambda: fp16, zero_optimization_stage=lambda: stage)


def set_loss_scale(engine: Any, saved: TrainingState, wanted: bool) -> list[Outcome]:
    outcomes, changes = loss_scale_changes(engine, saved, wanted)
    for target, name, value in changes:
        setattr(target, name, value)
    return outcomes


@pytest.mark.parametrize("owner", ["object", "config"])
@pytest.mark.parametrize("saved", [STATIC, DYNAMIC])
def test_a_scale_of_the_same_kind_is_restored_whole(saved: LossScale, owner: str) -> None:
    scaler = scaler_of(saved.kind, owner)
    before = dict(vars(scaler))
    (outcome,) = set_loss_scale(engine_of(scaler, owner), host_of(saved), wanted=True)
    assert (outcome.role, outcome.what, outcome.names) == ("loss scale", "restored", ())
    assert f"{saved.values['cur_scale']:g}" in outcome.reason
    for key, value in saved.values.items():
        assert getattr(scaler, key) == value
    assert {key: value for key, value in vars(scaler).items() if key not in saved.values} == {
        key: value for key, value in before.items() if key not in saved.values
    }


@pytest.mark.parametrize("owner", ["object", "config"])
@pytest.mark.parametrize("saved", [STATIC, DYNAMIC])
def test_a_scale_of_another_kind_is_left_to_the_config_and_told_of(saved: LossScale, owner: str) -> None:
    kind = "static" if saved.dynamic else "dynamic"
    scaler = scaler_of(kind, owner, scale=32.0)
    before = dict(vars(scaler))
    (outcome,) = set_loss_scale(engine_of(scaler, owner), host_of(saved), wanted=True)
    assert outcome.what == "fresh"
    assert all(words in outcome.reason for words in (saved.kind, f"{saved.values['cur_scale']:g}", kind, "32"))
    assert vars(scaler) == before


@pytest.mark.parametrize("owner", ["object", "config"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_checkpoint_without_a_scale_leaves_the_live_one_and_says_so(kind: str, owner: str) -> None:
    scaler = scaler_of(kind, owner)
    before = dict(vars(scaler))
    (outcome,) = set_loss_scale(engine_of(scaler, owner), host_of(None), wanted=True)
    assert outcome.what == "fresh"
    assert kind in outcome.reason
    assert vars(scaler) == before


@pytest.mark.parametrize("saved", [STATIC, DYNAMIC])
@pytest.mark.parametrize("scaler", [None, "one that scales nothing"])
def test_a_saved_scale_that_the_live_engine_has_no_use_for_is_told_of(saved: LossScale, scaler: Any) -> None:
    # ZeRO keeps a scaler in every precision
    live = None if scaler is None else scaler_of("static", "object", scale=1.0)
    (outcome,) = set_loss_scale(engine_of(live, fp16=False), host_of(saved), wanted=True)
    assert outcome.what == "ignored"
    assert f"{saved.values['cur_scale']:g}" in outcome.reason
    assert live is None or live.cur_scale == 1.0


def test_neither_side_in_fp16_is_not_spoken_of() -> None:
    engine = engine_of(scaler_of("static", "object"), fp16=False)
    assert set_loss_scale(engine, host_of(None), wanted=True) == []
    assert engine.optimizer.overflow is False


@pytest.mark.parametrize("saved", [STATIC, DYNAMIC, None])
def test_what_was_not_asked_for_stays_and_is_told_of_where_there_is_some(saved: LossScale | None) -> None:
    engine = engine_of(scaler_of("dynamic", "object"))
    before = dict(vars(engine.optimizer.loss_scaler))
    outcomes = set_loss_scale(engine, host_of(saved), wanted=False)
    assert [outcome.what for outcome in outcomes] == ([] if saved is None else ["skipped"])
    assert vars(engine.optimizer.loss_scaler) == before
    assert engine.optimizer.overflow is True


@pytest.mark.parametrize("overflow", [True, False])
def test_the_overflow_flag_is_restored_where_the_optimizer_has_one(overflow: bool) -> None:
    engine = engine_of(scaler_of("dynamic", "object"))
    set_loss_scale(engine, host_of(DYNAMIC, overflow), wanted=True)
    assert engine.optimizer.overflow is overflow
    del engine.optimizer.overflow
    set_loss_scale(engine, host_of(DYNAMIC, overflow), wanted=True)
    assert not hasattr(engine.optimizer, "overflow")


def test_the_live_scaler_does_not_share_objects_with_the_checkpoint() -> None:
    values = {"cur_scale": torch.tensor(4.0)}
    scaler = scaler_of("static", "object")
    set_loss_scale(engine_of(scaler), host_of(LossScale(False, values)), wanted=True)
    assert scaler.cur_scale is not values["cur_scale"]
    assert torch.equal(scaler.cur_scale, values["cur_scale"])


def test_a_scaler_object_goes_to_an_unpartitioned_optimizer_and_back() -> None:
    scaler = scaler_of("dynamic", "object")
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 1024.0, 30, 12
    config = scaler_of("dynamic", "config")
    set_loss_scale(engine_of(config, "config"), host_of(loss_scale_of(scaler)), wanted=True)
    assert (config.cur_scale, config.cur_iter, config.last_overflow_iter) == (1024.0, 30, 12)
    # as FP16_Optimizer.state_dict writes it
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    entries = {"dynamic_loss_scale": True, **{name: getattr(config, name) for name in names}}
    other = scaler_of("dynamic", "object")
    set_loss_scale(engine_of(other), host_of(loss_scale_of(entries)), wanted=True)
    assert (other.cur_scale, other.cur_iter, other.last_overflow_iter) == (1024.0, 30, 12)


@pytest.mark.parametrize(
    ("saved", "saved_stage", "fp16", "live_stage", "warned"),
    [
        (DYNAMIC, 0, True, 0, None),
        (DYNAMIC, 0, True, 1, "the saved run's gradients"),
        (DYNAMIC, 0, False, 0, "the saved run's gradients"),
        (STATIC, 2, True, 0, "the live run's gradients"),
        (None, 0, True, 0, "the live run's gradients"),
        (STATIC, 2, True, 3, None),
        (None, 0, False, 0, None),
        (None, 1, False, 0, None),
    ],
)
def test_a_load_into_or_out_of_fp16_without_zero_is_warned_of(
    saved: LossScale | None, saved_stage: int, fp16: bool, live_stage: int, warned: str | None
) -> None:
    engine = engine_of(scaler_of("static", "object"), fp16=fp16, stage=live_stage)
    warnings = warn_of_unscaled_gradients(engine, host_of(saved), saved_stage)
    assert len(warnings) == (warned is not None)
    assert warned is None or warned in warnings[0]


# --- what users keep --------------------------------------------------------------------------------------------


class Hostile:
    """Nothing may be asked of a user's object."""

    def _refuse(self, *_: Any) -> Any:
        raise ValueError("asked")

    __eq__ = __bool__ = __repr__ = __str__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __hash__ = object.__hash__


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
SINGLE: list[Any] = [
    None,
    True,
    -1,
    2**70,
    float("nan"),
    1j,
    "",
    "\ud800",
    b"x",
    (),
    (1, "a"),
    frozenset({1}),
    Hostile(),
]
SINGLE += ["random_ltd", "data_sampler", "module", "optimizer", "args", "rng_state", "random_rng_state", torch.float16]
ANYTHING = [
    *SINGLE,
    HOLDS_ITSELF,
    [1],
    {},
    {0: 1},
    torch.ones(2),
    torch.ones(0),
    np.ones(2),
    argparse.Namespace(rank=1),
]
ONE = st.integers(0, len(ANYTHING) - 1)  # not the values themselves: hypothesis asks them what they are


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.integers(0, len(SINGLE) - 1), ONE, max_size=6), ONE, st.booleans(), st.booleans())
def test_no_client_state_fails_and_all_of_it_is_returned(
    drawn: dict[int, int], scheduler: int, module_only: bool, same_ranks: bool
) -> None:
    saved = {SINGLE[key]: ANYTHING[value] for key, value in drawn.items()}
    counters = {"global_steps": 3, "skipped_steps": 1, "dp_world_size": 2, "mp_world_size": 1}
    engine = engine_of(None)
    engine.lr_scheduler = engine.training_dataloader = None
    engine.random_ltd_enabled, engine.train_batch_size = bool, lambda: 8
    before = dict(vars(engine))
    host = TrainingState(counters, BatchSizes(None, None, None), ANYTHING[scheduler], None, False, saved, same_ranks)
    commit = TrainingStateCommit(engine, host, LoadArguments("/ckpt", load_module_only=module_only), RankCoordinates())
    assert vars(engine) == before
    commit.finish()
    assert getattr(engine, "global_steps", 3) == 3
    kept = {key: value for key, value in saved.items() if not isinstance(key, str) or key not in OWN}
    assert all(commit.client_state[key] is value for key, value in kept.items())
    assert hasattr(engine, "global_samples") != module_only


OWN = ("module", "optimizer", "args", "random_ltd", "data_sampler")


@pytest.mark.parametrize(
    ("args", "universal", "tp"),
    [
        ({"universal_checkpoint": True}, True, 2),  # Megatron-DeepSpeed compares the degrees itself, and seeds anew
        ({"universal_checkpoint": False}, True, 2),  # the flag of the run that saved does not matter
        ({"universal_checkpoint": True}, False, 4),
        ({}, True, 4),  # of code that has no such flag
    ],
)
def test_the_degrees_in_megatrons_arguments_stay_if_it_seeds_by_them(
    args: dict[str, bool], universal: bool, tp: int
) -> None:
    engine = engine_of(None)
    engine.lr_scheduler = engine.training_dataloader = None
    engine.random_ltd_enabled, engine.load_universal_checkpoint = bool, lambda: universal
    counters = dict.fromkeys(("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "global_samples"), 1)
    saved = {"args": argparse.Namespace(tensor_model_parallel_size=2, **args)}
    host = TrainingState(counters, BatchSizes(None, None, None), None, None, False, saved)
    commit = TrainingStateCommit(engine, host, LoadArguments("/ckpt"), RankCoordinates(tp=4))
    assert commit.client_state["args"].tensor_model_parallel_size == tp


def test_schedulers_of_deepspeed_that_fail_are_as_they_were() -> None:
    class Sampler:
        batch, consumed_samples = [1], 3

        def __init__(self) -> None:
            self.clusters = ["a"]

        def load_state_dict(self, state: Any) -> None:
            self.clusters.append("b")
            np.random.set_state(state["rng"])
            self.batch = state["batch"]

    engine = engine_of(None)
    engine.lr_scheduler, engine.random_ltd_enabled, engine.train_batch_size = None, bool, lambda: 8
    engine.training_dataloader = SimpleNamespace(data_sampler=Sampler())
    engine.curriculum_learning_enabled = lambda: True
    counters = dict.fromkeys(("global_steps", "skipped_steps", "dp_world_size", "mp_world_size"), 1)
    state = {"data_sampler": {"rng": np.random.RandomState(5).get_state()}}
    host = TrainingState(counters, BatchSizes(None, None, None), None, None, False, state)
    commit = TrainingStateCommit(engine, host, LoadArguments("/ckpt"), RankCoordinates())
    assert commit.runs_code and "data_sampler" not in commit.client_state
    random = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with pytest.raises(MismatchError, match="KeyError: 'batch'"):
        commit.load_schedulers(SimpleNamespace())  # type: ignore[arg-type]
    commit.undo_schedulers()
    assert vars(engine.training_dataloader.data_sampler) == {"clusters": ["a"]}
    assert np.random.get_state()[1].tolist() == random  # type: ignore[union-attr]
    host = replace(host, checkpoint={"data_sampler": None})  # saved before the sampler was turned on
    commit = TrainingStateCommit(engine, host, LoadArguments("/ckpt"), RankCoordinates())
    assert not commit.runs_code and "data_sampler" not in commit.client_state
    assert [each.what for each in commit.outcomes if each.role == "data_sampler"] == ["fresh"]


PATH = "/checkpoints/tag/mp_rank_00_model_states.pt"
#: What a file may have for the state of a ``StepLR``, and how far a load gets with it.
REFUSED_STATES: dict[str, Any] = {
    "of another class": {"T_max": 3, "eta_min": 0.0, "base_lrs": [0.1], "last_epoch": 1},
    "no dictionary": 7,
    "a text for a number": {"step_size": "x", "gamma": 0.1, "base_lrs": [0.1], "last_epoch": 1, "_last_lr": [0.1]},
    "a method": {"step_size": 2, "gamma": 0.1, "base_lrs": [0.1], "last_epoch": 1, "_last_lr": [0.1], "step": 3},
    "too many groups": {"step_size": 2, "gamma": 0.1, "base_lrs": [0.1] * 3, "last_epoch": 1, "_last_lr": [0.1] * 3},
}


class Picky:
    """A scheduler of the user's that raises what it likes."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("years")


@pytest.mark.parametrize("what", [*REFUSED_STATES, "the user's class raises"])
def test_a_refused_schedule_names_the_file_and_the_entry(what: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    live = Picky() if what not in REFUSED_STATES else torch.optim.lr_scheduler.StepLR(optimizer, 2)
    counters = {"global_steps": 1, "global_samples": 1, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    saved = TrainingState(counters, lr_scheduler=REFUSED_STATES.get(what, {"steps": 3}), file=PATH)
    engine = SimpleNamespace(
        lr_scheduler=live,
        optimizer=optimizer,
        random_ltd_enabled=lambda: False,
        training_dataloader=None,
        fp16_enabled=lambda: False,
        load_universal_checkpoint=lambda: False,
    )
    plan = SimpleNamespace(group_sources=[(0,)], saved_groups=1, restores_states=True, saved_rates=())
    with pytest.raises(MismatchError) as caught:
        TrainingStateCommit(engine, saved, LoadArguments("/checkpoints"), RankCoordinates()).load_schedulers(plan)  # type: ignore[arg-type]
    error = caught.value
    assert (error.file, str(error.parameter).rpartition(" ")[2]) == (PATH, "lr_scheduler")
    assert error.expected and error.found and error.remedies


def test_an_error_that_names_a_file_keeps_it() -> None:
    for own, named in ((None, PATH), ("/other", "/other")):
        with pytest.raises(MismatchError) as caught, errors_of_file(PATH):
            raise MismatchError("a problem", own)
        assert caught.value.file == named and named in str(caught.value)


@pytest.mark.parametrize(("recorded", "counted"), [(8, 24), (None, 12)])
def test_samples_that_are_not_recorded_are_counted_by_the_batches_of_the_save(
    recorded: int | None, counted: int
) -> None:
    counters = {"global_steps": 3, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    engine = SimpleNamespace(
        lr_scheduler=None,
        optimizer=SimpleNamespace(),
        random_ltd_enabled=lambda: False,
        training_dataloader=None,
        fp16_enabled=lambda: False,
        load_universal_checkpoint=lambda: False,
        train_batch_size=lambda: 4,
    )
    saved = TrainingState(counters, BatchSizes(recorded))
    TrainingStateCommit(engine, saved, LoadArguments("/checkpoints"), RankCoordinates()).finish()
    assert engine.global_samples == counted

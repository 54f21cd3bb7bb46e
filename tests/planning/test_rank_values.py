"""Values in which the ranks of a save differ: a rank's own, computed anew, left out, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import SAVED_OPTIMIZER, LocalState
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.read_plan import NO_SCHEDULER, SchedulerPlan
from elastic_ckpt.core.values import PerRank, TensorValue
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.planning.param_groups import own_file, with_own_values
from elastic_ckpt.planning.planner import LoadOptions, match
from tests.simulation import ADAM, live, saved

TWO = {"a.weight": (4, 3), "b.weight": (5,)}
ADAFACTOR = "transformers.optimization.Adafactor"


def checkpoint(**group: Any) -> CheckpointMetadata:
    """One in a single file, where each parameter was in a flat tensor of its own, of the first of two ranks."""
    rms = PerRank(((0, 0.5), (1, 0.75)))
    values = {key: PerRank(((0, one), (1, two))) for key, (one, two) in group.items()}
    scalars = dict.fromkeys(TWO, (("RMS", rms), ("step", 4.0)))
    return saved(TWO, scalars=scalars, hyperparameters=({**ADAM, **values},))


def engine(same: bool, optimizer: str = "mine.Optimizer") -> LocalState:
    """One that holds what the first rank held, or both parameters in one flat tensor."""
    groups = [[name] for name in TWO] if same else [list(TWO)]
    return replace(live(TWO, groups=groups), optimizer=optimizer)


def values_of(metadata: CheckpointMetadata) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    return [dict(saved.scalars) for saved in metadata.parameters.values()], list(metadata.groups)


def test_a_rank_that_holds_what_one_held_gets_its_values() -> None:
    found, outcomes = with_own_values(checkpoint(d=(1e-6, 2e-6)), engine(same=True), ElasticConfig())
    assert values_of(found) == ([{"RMS": 0.5, "step": 4.0}] * 2, [{**ADAM, "d": 1e-6}])
    assert outcomes == () and "each has them again: RMS, d" in found.notes[-1]


@pytest.mark.parametrize("optimizer", [ADAFACTOR, SAVED_OPTIMIZER])
def test_what_each_step_computes_is_left_out_on_other_partitions(optimizer: str) -> None:
    for metadata in (checkpoint(), saved(TWO, scalars=dict.fromkeys(TWO, (("RMS", 0.5), ("step", 4.0))))):
        found, outcomes = with_own_values(metadata, engine(False, optimizer), ElasticConfig())
        assert values_of(found)[0] == [{"step": 4.0}] * 2
        assert [(each.role, each.what) for each in outcomes] == [("RMS", "fresh")]


def test_what_is_not_known_to_be_computed_anew_is_refused_with_all_names_of_its_kind() -> None:
    with pytest.raises(UnsupportedError, match="'RMS' differs between ranks") as caught:
        match(checkpoint(), replace(engine(False), optimizer="mine.Optimizer"), LoadOptions())
    assert '"states": {"RMS": "fresh"}' in str(caught.value) and "0.5, 0.75 (by rank)" in str(caught.value)
    with pytest.raises(UnsupportedError, match="hyperparameter 'd' differs") as caught:
        with_own_values(checkpoint(d=(1, 2), k=(3, 4)), engine(False, ADAFACTOR), ElasticConfig())
    assert '"states": {"d": "fresh", "k": "fresh"}' in str(caught.value)


def test_a_user_leaves_values_out_by_name_or_keeps_the_live_groups() -> None:
    metadata = checkpoint(d=(1e-6, 2e-6))
    for same in (True, False):
        found, outcomes = with_own_values(metadata, engine(same), ElasticConfig(states={"d": "fresh", "RMS": "fresh"}))
        assert values_of(found) == ([{"step": 4.0}] * 2, [ADAM])
        assert [(each.role, each.reason) for each in outcomes] == [(key, '"states" says so') for key in ("RMS", "d")]
    found, _ = with_own_values(metadata, engine(False, ADAFACTOR), ElasticConfig(param_groups="keep_live"))
    assert values_of(found) == ([{"step": 4.0}] * 2, [ADAM])


def test_a_rank_that_held_more_less_or_in_another_order_is_another() -> None:
    metadata, same = checkpoint(), engine(same=True)
    assert own_file(metadata, same) == 0
    assert own_file(metadata, replace(same, fragments=same.fragments[:1])) is None
    assert own_file(metadata, engine(same=False)) is None
    moved = tuple(replace(fragment, flat_offset=2) for fragment in same.fragments)
    assert own_file(metadata, replace(same, fragments=(moved[0], replace(moved[1], flat=0)))) is None
    assert own_file(replace(metadata, source=replace(metadata.source, format="universal", by_rank=False)), same) is None


@pytest.mark.parametrize("step", [math.nan, math.inf, TensorValue("complex64", (), (1j,))])
def test_a_known_optimizer_gets_no_step_that_it_cannot_count_on(step: Any) -> None:
    metadata = saved(TWO, scalars=dict.fromkeys(TWO, (("step", step),)))
    with pytest.raises(DamagedError, match="'step' of these parameters is not a finite number"):
        match(metadata, live(TWO), LoadOptions())


def test_what_is_left_out_of_a_group_is_what_the_live_one_has() -> None:
    """Its name tells one kind of optimizer from another."""
    mine = engine(False, ADAFACTOR)
    groups = tuple(replace(group, hyperparameters={**ADAM, "d": 3.0}) for group in mine.groups)
    config = ElasticConfig(states={"d": "fresh"})
    found, _ = with_own_values(checkpoint(d=(1.0, 2.0)), replace(mine, groups=groups), config)
    assert values_of(found)[1] == [{**ADAM, "d": 3.0}]


def test_a_restored_schedule_keeps_the_first_of_betas_alone_where_the_user_keeps_them() -> None:
    metadata = saved(TWO, hyperparameters=({**ADAM, "betas": (0.85, 0.999)},))
    groups = tuple(replace(each, hyperparameters={**ADAM, "betas": (0.9, 0.95)}) for each in engine(True).groups)
    mine, config = replace(engine(True), groups=groups), ElasticConfig(states={"betas": "fresh"})
    for plan, betas in ((NO_SCHEDULER, (0.9, 0.95)), (SchedulerPlan(True, sets_first_beta=True), (0.85, 0.95))):
        found, _ = with_own_values(metadata, mine, config, plan)
        assert [group["betas"] for group in found.groups] == [betas]


def test_live_hyperparameters_are_met_once_for_all_saved_ones() -> None:
    """A group may be saved with any number of them."""

    class Values(dict[str, Any]):
        times = 0

        def __iter__(self) -> Iterator[str]:
            Values.times += 1
            return super().__iter__()

        def keys(self) -> Any:
            Values.times += 1
            return super().keys()

    groups = tuple(replace(each, hyperparameters=Values(ADAM)) for each in engine(True).groups)
    metadata = checkpoint(d=(1e-6, 2e-6), **{f"value{number}": (1, 1) for number in range(100)})
    found, _ = with_own_values(metadata, replace(engine(True), groups=groups), ElasticConfig())
    assert len(found.groups[0]) == len(ADAM) + 101
    assert Values.times <= 10

"""Which saved names and states belong to which live ones, and what is said of those that belong to none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.local_state import LocalState, ModelLayout
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.planning.matching import match_parameters
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.planning.state_matching import match_states
from tests.simulation import ADAM, STATES, TWO, live, names_of, saved, unpartitioned, without_states

ROLES = ("trained", FROZEN, BUFFER, None)
A = {"a.weight": (2, 5)}
B_FROZEN = {("b.weight", FROZEN): ((3,), "float32")}
STEP_4 = "; zeros, at its flat tensor's step 4"


def sides(roles: dict[str, tuple[Any, Any]]) -> tuple[CheckpointMetadata, LocalState]:
    """A checkpoint and an engine in which each name has the first role in one, the second in the other."""
    was, now = ({name: pair[side] for name, pair in roles.items()} for side in (0, 1))

    def split(side: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[tuple[str, str], Any]]:
        trained: dict[str, tuple[int, ...]] = {name: (2,) for name, role in side.items() if role == "trained"}
        return trained, {(name, role): ((2,), "float32") for name, role in side.items() if role in (FROZEN, BUFFER)}

    return saved(split(was)[0], wholes=split(was)[1]), live(split(now)[0], wholes=split(now)[1])


def test_entries_that_hooks_of_the_live_module_make_are_not_called_a_mismatch() -> None:
    metadata, engine = sides({"a": ("trained", "trained"), "a_kernel": (BUFFER, None)})
    hooked = replace(engine, others=frozenset({"a_kernel"}))
    with pytest.raises(UnsupportedError, match="neither parameters nor buffers"):
        match_parameters(metadata, hooked, strict=True)
    assert match_parameters(metadata, hooked, strict=False).restored == {"a"}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.sampled_from(ROLES), st.sampled_from(ROLES))))
def test_a_rename_is_offered_only_where_both_sides_have_names_of_their_own(roles: dict[str, tuple[Any, Any]]) -> None:
    metadata, engine = sides({**roles, "both": ("trained", "trained")})
    try:
        match_parameters(metadata, engine, strict=True)
    except MismatchError as error:
        has_both = "none" not in (error.expected or "").split(": ") and "none" not in (error.found or "").split(": ")
        assert any("rename" in str(each) for each in error.remedies) == has_both
        assert {"load_module_strict": False} in [each.arguments for each in error.remedies]


@pytest.mark.parametrize(("shape", "offered"), [((2,), True), ((3,), False)])
@pytest.mark.parametrize("key", ["trained", BUFFER])
def test_a_rename_is_offered_only_where_shapes_may_fit(shape: tuple[int, ...], offered: bool, key: str) -> None:
    was = {"a": (2,)} | ({"old.x": (2,)} if key == "trained" else {})
    now = {"a": (2,)} | ({"another.y": shape} if key == "trained" else {})
    of_buffers = [{(name, BUFFER): (size, "float32")} for name, size in (("old.x", (2,)), ("another.y", shape))]
    wholes = of_buffers if key == BUFFER else [{}, {}]
    with pytest.raises(MismatchError) as caught:
        match_parameters(saved(was, wholes=wholes[0]), live(now, wholes=wholes[1]), strict=True)
    assert any("rename" in str(each) for each in caught.value.remedies) == offered


def test_a_lost_parameter_may_be_an_entry_that_a_hook_renames() -> None:
    metadata, engine = sides({"a": ("trained", "trained"), "kernel": (None, "trained"), "a_kernel": (BUFFER, None)})
    with pytest.raises(UnsupportedError, match="neither parameters nor buffers") as error:
        match_parameters(metadata, replace(engine, others=frozenset({"a_kernel"})), strict=False)
    assert '"rename"' in str(error.value) and "kernel" in str(error.value)


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.sampled_from(ROLES), st.sampled_from(ROLES))))
def test_every_name_is_restored_or_told_of_under_the_role_it_has(roles: dict[str, tuple[Any, Any]]) -> None:
    # a buffer that became a parameter, or the other way round, has no place on the other side
    roles = {name: pair for name, pair in roles.items() if BUFFER not in pair or set(pair) <= {BUFFER, None}}
    metadata, engine = sides(roles)
    same = {name: pair for name, pair in roles.items() if None not in pair}
    fresh = {name: pair[1] for name, pair in roles.items() if pair[0] is None and pair[1] is not None}
    extra = {name: pair[0] for name, pair in roles.items() if pair[1] is None and pair[0] is not None}
    if fresh or extra:
        with pytest.raises(MismatchError):
            match_parameters(metadata, engine, strict=True)
    matching = match_parameters(metadata, engine, strict=False)
    assert matching.restored == {name for name, pair in same.items() if pair[1] == "trained"}
    assert matching.wholes == {(name, pair[1]) for name, pair in same.items() if pair[1] != "trained"}
    key = {"trained": MASTER, FROZEN: FROZEN, BUFFER: BUFFER}
    expected = {("fresh", key[role], name) for name, role in fresh.items()}
    expected |= {("ignored", key[role], name) for name, role in extra.items()}
    told = [(outcome.what, outcome.role, name) for outcome in matching.outcomes for name in outcome.names]
    assert len(told) == len(set(told))
    assert set(told) == expected
    assert all(outcome.names and outcome.reason for outcome in matching.outcomes)
    if not (fresh or extra):
        assert match_parameters(metadata, engine, strict=True) == matching


@pytest.mark.parametrize(("was", "now"), [("trained", BUFFER), (BUFFER, "trained"), (FROZEN, BUFFER), (BUFFER, FROZEN)])
def test_a_buffer_that_became_a_parameter_or_was_one_is_another_tensor(was: str, now: str) -> None:
    metadata, engine = sides({"x": (was, now), "y": ("trained", "trained")})
    with pytest.raises(MismatchError) as caught:
        match_parameters(metadata, engine, strict=True)
    assert caught.value.parameter == "x"
    matching = match_parameters(metadata, engine, strict=False)
    assert matching.restored == {"y"}
    assert matching.wholes == set()
    assert [outcome.what for outcome in matching.outcomes if "x" in outcome.names] == ["fresh"]


@pytest.mark.parametrize("key", [MASTER, FROZEN])
def test_weights_are_looked_for_under_the_role_they_were_saved_in(key: str) -> None:
    metadata = saved(TWO) if key == MASTER else saved(A, wholes=B_FROZEN)
    plan = plan_load(metadata, live(TWO), LoadOptions(optimizer_states=False))
    assert names_of(plan, MASTER, "restored") == ("a.weight", "b.weight")
    chunks = [
        chunk
        for each in ("a.weight", "b.weight")
        for chunk in metadata.tensors[each, MASTER if each[0] == "a" else key].chunks
    ]
    assert {item.byte_offset for item in plan.reads.items} == {chunk.byte_offset for chunk in chunks}


def _without_record(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """Of a save that does not list frozen parameters."""
    return replace(metadata, source=replace(metadata.source, frozen_recorded=False))


def test_weights_of_a_trained_parameter_that_were_lost_are_looked_for_as_masters() -> None:
    metadata = saved(TWO)
    tensors = {where: tensor for where, tensor in metadata.tensors.items() if where != ("b.weight", MASTER)}
    metadata = replace(metadata, tensors=tensors)
    with pytest.raises(DamagedError, match="no fp32") as caught:
        plan_load(metadata, live(TWO), LoadOptions())
    assert caught.value.parameter == "b.weight"


# --- frozen weights that were left out of the save --------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_frozen_weights_that_were_left_out_on_purpose_are_no_error(strict: bool) -> None:
    metadata = _without_record(saved(A))
    matching = match_parameters(metadata, live(A, wholes=B_FROZEN), strict)
    reason = "initialized by this run, not loaded: saved without frozen parameters (exclude_frozen_parameters=True)"
    (outcome,) = matching.outcomes
    assert (outcome.role, outcome.what, outcome.names) == (FROZEN, "fresh", ("b.weight",))
    assert outcome.reason.startswith(reason)
    assert matching.wholes == set()


def test_what_is_frozen_only_for_want_of_an_optimizer_was_not_left_out_on_purpose() -> None:
    metadata = _without_record(saved(A))
    engine = live({}, wholes={("a.weight", FROZEN): ((2, 5), "float32"), **B_FROZEN})
    engine = replace(engine, wholes=tuple(replace(whole, trains=True) for whole in engine.wholes))
    with pytest.raises(MismatchError) as caught:
        match_parameters(metadata, engine, strict=True)
    assert caught.value.parameter == "b.weight"


def test_frozen_weights_that_the_checkpoint_would_list_are_an_error() -> None:
    with pytest.raises(MismatchError) as caught:
        match_parameters(saved(A), live(A, wholes=B_FROZEN), strict=True)
    assert caught.value.parameter == "b.weight"
    (outcome,) = match_parameters(saved(A), live(A, wholes=B_FROZEN), strict=False).outcomes
    assert (outcome.role, outcome.what, outcome.names) == (FROZEN, "fresh", ("b.weight",))
    assert "exclude_frozen" not in outcome.reason


def test_frozen_weights_were_not_left_out_where_others_were_saved() -> None:
    metadata = _without_record(saved(A, wholes={("other", FROZEN): ((1,), "float32")}))
    with pytest.raises(MismatchError) as caught:
        match_parameters(metadata, live(A, wholes={**B_FROZEN, ("other", FROZEN): ((1,), "float32")}), strict=True)
    assert caught.value.parameter == "b.weight"


def test_the_second_name_of_a_tied_frozen_weight_does_not_prove_that_frozen_weights_were_saved() -> None:
    tied = {("head", FROZEN): ((3,), "float32")}
    metadata = _without_record(saved(A, wholes=tied))
    engine = live(A, wholes={**B_FROZEN, **tied})
    with pytest.raises(MismatchError):
        match_parameters(metadata, engine, strict=True)
    matching = match_parameters(
        metadata, replace(engine, model=ModelLayout(ties={"head": ("embedding",)})), strict=True
    )
    assert matching.wholes == {("head", FROZEN)}
    assert [outcome.names for outcome in matching.outcomes] == [("b.weight",)]


def test_a_trained_parameter_or_a_buffer_is_never_left_out_on_purpose() -> None:
    metadata = _without_record(saved(A))
    for engine in (live(TWO), live(A, wholes={("mask", BUFFER): ((1,), "int64")})):
        with pytest.raises(MismatchError):
            match_parameters(metadata, engine, strict=True)


# --- states -----------------------------------------------------------------------------------------------------


def outcomes_of_states(metadata: CheckpointMetadata, engine: LocalState) -> tuple[Outcome, ...]:
    return match_states(metadata, engine, match_parameters(metadata, engine, strict=False)).outcomes


def fresh(reason: str, *names: str) -> Outcome:
    return Outcome("optimizer states", "fresh", names, reason)


APART = [["a.weight"], ["b.weight"]]
NO_GRADIENT = "the checkpoint holds no state of it (it got no gradient before the save)"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (unpartitioned(without_states(saved(TWO), "b.weight")), NO_GRADIENT),
        (saved(A, wholes=B_FROZEN), "it was frozen at save time"),
        (saved(A), "not in the checkpoint"),
    ],
    ids=["no gradient", "frozen", "new"],
)
def test_states_that_start_fresh_are_told_of_with_the_reason(
    metadata: CheckpointMetadata, reason: str, together: bool
) -> None:
    engine = live(TWO, groups=None if together else APART)
    expected = fresh(reason + (STEP_4 if together else ""), "b.weight")
    assert outcomes_of_states(metadata, engine) == (expected,)


def test_states_that_start_fresh_for_different_reasons_are_told_of_apart_and_those_for_one_together() -> None:
    shapes = {**TWO, "c": (1,), "d": (1,), "e": (1,)}
    metadata = saved({**TWO, "d": (1,)}, wholes={("c", FROZEN): ((1,), "float32")})
    metadata = unpartitioned(without_states(without_states(metadata, "b.weight"), "d"))
    assert outcomes_of_states(metadata, live(shapes)) == (
        fresh("it was frozen at save time" + STEP_4, "c"),
        fresh("not in the checkpoint" + STEP_4, "e"),
        fresh(NO_GRADIENT + STEP_4, "b.weight", "d"),
    )


def test_an_optimizer_without_steps_gives_no_step_in_the_reason() -> None:
    metadata = unpartitioned(without_states(saved(TWO, states=("m",), scalars=dict.fromkeys(TWO, ())), "b.weight"))
    engine = live(TWO, states=("m",), scalar_keys=())
    (outcome,) = outcomes_of_states(metadata, engine)
    assert outcome.reason in (NO_GRADIENT, NO_GRADIENT + "; zeros")


def test_states_of_a_parameter_that_is_frozen_now_are_skipped_with_the_reason() -> None:
    (outcome,) = outcomes_of_states(saved(TWO), live(A, wholes=B_FROZEN))
    assert outcome == Outcome("optimizer states", "skipped", ("b.weight",), "frozen now: only the weights are restored")


def test_states_of_a_parameter_that_was_frozen_and_still_is_are_not_spoken_of() -> None:
    assert outcomes_of_states(saved(A, wholes=B_FROZEN), live(A, wholes=B_FROZEN)) == ()


def test_states_of_a_stateless_parameter_that_is_frozen_now_are_not_spoken_of() -> None:
    metadata = unpartitioned(without_states(saved(TWO), "b.weight"))
    assert outcomes_of_states(metadata, live(A, wholes=B_FROZEN)) == ()


def test_states_of_a_parameter_that_the_model_no_longer_has_are_not_spoken_of() -> None:
    assert outcomes_of_states(saved(TWO), live(A)) == ()


def test_a_checkpoint_from_before_the_first_step_says_so_once() -> None:
    metadata = saved(TWO, states=())
    reason = "the checkpoint holds no optimizer state (saved before the first step, or of an optimizer that keeps none)"
    assert outcomes_of_states(metadata, live(TWO, groups=APART)) == (fresh(reason),)


def test_restored_states_are_those_of_parameters_that_have_them_on_both_sides() -> None:
    shapes = {**TWO, "c": (1,)}
    metadata = unpartitioned(without_states(saved(shapes), "b.weight"))
    engine = live({**TWO, "new": (1,)}, wholes={("c", FROZEN): ((1,), "float32")})
    states = match_states(metadata, engine, match_parameters(metadata, engine, strict=False))
    assert states.stateful == {"a.weight"}
    assert states.restored == dict.fromkeys(STATES, ("a.weight",))
    assert states.scalars == ({"step": 4.0},)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stateless_parameter_beside_stateful_ones_is_damage_in_every_partitioned_stage(stage: int) -> None:
    metadata = without_states(saved(TWO), "b.weight")
    metadata = replace(metadata, source=replace(metadata.source, zero_stage=stage))
    with pytest.raises(DamagedError, match="others in its param group") as caught:
        outcomes_of_states(metadata, live(TWO))
    assert caught.value.parameter == "b.weight"
    assert "exp_avg" in str(caught.value.expected)


def test_a_stateless_parameter_without_a_stateful_one_in_its_group_is_no_damage() -> None:
    metadata = without_states(saved(TWO, groups={"b.weight": 1}, hyperparameters=(ADAM, ADAM)), "b.weight")
    assert outcomes_of_states(metadata, live(TWO)) == (fresh(NO_GRADIENT + STEP_4, "b.weight"),)


def test_a_parameter_with_elementwise_states_and_without_a_step_is_damage() -> None:
    metadata = unpartitioned(saved(TWO, scalars={"b.weight": ()}))
    with pytest.raises(DamagedError, match="not all of their scalar states") as caught:
        outcomes_of_states(metadata, live(TWO, groups=APART))
    assert caught.value.parameter == "b.weight"
    assert caught.value.expected == "step beside exp_avg, exp_avg_sq"
    with pytest.raises(MismatchError, match="share one flat tensor"):
        outcomes_of_states(metadata, live(TWO))


def test_a_parameter_with_a_step_and_without_elementwise_states_is_damage() -> None:
    metadata = without_states(saved(TWO), "b.weight")
    parameters = {**metadata.parameters, "b.weight": replace(metadata.parameters["b.weight"], scalars=(("step", 4.0),))}
    with pytest.raises(DamagedError, match="holds no exp_avg") as caught:
        plan_load(unpartitioned(replace(metadata, parameters=parameters)), live(TWO), LoadOptions())
    assert caught.value.parameter == "b.weight"


def test_steps_of_a_parameter_that_is_frozen_now_do_not_count() -> None:
    metadata = saved(TWO, scalars={"b.weight": [("step", 9.0)]})
    engine = live(A, wholes=B_FROZEN)
    assert match_states(metadata, engine, match_parameters(metadata, engine, strict=True)).scalars == ({"step": 4.0},)

"""The planner, against layouts that are written out element by element and moved by hand (see simulation.py)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import FlatPartition, Fragment, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, StateFacts, TensorMetadata
from elastic_ckpt.core.read_plan import LoadPlan, Outcome, ReadItem, in_file_order, names_with
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.simulation import (
    ADAM,
    BYTES,
    KEYS,
    STATES,
    TWO,
    UNTOUCHED,
    Case,
    Shape,
    cases,
    engine_of,
    expected_targets,
    live,
    names_of,
    saved,
    simulate,
    unpartitioned,
    with_extents,
    without_states,
)


def check_outcomes(case: Case, plan: LoadPlan) -> None:
    for key in KEYS if case.restored else (MASTER,):
        assert names_of(plan, key, "restored") == tuple(sorted(case.restored))
    for key in (BUFFER, FROZEN):
        assert names_of(plan, key, "restored") == tuple(sorted(name for name, kind in case.wholes if kind == key))
    assert names_of(plan, MASTER, "fresh") == tuple(sorted(case.missing))
    assert set(names_of(plan, "optimizer states", "fresh")) == case.missing
    assert names_with(plan.outcomes, "ignored") == names_of(plan, MASTER, "ignored") == tuple(sorted(case.extra))
    known = [bool(case.restored & set(members)) for members in case.target.groups]
    assert names_of(plan, "param groups", "restored") == tuple(str(n) for n, old in enumerate(known) if old)
    assert names_of(plan, "param groups", "fresh") == tuple(str(n) for n, old in enumerate(known) if not old)


def runs_of_none(values: Sequence[int]) -> list[FlatRange]:
    found: list[FlatRange] = []
    for position, value in enumerate(values):
        if value != UNTOUCHED:
            continue
        if found and found[-1].stop == position:
            found[-1] = FlatRange(found[-1].start, position + 1)
        else:
            found.append(FlatRange(position, position + 1))
    return found


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_every_rank_gets_exactly_its_own_elements(case: Case) -> None:
    strict = not (case.missing or case.extra)
    for rank in range(case.target.dp):
        plan = plan_load(case.metadata, engine_of(case, rank), LoadOptions(strict=strict))
        expected = expected_targets(case, rank)
        assert simulate(plan, case.disk.files) == expected
        for target in plan.reads.targets:
            wanted = expected[target.key, target.flat, target.name]
            assert target.numel == len(wanted)
            assert list(target.gaps) == runs_of_none(wanted)
        assert list(plan.reads.items) == sorted(plan.reads.items, key=lambda copy: (copy.file, copy.byte_offset))
        assert plan.reads.files == case.metadata.files
        assert plan.reads.shares == ()
        assert plan.restores_states
        check_outcomes(case, plan)
        for members, scalars in zip(case.target.flats, plan.scalars, strict=True):
            assert scalars == ({"step": 4.0} if case.restored & set(members) else None)
        for members, values in zip(case.target.groups, plan.hyperparameters, strict=True):
            assert values == (ADAM if case.restored & set(members) else {})


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(), st.data())
def test_a_lost_piece_is_an_error_on_every_rank_that_holds_some_of_the_parameter(
    case: Case, data: st.DataObject
) -> None:
    candidates = [
        (name, key) for name in sorted(case.restored) for key in KEYS if case.metadata.tensors[name, key].chunks
    ]
    assume(candidates)
    name, key = data.draw(st.sampled_from(candidates))
    tensor = case.metadata.tensors[name, key]
    lost = data.draw(st.integers(0, len(tensor.chunks) - 1))
    holey = dataclasses.replace(tensor, sources=chunks_of(*tensor.chunks[:lost], *tensor.chunks[lost + 1 :]))
    metadata = dataclasses.replace(case.metadata, tensors={**case.metadata.tensors, (name, key): holey})
    for rank in range(case.target.dp):
        engine = engine_of(case, rank)
        if all(part.name != name for part in engine.fragments):
            plan_load(metadata, engine, LoadOptions(strict=False))
            continue
        with pytest.raises(DamagedError) as caught:
            plan_load(metadata, engine, LoadOptions(strict=False))
        assert caught.value.parameter == name


# --- directed ---------------------------------------------------------------------------------------------------


def target_names(plan: LoadPlan) -> list[tuple[str, int, str]]:
    return [(target.key, target.flat, target.name) for target in plan.reads.targets]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("pieces", "lost"),
    [
        ([(0, 4), (7, 10)], "elements 4 to 7"),
        ([(3, 10)], "elements 0 to 3"),
        ([(0, 9)], "elements 9 to 10"),
        ([], "elements 0 to 10"),
    ],
)
def test_a_hole_is_damage_and_the_parameter_is_named(pieces: list[tuple[int, int]], lost: str, key: str) -> None:
    with pytest.raises(DamagedError, match="incomplete") as caught:
        plan_load(with_extents(saved(TWO), "a.weight", key, *pieces), live(TWO), LoadOptions())
    assert caught.value.parameter == "a.weight"
    assert key in caught.value.problem
    assert str(caught.value.found) == f"{lost} in no file"


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([(0, 6), (4, 10)], id="partly"),
        pytest.param([(0, 10), (3, 5)], id="one inside the other"),
        pytest.param([(0, 10), (0, 10)], id="the same twice"),
        pytest.param([(0, 10), (0, 4)], id="the same start"),
        pytest.param([(0, 5), (5, 10), (5, 10)], id="the same twice at the end"),
    ],
)
def test_elements_that_are_held_twice_are_damage_and_the_parameter_is_named(pieces: list[tuple[int, int]]) -> None:
    with pytest.raises(DamagedError) as caught:
        plan_load(with_extents(saved(TWO), "a.weight", MASTER, *pieces), live(TWO), LoadOptions())
    assert caught.value.parameter == "a.weight"
    assert "stored twice" in caught.value.problem, caught.value


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        pytest.param([(0, 10), (5, 10)], "stored twice", id="the cut falls on the second start"),
        pytest.param([(0, 5)], "incomplete", id="the cut falls on the end"),
    ],
)
def test_damage_is_noticed_on_both_sides_of_a_cut(pieces: list[tuple[int, int]], problem: str, rank: int) -> None:
    metadata = with_extents(saved({"a": (10,)}, states=()), "a", MASTER, *pieces)
    half = FlatRange(5 * rank, 5 * rank + 5)
    engine = dataclasses.replace(
        live({"a": (10,)}),
        model=ModelLayout(RankCoordinates(2, rank)),
        flats=(FlatPartition(0, 0, 5, "float32", ("a",)),),
        fragments=(Fragment("a", (10,), half, 0, 0),),
    )
    with pytest.raises(DamagedError, match=problem):
        plan_load(metadata, engine, LoadOptions())


def test_a_state_that_only_some_parameters_have_is_damage_and_the_parameter_is_named() -> None:
    metadata = saved(TWO)
    tensors = {where: tensor for where, tensor in metadata.tensors.items() if where != ("b.weight", "exp_avg_sq")}
    with pytest.raises(DamagedError, match="exp_avg_sq") as caught:
        plan_load(dataclasses.replace(metadata, tensors=tensors), live(TWO), LoadOptions())
    assert caught.value.parameter == "b.weight"


def test_a_parameter_that_the_checkpoint_lacks_is_an_error_when_strict() -> None:
    with pytest.raises(MismatchError) as caught:
        plan_load(saved({"a.weight": (2, 5)}), live(TWO), LoadOptions(strict=True))
    assert caught.value.parameter == "b.weight"
    assert "b.weight" in str(caught.value.expected)
    assert {"load_module_strict": False} in [each.arguments for each in caught.value.remedies]


def test_a_parameter_that_the_checkpoint_lacks_stays_fresh_when_not_strict() -> None:
    plan = plan_load(saved({"a.weight": (2, 5)}), live(TWO), LoadOptions(strict=False))
    assert names_with(plan.outcomes, "fresh") == names_of(plan, MASTER, "fresh") == ("b.weight",)
    assert [target.gaps for target in plan.reads.targets] == [(FlatRange(10, 13),)] * 3
    assert sum(copy.numel for copy in plan.reads.items) == 30


def test_a_parameter_that_the_model_lacks_is_an_error_when_strict() -> None:
    with pytest.raises(MismatchError) as caught:
        plan_load(saved(TWO), live({"a.weight": (2, 5)}), LoadOptions(strict=True))
    assert caught.value.parameter == "b.weight"
    assert "b.weight" in str(caught.value.found)


def test_a_parameter_that_the_model_lacks_is_ignored_when_not_strict() -> None:
    plan = plan_load(saved(TWO), live({"a.weight": (2, 5)}), LoadOptions(strict=False))
    assert names_with(plan.outcomes, "ignored") == ("b.weight",)
    assert names_with(plan.outcomes, "fresh") == ()
    assert sum(copy.numel for copy in plan.reads.items) == 30


def test_many_missing_names_are_cut_short_and_counted() -> None:
    many = {f"layer{number:02}": (1,) for number in range(20)}
    with pytest.raises(MismatchError, match="layer07 and 12 more"):
        plan_load(saved({"a": (1,)}), live({"a": (1,), **many}), LoadOptions())


@pytest.mark.parametrize("key", [BUFFER, FROZEN])
def test_missing_and_extra_buffers_and_frozen_weights_are_treated_like_parameters(key: str) -> None:
    metadata = saved(TWO, wholes={("old", key): ((2,), "float32")})
    engine = live(TWO, wholes={("new", key): ((2,), "float32")})
    with pytest.raises(MismatchError) as caught:
        plan_load(metadata, engine, LoadOptions(strict=True))
    assert "new" in str(caught.value.expected)
    assert "old" in str(caught.value.found)
    plan = plan_load(metadata, engine, LoadOptions(strict=False))
    assert names_of(plan, key, "fresh") == names_with(plan.outcomes, "fresh") == ("new",)
    assert names_of(plan, key, "ignored") == names_with(plan.outcomes, "ignored") == ("old",)
    assert all(target.name != "new" for target in plan.reads.targets)


@pytest.mark.parametrize("strict", [True, False])
def test_a_parameter_that_was_trained_and_is_frozen_now_gets_its_masters_and_no_states(strict: bool) -> None:
    metadata = saved(TWO)
    engine = live({"a.weight": (2, 5)}, wholes={("b.weight", FROZEN): ((3,), "bfloat16")})
    plan = plan_load(metadata, engine, LoadOptions(strict=strict))
    target = target_names(plan).index((FROZEN, -1, "b.weight"))
    assert plan.reads.targets[target].dtype == "bfloat16"
    start = metadata.tensors["b.weight", MASTER].chunks[0].byte_offset
    assert [copy for copy in plan.reads.items if copy.target == target] == [ReadItem(0, start, target, 0, 3, "float32")]
    assert sum(copy.numel for copy in plan.reads.items) == 30 + 3
    assert [note for note in plan.notes if "b.weight" in note and "float32 to bfloat16" in note]
    assert names_of(plan, FROZEN, "restored") == ("b.weight",)
    assert names_of(plan, "optimizer states", "skipped") == ("b.weight",)
    assert names_of(plan, "exp_avg", "restored") == ("a.weight",)


@pytest.mark.parametrize("strict", [True, False])
def test_a_parameter_that_was_frozen_and_is_trained_now_gets_its_weights_and_fresh_states(strict: bool) -> None:
    metadata = saved({"a.weight": (2, 5)}, wholes={("b.weight", FROZEN): ((3,), "bfloat16")})
    plan = plan_load(metadata, live(TWO), LoadOptions(strict=strict))
    chunk = metadata.tensors["b.weight", FROZEN].chunks[0]
    assert ReadItem(0, chunk.byte_offset, 0, 10, 3, "bfloat16") in plan.reads.items
    assert [target.gaps for target in plan.reads.targets] == [(), (FlatRange(10, 13),), (FlatRange(10, 13),)]
    assert sum(copy.numel for copy in plan.reads.items) == 13 + 10 + 10
    assert plan.scalars == ({"step": 4.0},)
    assert names_of(plan, MASTER, "restored") == ("a.weight", "b.weight")
    assert names_of(plan, "exp_avg", "restored") == ("a.weight",)
    assert names_of(plan, "optimizer states", "fresh") == names_with(plan.outcomes, "fresh") == ("b.weight",)


def test_a_flat_tensor_of_parameters_that_were_all_frozen_gets_no_states() -> None:
    metadata = saved({"a.weight": (2, 5)}, wholes={("b.weight", FROZEN): ((3,), "float32")})
    plan = plan_load(metadata, live(TWO, groups=[["a.weight"], ["b.weight"]]), LoadOptions())
    assert plan.scalars == ({"step": 4.0}, None)
    assert target_names(plan) == [(MASTER, 0, ""), ("exp_avg", 0, ""), ("exp_avg_sq", 0, ""), (MASTER, 1, "")]
    assert plan.group_sources == ((0,), ())
    assert plan.hyperparameters == (ADAM, {})


@pytest.mark.parametrize(("was", "now"), [("float32", "bfloat16"), ("float64", "float32")])
def test_frozen_weights_that_would_lose_precision_as_masters_are_refused(was: str, now: str) -> None:
    metadata = saved({"a.weight": (2, 5)}, dtype="bfloat16", wholes={("b.weight", FROZEN): ((3,), was)})
    with pytest.raises(MismatchError, match="lose precision") as caught:
        plan_load(metadata, live(TWO, dtype=now), LoadOptions(ElasticConfig(on_change="error")))
    assert caught.value.parameter == "b.weight"


@pytest.mark.parametrize("now_frozen", [True, False])
def test_a_shape_that_differs_is_an_error_when_the_role_changed_too(now_frozen: bool) -> None:
    one, whole = {"a.weight": (2, 5)}, {("b.weight", FROZEN): ((4,), "float32")}
    metadata, engine = (saved(TWO), live(one, wholes=whole)) if now_frozen else (saved(one, wholes=whole), live(TWO))
    with pytest.raises(MismatchError, match="shape") as caught:
        plan_load(metadata, engine, LoadOptions(strict=False))
    assert caught.value.parameter == "b.weight"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("shape", [(5, 2), (10,), (2, 6), (2, 5, 1)])
def test_another_shape_is_an_error_even_when_not_strict(shape: Shape, strict: bool) -> None:
    with pytest.raises(MismatchError, match="shape") as caught:
        plan_load(saved({**TWO, "a.weight": shape}), live(TWO), LoadOptions(strict=strict))
    assert caught.value.parameter == "a.weight"
    assert str(caught.value.found).startswith(str(shape))
    assert str(caught.value.expected).startswith("(2, 5)")


@pytest.mark.parametrize("key", [BUFFER, FROZEN])
def test_another_shape_of_a_buffer_is_an_error_even_when_not_strict(key: str) -> None:
    metadata = saved(TWO, wholes={("mask", key): ((2, 2), "float32")})
    engine = live(TWO, wholes={("mask", key): ((4,), "float32")})
    with pytest.raises(MismatchError, match="shape") as caught:
        plan_load(metadata, engine, LoadOptions(strict=False))
    assert caught.value.parameter == "mask"


@pytest.mark.parametrize(
    ("source", "target"),
    [("float64", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("float16", "bfloat16")],
)
def test_a_master_that_would_lose_precision_is_refused(source: str, target: str) -> None:
    with pytest.raises(MismatchError, match="lose precision") as caught:
        plan_load(saved(TWO, dtype=source), live(TWO, dtype=target), LoadOptions(ElasticConfig(on_change="error")))
    assert caught.value.parameter == "a.weight"
    assert caught.value.file == "/ckpt/tag/states.pt"
    assert source in str(caught.value.found)
    assert target in str(caught.value.expected)


@pytest.mark.parametrize("source", ["float32", "float16"])
def test_masters_and_states_are_rounded_to_bfloat16_with_a_note(source: str) -> None:
    plan = plan_load(saved(TWO, dtype=source), live(TWO, dtype="bfloat16"), LoadOptions())
    assert {copy.dtype for copy in plan.reads.items if plan.reads.targets[copy.target].key == MASTER} == {source}
    assert f"masters rounded from {source} to bfloat16, in which the live engine keeps them" in plan.notes


@pytest.mark.parametrize(
    ("source", "target"),
    [("float64", "float32"), ("float32", "float16"), ("bfloat16", "float16"), ("float64", "bfloat16")],
)
def test_a_master_that_might_leave_the_range_is_refused_whatever_the_options(source: str, target: str) -> None:
    with pytest.raises(MismatchError, match="lose precision") as caught:
        plan_load(saved(TWO, dtype=source), live(TWO, dtype=target), LoadOptions())
    assert not any(each.is_data for each in caught.value.remedies)


@pytest.mark.parametrize(
    ("source", "wider"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"), ("bfloat16", "float64")],
)
def test_a_master_that_becomes_wider_is_planned_with_the_dtype_of_the_file(source: str, wider: str) -> None:
    plan = plan_load(saved(TWO, dtype=source), live(TWO, dtype=wider), LoadOptions())
    assert {target.dtype for target in plan.reads.targets} == {wider}
    assert {copy.dtype for copy in plan.reads.items} == {source}
    assert sum(copy.numel for copy in plan.reads.items) == 39


def test_a_floating_buffer_changes_its_dtype_with_a_note() -> None:
    metadata = saved(TWO, wholes={("trace", BUFFER): ((3,), "float32")})
    plan = plan_load(metadata, live(TWO, wholes={("trace", BUFFER): ((3,), "bfloat16")}), LoadOptions())
    assert [note for note in plan.notes if "trace" in note and "float32" in note and "bfloat16" in note]


@pytest.mark.parametrize(
    ("source", "target"), [("int64", "float32"), ("float32", "int64"), ("int64", "int32"), ("bool", "uint8")]
)
def test_a_buffer_of_whole_numbers_keeps_its_dtype_or_is_refused(source: str, target: str) -> None:
    metadata = saved(TWO, wholes={("ticks", BUFFER): ((1,), source)})
    with pytest.raises(MismatchError, match="dtype") as caught:
        plan_load(metadata, live(TWO, wholes={("ticks", BUFFER): ((1,), target)}), LoadOptions())
    assert caught.value.parameter == "ticks"


@pytest.mark.parametrize(
    "dtype",
    [
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_a_buffer_of_every_dtype_of_torch_is_planned_with_the_right_item_size(dtype: str) -> None:
    wholes = {("buffer", BUFFER): ((6,), dtype)}
    metadata = saved({"a": (1,)}, wholes=wholes)
    itemsize = getattr(torch, dtype).itemsize
    chunks = (StorageChunk(FlatRange(0, 2), 0, 100), StorageChunk(FlatRange(2, 6), 0, 100 + 2 * itemsize))
    tensor = TensorMetadata("buffer", BUFFER, (6,), dtype, chunks_of(*chunks))
    metadata = dataclasses.replace(metadata, tensors={**metadata.tensors, ("buffer", BUFFER): tensor})
    plan = plan_load(metadata, live({"a": (1,)}, wholes=wholes), LoadOptions())
    target = target_names(plan).index((BUFFER, -1, "buffer"))
    assert [copy for copy in plan.reads.items if copy.target == target] == [ReadItem(0, 100, target, 0, 6, dtype)]


def test_a_buffer_without_elements_has_a_target_and_no_copy() -> None:
    wholes = {("empty", BUFFER): ((0, 3), "float32")}
    plan = plan_load(saved({"a": (1,)}, wholes=wholes), live({"a": (1,)}, wholes=wholes), LoadOptions())
    target = target_names(plan).index((BUFFER, -1, "empty"))
    assert plan.reads.targets[target].numel == 0
    assert all(copy.target != target for copy in plan.reads.items)


def test_different_step_counts_inside_one_flat_tensor_are_an_error() -> None:
    scalars = {"a.weight": [("step", 5.0)], "b.weight": [("step", 4.0)]}
    with pytest.raises(MismatchError, match="share one flat tensor") as caught:
        plan_load(saved(TWO, scalars=scalars), live(TWO), LoadOptions())
    assert {"a.weight", "b.weight"} == set(str(caught.value.parameter).split(", "))
    assert caught.value.found == "{'step': 4.0} (b.weight) and {'step': 5.0} (a.weight)"


def test_a_step_count_on_some_members_only_is_an_error_too() -> None:
    with pytest.raises(MismatchError, match="share one flat tensor"):
        plan_load(saved(TWO, scalars={"b.weight": []}), live(TWO), LoadOptions())


def test_different_step_counts_in_different_flat_tensors_are_kept() -> None:
    scalars = {"a.weight": [("step", 4.0)], "b.weight": [("step", 5.0)]}
    engine = live(TWO, groups=[["b.weight"], ["a.weight"]])
    assert plan_load(saved(TWO, scalars=scalars), engine, LoadOptions()).scalars == ({"step": 5.0}, {"step": 4.0})


def test_different_step_counts_do_not_matter_without_optimizer_states() -> None:
    scalars = {"a.weight": [("step", 4.0)], "b.weight": [("step", 5.0)]}
    plan_load(saved(TWO, scalars=scalars), live(TWO), LoadOptions(optimizer_states=False))


def test_a_stateless_parameter_beside_stateful_ones_is_damage_in_a_partitioned_checkpoint() -> None:
    with pytest.raises(DamagedError, match="no optimizer state") as caught:
        plan_load(without_states(saved(TWO), "b.weight"), live(TWO), LoadOptions())
    assert caught.value.parameter == "b.weight"
    plan_load(without_states(saved(TWO), "b.weight"), live(TWO), LoadOptions(optimizer_states=False))


def test_a_stateless_parameter_in_a_saved_group_of_its_own_is_no_damage() -> None:
    metadata = without_states(saved(TWO, groups={"b.weight": 1}, hyperparameters=(ADAM, ADAM)), "b.weight")
    plan = plan_load(metadata, live(TWO, groups=[["a.weight"], ["b.weight"]]), LoadOptions())
    assert plan.scalars == ({"step": 4.0}, None)


def test_without_partitions_a_stateless_parameter_may_share_a_flat_tensor_with_stateful_ones() -> None:
    plan = plan_load(unpartitioned(without_states(saved(TWO), "b.weight")), live(TWO), LoadOptions())
    assert [target.gaps for target in plan.reads.targets] == [(), (FlatRange(10, 13),), (FlatRange(10, 13),)]
    assert plan.scalars == ({"step": 4.0},)
    told = next(outcome for outcome in plan.outcomes if outcome.role == "optimizer states")
    assert (told.what, told.names) == ("fresh", ("b.weight",))
    assert "no gradient before the save" in told.reason
    assert "step 4" in told.reason


def test_a_flat_tensor_whose_parameters_have_no_state_yet_gets_none() -> None:
    metadata = unpartitioned(without_states(saved(TWO), "b.weight"))
    plan = plan_load(metadata, live(TWO, groups=[["a.weight"], ["b.weight"]]), LoadOptions())
    assert plan.scalars == ({"step": 4.0}, None)
    assert target_names(plan) == [(MASTER, 0, ""), ("exp_avg", 0, ""), ("exp_avg_sq", 0, ""), (MASTER, 1, "")]


def test_a_group_that_mixes_different_hyperparameters_is_an_error() -> None:
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=[ADAM, {**ADAM, "lr": 5e-4}])
    with pytest.raises(MismatchError, match="different hyperparameters") as caught:
        plan_load(metadata, live(TWO), LoadOptions())
    found = str(caught.value.found)
    assert "0.001" in found
    assert "0.0005" in found
    assert "betas" not in found, "what does not differ is not listed"


@pytest.mark.parametrize("bearer", [0, 1])
def test_a_hyperparameter_that_only_one_saved_group_has_is_listed_as_the_difference(bearer: int) -> None:
    hyperparameters = [{**ADAM, **({"decoupled": True} if number == bearer else {})} for number in range(2)]
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=hyperparameters)
    with pytest.raises(MismatchError) as caught:
        plan_load(metadata, live(TWO), LoadOptions())
    assert "decoupled" in str(caught.value.found), caught.value


def test_groups_with_the_same_hyperparameters_may_be_merged() -> None:
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=[ADAM, dict(ADAM)])
    assert plan_load(metadata, live(TWO), LoadOptions()).hyperparameters == (ADAM,)


def test_groups_that_differ_in_choices_of_implementation_only_may_be_merged() -> None:
    hyperparameters = [
        {**ADAM, "fused": True, "foreach": False, "_ds_x": 1},
        {**ADAM, "capturable": True, "differentiable": False},
    ]
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=hyperparameters)
    assert plan_load(metadata, live(TWO), LoadOptions()).hyperparameters == (ADAM,)


def test_groups_that_torch_built_from_named_parameters_may_be_merged() -> None:
    # torch.optim keeps the names beside "params" when it is given (name, parameter) pairs
    hyperparameters = [{**ADAM, "param_names": ["a.weight"]}, {**ADAM, "param_names": ["b.weight"]}]
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=hyperparameters)
    assert plan_load(metadata, live(TWO), LoadOptions()).hyperparameters == (ADAM,)


def test_every_group_gets_the_hyperparameters_of_the_saved_group_that_its_members_were_in() -> None:
    slow, fast = {**ADAM, "lr": 1e-5}, {**ADAM, "lr": 1e-2}
    three = {**TWO, "c": (2,)}
    metadata = saved(three, groups={"a.weight": 0, "b.weight": 1, "c": 0}, hyperparameters=[slow, fast])
    engine = live(three, groups=[["b.weight"], ["c"], ["a.weight"]])
    assert plan_load(metadata, engine, LoadOptions()).hyperparameters == (fast, slow, slow)


def test_a_group_of_fresh_parameters_keeps_its_own_hyperparameters() -> None:
    engine = live(TWO, groups=[["b.weight"], ["a.weight"]])
    plan = plan_load(saved({"a.weight": (2, 5)}), engine, LoadOptions(strict=False))
    assert plan.hyperparameters == ({}, ADAM)


def test_a_state_of_unknown_layout_is_refused_by_name() -> None:
    metadata = dataclasses.replace(
        saved(TWO), states=StateFacts({"state1": "uint8 of shape (4, 4) for a partition of 13"})
    )
    with pytest.raises(UnsupportedError, match="'state1'") as caught:
        plan_load(metadata, live(TWO), LoadOptions())
    assert "uint8" in str(caught.value.found)
    plan_load(metadata, live(TWO), LoadOptions(optimizer_states=False))


@pytest.mark.parametrize(
    ("was", "now"),
    [(("exp_avg",), STATES), (STATES, ("exp_avg",)), (("momentum_buffer",), STATES), (STATES, (*STATES, "max"))],
)
def test_states_of_another_optimizer_are_an_error(was: Sequence[str], now: Sequence[str]) -> None:
    with pytest.raises(MismatchError, match="keeps other states") as caught:
        plan_load(saved(TWO, states=was), live(TWO, states=now), LoadOptions())
    assert all(key in str(caught.value.found) for key in was)
    assert all(key in str(caught.value.expected) for key in now)
    plan_load(saved(TWO, states=was), live(TWO, states=now), LoadOptions(optimizer_states=False))


def test_other_scalar_states_are_an_error_too() -> None:
    with pytest.raises(MismatchError, match="keeps other states"):
        plan_load(saved(TWO), live(TWO, scalar_keys=()), LoadOptions())


def test_a_checkpoint_without_any_state_leaves_states_fresh_and_says_so() -> None:
    plan = plan_load(saved(TWO, states=()), live(TWO), LoadOptions())
    assert plan.scalars == (None,)
    assert target_names(plan) == [(MASTER, 0, "")]
    assert plan.restores_states
    assert plan.hyperparameters == (ADAM,)
    told = [outcome for outcome in plan.outcomes if outcome.role == "optimizer states"]
    assert [(outcome.what, outcome.names) for outcome in told] == [("fresh", ())]
    assert "no optimizer state" in told[0].reason


def test_an_optimizer_without_scalar_states_keeps_its_elementwise_ones() -> None:
    states = ("momentum_buffer",)
    metadata = saved(TWO, states=states, scalars=dict.fromkeys(TWO, ()))
    plan = plan_load(metadata, live(TWO, states=states, scalar_keys=()), LoadOptions())
    assert target_names(plan) == [(MASTER, 0, ""), ("momentum_buffer", 0, "")]
    assert plan.scalars == ({},)
    assert not [outcome for outcome in plan.outcomes if outcome.role == "optimizer states"]


def test_without_optimizer_states_only_masters_are_planned() -> None:
    plan = plan_load(saved(TWO), live(TWO), LoadOptions(optimizer_states=False))
    assert target_names(plan) == [(MASTER, 0, "")]
    assert not plan.restores_states
    assert plan.hyperparameters == ()
    assert plan.scalars == (None,)
    assert sum(copy.numel for copy in plan.reads.items) == 13
    assert plan.outcomes == (Outcome(MASTER, "restored", ("a.weight", "b.weight")),)


def test_notes_of_the_checkpoint_are_handed_on() -> None:
    assert "read in the dark" in plan_load(saved(TWO, notes=("read in the dark",)), live(TWO), LoadOptions()).notes


def test_an_engine_whose_fragments_overlap_is_a_programming_error() -> None:
    engine = live(TWO)
    shifted = dataclasses.replace(engine.fragments[1], flat_offset=9)
    with pytest.raises(AssertionError, match="overlap"):
        plan_load(saved(TWO), dataclasses.replace(engine, fragments=(engine.fragments[0], shifted)), LoadOptions())


# --- merging ----------------------------------------------------------------------------------------------------

Move = tuple[int, int, int, int, str]


@st.composite
def copies(draw: st.DrawFn) -> list[ReadItem]:
    """Copies that overlap neither in the files nor in the targets, many of them neighbours, in any order."""
    file_ends, target_ends = [3, 0], [0, 2]
    found = []
    for _ in range(draw(st.integers(0, 14))):
        file, target = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        numel, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(["float32", "float32", "bfloat16"]))
        byte_offset = file_ends[file] + draw(st.sampled_from([0, 0, 0, 1, 4]))
        target_offset = target_ends[target] + draw(st.sampled_from([0, 0, 0, 1]))
        found.append(ReadItem(file, byte_offset, target, target_offset, numel, dtype))
        file_ends[file], target_ends[target] = byte_offset + numel * BYTES[dtype], target_offset + numel
    return draw(st.permutations(found))


def moves(some: Iterable[ReadItem]) -> Counter[Move]:
    """Every element that is moved: from which byte of which file to which place."""
    return Counter(
        (copy.file, copy.byte_offset + step * BYTES[copy.dtype], copy.target, copy.target_offset + step, copy.dtype)
        for copy in some
        for step in range(copy.numel)
    )


def touching_pairs(some: Sequence[ReadItem]) -> int:
    return sum(
        (left.file, left.target, left.dtype) == (right.file, right.target, right.dtype)
        and left.byte_offset + left.numel * BYTES[left.dtype] == right.byte_offset
        and left.target_offset + left.numel == right.target_offset
        for left in some
        for right in some
    )


@settings(deadline=None)
@given(copies())
def test_merging_joins_exactly_the_neighbours_and_moves_the_same_bytes(some: list[ReadItem]) -> None:
    merged = list(in_file_order(some))
    assert moves(merged) == moves(some)
    assert len(merged) == len(some) - touching_pairs(some)
    assert touching_pairs(merged) == 0
    assert merged == sorted(merged, key=lambda copy: (copy.file, copy.byte_offset))


def test_neighbours_in_the_file_alone_or_in_the_target_alone_stay_apart() -> None:
    first = ReadItem(0, 0, 0, 0, 2, "float32")
    for other in (
        ReadItem(0, 8, 0, 3, 2, "float32"),
        ReadItem(0, 9, 0, 2, 2, "float32"),
        ReadItem(0, 8, 1, 2, 2, "float32"),
        ReadItem(1, 8, 0, 2, 2, "float32"),
        ReadItem(0, 8, 0, 2, 2, "bfloat16"),
    ):
        assert list(in_file_order([first, other])) == [first, other]
    assert list(in_file_order([ReadItem(0, 8, 0, 2, 5, "float32"), first])) == [ReadItem(0, 0, 0, 0, 7, "float32")]


def test_one_note_tells_of_all_frozen_weights_whose_dtype_changes() -> None:
    metadata = saved({"b": (4,), "a": (3,)}, wholes={("ticks", BUFFER): ((1,), "float32")})
    wholes = {
        ("a", FROZEN): ((3,), "bfloat16"),
        ("b", FROZEN): ((4,), "bfloat16"),
        ("ticks", BUFFER): ((1,), "float32"),
    }
    plan = plan_load(metadata, live({}, wholes=wholes), LoadOptions(optimizer_states=False))
    assert plan.notes == ("frozen parameters converted from float32 to bfloat16: a, b",)

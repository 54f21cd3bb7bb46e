"""Rows that were added since the save, planned and read from real files: the saved ones arrive, the others stay."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import LiveShards, LocalState, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.core.state_kinds import PER_PARAMETER, TOUCHED, LiveState
from elastic_ckpt.core.strided import Shape, ShardSources, StridedCopy
from elastic_ckpt.errors import WITHOUT_STATES, ConfigError, MismatchError, UnsupportedError
from elastic_ckpt.planning.added_rows import grown_parameters
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.sharding.resolve import resolve
from elastic_ckpt.sharding.rules import ShardingRules
from tests.planning.building import (
    FOUR,
    catalog_of,
    coded,
    decoded,
    elements,
    engine_of,
    loaded,
    numbers,
    target_of,
    tensor_in,
)
from tests.planning.partitions import ROUNDING, Disk
from tests.resolving import checkpoint
from tests.simulation import live, saved

SAVED: dict[str, Shape] = {"a": (3,), "emb": (5, 3), "z": (2,)}
GROWN: dict[str, Shape] = {"a": (3,), "emb": (7, 3), "z": (2,)}
ASKED = LoadOptions(ElasticConfig(added_rows=["emb"]))


def of_shapes(engine: LocalState, shapes: Mapping[str, Shape]) -> LocalState:
    """An engine that knows the shapes of its parameters, as live ones do."""
    layouts = {name: LiveShards((shape,)) for name, shape in shapes.items()}
    return replace(engine, model=replace(engine.model, layouts=layouts))


def universal(metadata: CheckpointMetadata) -> CheckpointMetadata:
    return replace(metadata, source=replace(metadata.source, format="universal", by_rank=False))


@pytest.mark.parametrize(("planes", "dp", "is_universal"), list(product((1, 2), (1, 2, 3, 7), (False, True))))
def test_the_saved_rows_are_the_beginning_of_the_parameter_in_any_partition(
    tmp_path: Path, planes: int, dp: int, is_universal: bool
) -> None:
    disk = Disk()
    parts = {name: disk.raw(numbers(planes * math.prod(shape))) for name, shape in SAVED.items()}
    shapes = {name: (planes, *shape) if planes > 1 else shape for name, shape in SAVED.items()}
    states = {(name, "m"): tensor_in(part, name, "m", shapes[name]) for name, part in parts.items()}
    metadata = catalog_of(disk, SAVED, states)
    metadata = universal(metadata) if is_universal else metadata
    a, emb, z = (parts[name].values.reshape(planes, -1) for name in SAVED)
    new = np.full((planes, 6), 0.5, np.float32)
    wanted, step = np.concatenate([a, emb, new, z], axis=1), -(-26 // dp)
    for rank in range(dp):
        state = LiveState("m", "float32", planes=planes, initial=0.5)
        engine = engine_of(GROWN, [state], numel=step, dp=dp, rank=rank)
        plan = plan_load(metadata, of_shapes(engine, GROWN), ASKED)
        first, last = rank * step, min((rank + 1) * step, 26)
        found = loaded(plan, disk, tmp_path)["m"].reshape(planes, step)[:, : last - first]
        assert found.tolist() == wanted[:, first:last].tolist()
        kept = [*range(max(18, first), min(24, last)), *range(26, (rank + 1) * step)]  # added rows, and padding
        assert elements(target_of(plan, MASTER).gaps) == [place - first for place in kept]
        assert any("emb (5 -> 7)" in note for note in plan.notes)


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_blocks_at_the_border_are_encoded_anew_within_the_bound(tmp_path: Path, dp: int) -> None:
    disk = Disk()
    parts = {name: coded(disk, math.prod(shape)) for name, shape in SAVED.items()}
    states = {(name, "m"): tensor_in(part, name, "m", SAVED[name]) for name, part in parts.items()}
    metadata = catalog_of(disk, SAVED, states)
    whole = np.concatenate([parts["a"].values, parts["emb"].values, np.zeros(6), parts["z"].values])
    step = -(-26 // dp)
    for rank in range(dp):
        engine = engine_of(GROWN, [LiveState("m", "uint8", blocks=FOUR)], numel=step, dp=dp, rank=rank)
        plan = plan_load(metadata, of_shapes(engine, GROWN), ASKED)
        found = loaded(plan, disk, tmp_path)
        truth = whole[rank * step : (rank + 1) * step]
        values = decoded(found["m"], found["absmax1"], FOUR)[: len(truth)]
        bound = (FOUR.codebook.bound + ROUNDING) * np.repeat(found["absmax1"], 4)[: len(truth)]
        assert (np.abs(values - truth) <= bound).all()
        added = range(max(18 - rank * step, 0), max(min(24 - rank * step, len(truth)), 0))
        assert not values[added.start : added.stop].any()
    strict = LoadOptions(ElasticConfig(added_rows=["emb"], on_change="error"))
    with pytest.raises(MismatchError, match="requantized"):
        plan_load(metadata, of_shapes(engine_of(GROWN, [LiveState("m", "uint8", blocks=FOUR)]), GROWN), strict)


SHAPES = {"body.emb.weight": (5, 3), "head.weight": (5, 3), "head.bias": (5,)}
MORE = {"body.emb.weight": (7, 3), "head.weight": (7, 3), "head.bias": (7,)}


def config_of(error: MismatchError | ConfigError) -> str:
    return str(error.remedy).split("]}")[0]


@pytest.mark.parametrize("is_universal", [False, True])
def test_nothing_is_extended_without_being_asked_and_the_refusal_says_how(is_universal: bool) -> None:
    metadata = universal(saved(SHAPES)) if is_universal else saved(SHAPES)
    engine = of_shapes(live(MORE), MORE)
    for asked in ([], ["body.emb.weight"]):
        with pytest.raises(MismatchError, match="more rows") as caught:
            plan_load(metadata, engine, LoadOptions(ElasticConfig(added_rows=asked)))
        rest = sorted(set(SHAPES) - set(asked))
        names = ", ".join(f'"{name}"' for name in [*asked, *rest])
        assert config_of(caught.value) == f'"elastic_checkpoint": {{"added_rows": [{names}'
        assert caught.value.parameter == ", ".join(rest)
    for patterns in (sorted(SHAPES), [".*"], [r"(body\.emb|head)\.(weight|bias)"]):
        plan_load(metadata, engine, LoadOptions(ElasticConfig(added_rows=patterns)))


@pytest.mark.parametrize("kind", [BUFFER, FROZEN])
def test_what_no_optimizer_owns_is_extended_too(kind: str) -> None:
    wholes = {("w", kind): ((5, 2), "float32")}, {("w", kind): ((6, 2), "float32")}
    metadata = saved({"p": (2,)}, wholes=wholes[0])
    engine = of_shapes(live({"p": (2,)}, wholes=wholes[1]), {"p": (2,), "w": (6, 2)})
    with pytest.raises(MismatchError, match="more rows"):
        plan_load(metadata, engine, LoadOptions())
    plan = plan_load(metadata, engine, LoadOptions(ElasticConfig(added_rows=["w"])))
    (target,) = [target for target in plan.reads.targets if target.name == "w"]
    assert [(gap.start, gap.stop) for gap in target.gaps] == [(10, 12)]


@pytest.mark.parametrize("shape", [(4, 3), (7, 4), (5,)])
def test_other_shapes_are_refused_in_any_case(shape: Shape) -> None:
    engine = of_shapes(live({"w": shape}), {"w": shape})
    with pytest.raises(MismatchError, match="does not have more rows"):
        plan_load(saved({"w": (5, 3)}), engine, LoadOptions(ElasticConfig(added_rows=["w"])))
    with pytest.raises(MismatchError, match="shape of fp32 differs") as caught:
        plan_load(saved({"w": (5, 3)}), engine, LoadOptions())
    assert "added_rows" not in str(caught.value)


def test_more_rows_beside_more_columns_are_another_model() -> None:
    shapes = {"up": (7, 3), "down": (3, 7)}
    with pytest.raises(MismatchError, match="shape of fp32 differs") as caught:
        plan_load(saved({"up": (5, 3), "down": (3, 5)}), of_shapes(live(shapes), shapes), LoadOptions())
    assert "added_rows" not in str(caught.value)


def test_a_pattern_of_no_parameter_is_an_error_that_names_those_that_have_grown_or_else_the_nearest() -> None:
    options = LoadOptions(ElasticConfig(added_rows=["head.bios"]))
    with pytest.raises(ConfigError, match="names no parameter") as caught:
        plan_load(saved(SHAPES), of_shapes(live(MORE), MORE), options)
    names = ", ".join(f'"{name}"' for name in sorted(SHAPES))
    assert config_of(caught.value) == f'"elastic_checkpoint": {{"added_rows": [{names}'
    with pytest.raises(ConfigError, match="names no parameter") as caught:
        plan_load(saved(SHAPES), of_shapes(live(SHAPES), SHAPES), options)
    assert config_of(caught.value) == '"elastic_checkpoint": {"added_rows": ["head.bias"'


@pytest.mark.parametrize("asked", ["emb", "head", "he.*"])
@pytest.mark.parametrize("in_file", ["emb", "head"])
def test_a_tied_parameter_is_asked_for_by_any_of_its_names(asked: str, in_file: str) -> None:
    engine = of_shapes(live({"emb": (7, 3)}), {"emb": (7, 3)})
    engine = replace(engine, model=replace(engine.model, ties={"emb": ("head",)}))
    metadata = saved({in_file: (5, 3)}, aliases={"emb" if in_file == "head" else "head": in_file})
    plan = plan_load(metadata, engine, LoadOptions(ElasticConfig(added_rows=[asked])))
    assert [(gap.start, gap.stop) for gap in target_of(plan, MASTER).gaps] == [(15, 21)]


def test_tensor_parallel_ranks_need_a_rule_which_the_refusal_prints() -> None:
    shards = [torch.zeros(3, 4), torch.zeros(3, 4)]
    metadata, shapes = checkpoint({"emb": shards}), ((4, 4), (4, 4))
    model = ModelLayout(RankCoordinates(tp=2), {"emb": LiveShards(shapes)})
    state = replace(live({"emb": (4, 4)}, states=(), scalar_keys=()), model=model)
    with pytest.raises(UnsupportedError) as caught:
        plan_load(metadata, state, ASKED)
    (rule,) = re.findall(r'"tp_rules": \[(.*)\]', str(caught.value.remedy))
    options = LoadOptions.of(ElasticConfig(tp_rules=[ShardSpec(**json.loads(rule))]))
    resharding = resolve(metadata, model, ["emb"], options.rules, "strict")
    assert resharding.transfers["emb", ""] == ShardSources(((0, StridedCopy(0, 0, 12)), (1, StridedCopy(0, 12, 4))))


def test_where_nothing_was_added_the_option_is_without_effect() -> None:
    engine = of_shapes(live(SHAPES), SHAPES)
    plans = [plan_load(saved(SHAPES), engine, LoadOptions(ElasticConfig(added_rows=each))) for each in ([], [".*"])]
    assert plans[0] == plans[1]


def test_a_rule_of_the_kind_vocabulary_counts_at_equal_degrees_too() -> None:
    rule = ShardSpec(pattern="(body.emb|head)\\..*", kind="vocabulary")
    options = LoadOptions.of(ElasticConfig(tp_rules=[rule]))
    plan = plan_load(saved(SHAPES), of_shapes(live(MORE), MORE), options)
    asked = LoadOptions(ElasticConfig(added_rows=[".*"]))
    assert plan.reads == plan_load(saved(SHAPES), of_shapes(live(MORE), MORE), asked).reads
    with pytest.raises(MismatchError, match="fewer rows"):
        plan_load(saved(MORE), of_shapes(live(SHAPES), SHAPES), options)


@pytest.mark.parametrize("layout", [TOUCHED, PER_PARAMETER])
def test_a_momentum_of_whole_parameters_is_extended_and_a_state_of_its_own_shape_is_not(
    tmp_path: Path, layout: str
) -> None:
    disk = Disk()
    part = disk.raw(numbers(15 if layout == TOUCHED else 5))
    shape = (5, 3) if layout == TOUCHED else (5, 1)
    tensor = replace(tensor_in(part, "emb", "m", shape), has_own_shape=layout == PER_PARAMETER)
    metadata = catalog_of(disk, {"emb": (5, 3)}, {("emb", "m"): tensor})
    own = () if layout == TOUCHED else (7, 1)
    engine = engine_of({"emb": (7, 3)}, [LiveState("m", "float32", layout, shape=own)])
    engine = of_shapes(engine, {"emb": (7, 3)})
    if layout == TOUCHED:
        found = loaded(plan_load(metadata, engine, ASKED), disk, tmp_path)["m"].tolist()
        assert found == [*part.values.tolist(), *[0.0] * 6]
        return
    with pytest.raises(MismatchError, match="cannot be extended by rows") as caught:
        plan_load(metadata, engine, ASKED)
    assert caught.value.remedies == (WITHOUT_STATES,)


def test_states_of_an_unknown_optimizer_are_not_extended() -> None:
    engine = of_shapes(live({"emb": (7, 3)}), {"emb": (7, 3)})
    flats = tuple(replace(flat, states=None, scalars=None) for flat in engine.flats)
    with pytest.raises(MismatchError, match="what its states start with"):
        plan_load(saved({"emb": (5, 3)}), replace(engine, flats=flats), ASKED)


@pytest.mark.parametrize("live_shapes", [((4, 3), (4, 3)), ((3, 3), (5, 3))])
def test_shards_take_a_rule_of_the_vocabulary_instead(live_shapes: tuple[Shape, ...]) -> None:
    """Whatever the option says of parameters that no rank has whole; as many rows as before are none of its business."""
    coordinates = RankCoordinates(tp=2)
    for rows, is_refused in ((5, True), (8, False)):
        metadata = saved({"emb": (rows, 3)})
        model = ModelLayout(coordinates, {"emb": LiveShards(live_shapes)})
        options = ["emb"], ShardingRules.of(ElasticConfig())
        if not is_refused:
            assert grown_parameters(metadata, model, ["emb"], *options) == ()
            continue
        with pytest.raises(UnsupportedError, match="tensor-parallel shards") as caught:
            grown_parameters(metadata, model, ["emb"], *options)
        (remedy,) = caught.value.remedies
        followed = ShardingRules.of(ElasticConfig.model_validate(remedy.config))
        assert grown_parameters(metadata, model, ["emb"], ["emb"], followed) == ()

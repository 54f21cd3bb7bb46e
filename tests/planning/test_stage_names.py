"""Which saved pipeline stage had which parameters, where each numbers the optimizer states of its own."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elastic_ckpt.core.fqn import NumberedStates
from elastic_ckpt.core.local_state import LiveGroup, LiveStage, LocalState, ModelLayout
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import MismatchError, UnsupportedError
from elastic_ckpt.planning import stage_names
from elastic_ckpt.planning.live_names import named_in_order
from elastic_ckpt.planning.stage_names import StateNames

#: Key of the tied module, of which a layer may be an occurrence.
TIED = "tied_modules.embed."
KINDS: list[Mapping[str, Shape]] = [
    {"weight": (4, 4)},
    {"weight": (4, 4), "bias": (4,)},
    {"norm.weight": (4,), "up.weight": (8, 4), "down.weight": (4, 8)},
    {"scale": (4,)},
    {},
]
Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Pipeline:
    """Layers, of which those whose kind is ``None`` are the tied module; and what trains of them.

    Attributes:
        cut: where its stages end.
        frozen: layers that do not train.
        by_dim: whether matrices and vectors are groups of their own.
        folded: whether each rank has two stages, as DualPipeV's.
    """

    layers: tuple[Mapping[str, Shape] | None, ...]
    cut: tuple[int, ...]
    frozen: frozenset[int] = frozenset()
    by_dim: bool = False
    folded: bool = False

    @property
    def weights(self) -> dict[str, Shape]:
        """All parameters, tied ones first."""
        tied = {f"{TIED}weight": (4, 4)} if None in self.layers else {}
        return tied | {name: shape for layer in range(len(self.layers)) for name, shape in self.of(layer).items()}

    def of(self, layer: int) -> dict[str, Shape]:
        """The parameters of a layer by name, none of the tied module."""
        return {f"{layer}.{key}": shape for key, shape in (self.layers[layer] or {}).items()}

    @property
    def stages(self) -> list[list[int]]:
        """The layers of each pipeline rank."""
        bounds = zip((0, *self.cut), (*self.cut, len(self.layers)), strict=True)
        stages = [list(range(start, stop)) for start, stop in bounds]
        half = len(stages) // 2
        if not self.folded:
            return stages
        return [first + second for first, second in zip(stages[:half], stages[: half - 1 : -1], strict=True)]

    def groups(self, stage: Sequence[int]) -> Groups:
        """The members of each param group on a rank, as ``PipelineModule.parameters()`` has them."""
        names = [f"{TIED}weight"] if any(self.layers[layer] is None for layer in stage) else []
        names += [name for layer in stage if layer not in self.frozen for name in self.of(layer)]
        if not self.by_dim:
            return (tuple(names),)
        matrices = tuple(name for name in names if len(self.weights[name]) > 1)
        return matrices, tuple(name for name in names if name not in matrices)

    def live(self) -> LocalState:
        """Its first stage on a live rank, which knows of all."""
        stages = []
        for stage in self.stages:
            names = {name for layer in stage for name in self.of(layer)}
            groups = self.groups(stage)
            stages.append(LiveStage(frozenset(names.union(*groups)), groups))
        groups = tuple(LiveGroup(names, {}) for names in stages[0].groups)
        model = ModelLayout(elsewhere=frozenset(self.weights))
        several = tuple(stages) if len(stages) > 1 else ()
        return LocalState(0, "AdamW", (), (), (), groups, model, stages=several)

    def numbered(
        self, flat: bool = False, idle: frozenset[str] = frozenset(), may_be_folded: bool = False
    ) -> list[NumberedStates]:
        """What is saved of each stage; ``idle`` parameters never had a gradient."""
        weights, found = self.weights, []
        for stage in self.stages:
            shapes: list[list[Shape | None]] = [
                [None if name in idle else weights[name] for name in group] for group in self.groups(stage)
            ]
            if flat:
                shapes = [[(sum(math.prod(weights[name]) for name in group),)] for group in self.groups(stage)]
            states = NumberedStates("file", [{}] * len(shapes), shapes, flat, weights, may_be_folded=may_be_folded)
            found.append(states)
        return [replace(each, stages=found, stage=number) for number, each in enumerate(found)]


def named(saved: Pipeline, live: Pipeline | None, **more: bool | frozenset[str]) -> list[Groups] | None:
    """The names of every stage's members, if they are known."""
    name = StateNames(None if live is None else live.live())
    stages = saved.numbered(**more)  # type: ignore[arg-type]
    found: list[Groups] = []
    for each in stages:
        try:
            names = name(replace(each, stages=stages[0].stages))
        except (UnsupportedError, MismatchError) as error:
            assert error.remedy and "load_module_only=True" in str(error)
            return None
        assert names is not None
        found.append(tuple(tuple(str(member) for member in group) for group in names[0]))
    return found


def drawn(rng: random.Random) -> Pipeline:
    """A pipeline, half of all with tied layers, some with layers that do not train."""
    layers: list[Mapping[str, Shape] | None] = [rng.choice(KINDS) for _ in range(rng.randint(3, 9))]
    for _ in range(rng.choice((0, 2))):
        layers[rng.randrange(len(layers))] = None
    frozen = frozenset(layer for layer in range(len(layers)) if rng.random() < rng.choice((0, 0.3)))
    return Pipeline(tuple(layers), (), frozen, rng.random() < 0.5)


def cut(pipeline: Pipeline, rng: random.Random) -> Pipeline:
    """The same with other stages, each of which trains something."""
    ways = [sorted(rng.sample(range(1, len(pipeline.layers)), rng.randint(0, 2))) for _ in range(20)]
    cuts = [replace(pipeline, cut=tuple(way)) for way in ways]
    return next((each for each in cuts if all(any(each.groups(stage)) for stage in each.stages)), pipeline)


def truth(pipeline: Pipeline) -> list[Groups]:
    return [pipeline.groups(stage) for stage in pipeline.stages]


@pytest.mark.parametrize("flat", [False, True])
def test_drawn_pipelines_are_named_as_they_were_saved_or_not_at_all(flat: bool) -> None:
    known = Counter[bool]()
    for seed in range(400):
        rng = random.Random(seed)
        pipeline = drawn(rng)
        if not any(pipeline.groups(range(len(pipeline.layers)))):
            continue
        saved, live = cut(pipeline, rng), cut(pipeline, rng)
        idle = frozenset(name for name in pipeline.weights if rng.random() < 0.1) - {f"{TIED}weight"}
        more = {"flat": flat, "idle": frozenset[str]() if flat else idle}
        assert named(saved, saved, **more) == truth(saved), (seed, saved)
        found = named(saved, live, **more)
        assert found in (None, truth(saved)), (seed, saved, live)
        known[found is not None] += 1
    assert known[True] > 9 * known[False], known


BLOCK = KINDS[1]


def of_blocks(blocks: int, *cut: int, frozen: Sequence[int] = ()) -> Pipeline:
    return Pipeline((BLOCK,) * blocks, cut, frozenset(frozen))


def test_a_tied_module_that_may_be_on_several_stages_leaves_the_names_open() -> None:
    """Its weight has the shape of a layer's: a stage of two has it and one layer, or two layers."""
    plain = KINDS[0]
    saved = Pipeline((None, plain, None, plain, plain, plain), (3, 4))
    live = replace(saved, cut=(5,))
    assert named(saved, saved) == truth(saved)
    assert named(saved, live) is None


def in_own_order(may_be_folded: bool) -> tuple[LocalState, NumberedStates, tuple[str, ...]]:
    """A live pipeline whose optimizer has an order of its own, what it saved of its first stage, and that order."""
    saved = Pipeline((KINDS[1],) * 4, (2,))
    names = ("1.bias", "0.weight", "0.bias", "1.weight")
    live = saved.live()
    own = replace(live, stages=(replace(live.stages[0], groups=(names,)), live.stages[1]))
    numbered = saved.numbered(may_be_folded=may_be_folded)
    shapes = [[saved.weights[name] for name in names], *numbered[1].shapes]
    stages = [replace(each, shapes=[shape]) for each, shape in zip(numbered, shapes, strict=True)]
    return own, replace(stages[0], stages=stages), names


@pytest.mark.parametrize("may_be_folded", [False, True])
def test_an_order_of_the_users_own_is_only_known_on_its_stages(may_be_folded: bool) -> None:
    own, saved, names = in_own_order(may_be_folded)
    found = StateNames(own)(saved)
    assert found is not None and found[0] == [list(names)]


def test_an_order_of_the_users_own_is_not_continued_over_other_stages() -> None:
    """Its shapes would fit that of the model, too."""
    saved = Pipeline((KINDS[0],) * 4, (2,))
    names = ("1.weight", "0.weight", "2.weight", "3.weight")
    of_one = replace(saved.live(), stages=(), groups=(LiveGroup(names, {}),))
    with pytest.raises(UnsupportedError, match="which stage had which parameters"):
        StateNames(of_one)(saved.numbered()[0])


def test_layers_that_are_frozen_now_keep_the_others_states_on_the_same_stages() -> None:
    """Not on others: a stage without some states looks as one with fewer layers."""
    saved = Pipeline((BLOCK, KINDS[2], BLOCK), (2,))
    now = replace(saved, frozen=frozenset({1}))
    name = StateNames(now.live())
    stages = saved.numbered()
    found = name(replace(stages[0], stages=stages))
    assert found is not None and found[0] == [list(group) for group in truth(saved)[0]]
    elsewhere = Pipeline((KINDS[2], KINDS[0], KINDS[2]), (1,), frozenset({2}))
    assert named(replace(elsewhere, cut=(2,), frozen=frozenset()), elsewhere) is None


def test_states_of_what_trains_no_more_are_skipped_on_the_same_stages() -> None:
    saved = Pipeline((KINDS[3], KINDS[0], KINDS[3]), (1, 2), by_dim=True)
    found = named(saved, replace(saved, frozen=frozenset({0})))
    assert found == [((), ("None",)), (("1.weight",), ()), ((), ("2.scale",))]


def test_without_a_live_model_all_that_is_saved_trains() -> None:
    saved = of_blocks(4, 2)
    assert named(saved, None) == truth(saved)
    assert named(replace(saved, frozen=frozenset({1})), None) is None


def test_the_error_counts_what_stages_have() -> None:
    saved = of_blocks(4, 2)
    with pytest.raises(UnsupportedError) as raised:
        StateNames(of_blocks(5, 3).live())(replace(saved.numbered()[0], weights={}, stages=saved.numbered()[:1]))
    assert "stages of [4] parameters, [6, 4] parameters in the live ones" in str(raised.value)


def folded(pipeline: Pipeline, rng: random.Random) -> Pipeline:
    """The same as DualPipeV's on two ranks, or on one; if it cannot be, as it is."""
    counts = [count for count in (1, 3) if count < len(pipeline.layers)]
    cuts = sorted(rng.sample(range(1, len(pipeline.layers)), rng.choice(counts)))
    found = replace(pipeline, cut=tuple(cuts), folded=True)
    return found if all(any(found.groups(stage)) for stage in found.stages) else pipeline


@pytest.mark.parametrize("flat", [False, True])
def test_pipelines_of_either_class_are_named_as_they_were_saved_or_not_at_all(flat: bool) -> None:
    """Whichever class is live."""
    known = Counter[bool]()
    for seed in range(400):
        rng = random.Random(seed)
        pipeline = drawn(rng)
        if not any(pipeline.groups(range(len(pipeline.layers)))):
            continue
        consecutive, dual = cut(pipeline, rng), folded(pipeline, rng)
        for saved in (consecutive, dual):
            for live in (consecutive, dual, cut(pipeline, rng), folded(pipeline, rng)):
                found = named(saved, live, flat=flat, may_be_folded=True)
                assert found in (None, truth(saved)), (seed, saved, live)
                known[found is not None] += 1
    assert known[True] > 2 * known[False], known


@pytest.mark.parametrize("live", [of_blocks(4, 2), replace(of_blocks(4, 1, 2, 3), folded=True)])
def test_layers_of_one_shape_may_be_those_of_either_class(live: Pipeline) -> None:
    for saved in (of_blocks(4, 2), replace(of_blocks(4, 1, 2, 3), folded=True)):
        with pytest.raises(MismatchError, match="DualPipeVModule"):
            StateNames(live.live())(saved.numbered(may_be_folded=True)[0])
    older = of_blocks(4, 2)
    assert named(older, live) == truth(older), "of DeepSpeed before 0.19.8"


@pytest.mark.parametrize("live", [of_blocks(4, 2), replace(of_blocks(4, 1, 2, 3), folded=True)])
def test_saved_values_tell_the_class(live: Pipeline) -> None:
    """Where masters are compared with the weights, what is live is taken."""
    stages = [replace(each, compared=True) for each in live.numbered(may_be_folded=True)]
    found = StateNames(live.live())(replace(stages[0], stages=stages))
    assert found is not None and [tuple(group) for group in found[0]] == list(truth(live)[0])


def of_one_shape(layers: int, stages: int) -> Pipeline:
    """Layers of one shape, of which each rank has as many from the front as from the back."""
    size = layers // (2 * stages)
    return Pipeline(({"weight": (4, 4)},) * layers, tuple(range(size, layers, size)), folded=True)


def test_ways_to_divide_layers_of_one_shape_are_looked_at_in_a_counted_number_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are as many as the square of the layers: of 800, a file each, the search took minutes."""
    looked_at: list[int] = []

    def counted(numbered: NumberedStates, *more: Any) -> Any:
        looked_at.append(len(numbered.weights))
        return named_in_order(numbered, *more)

    monkeypatch.setattr(stage_names, "named_in_order", counted)
    monkeypatch.setattr(stage_names, "_MOST_STEPS", 5000, raising=False)
    assert named(of_one_shape(16, 4), None, may_be_folded=True) is None  # for want of shapes that tell
    assert sum(looked_at) < 4000
    looked_at.clear()
    assert named(of_one_shape(160, 4), None, may_be_folded=True) is None
    assert sum(looked_at) <= 4 * 5000  # once for each stage that is asked for


def test_stages_that_fit_are_not_taken_where_not_all_others_could_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Pipeline(tuple({"weight": (4, 4 + layer)} for layer in range(16)), (4, 8, 12))
    assert named(saved, saved, may_be_folded=True) == truth(saved)
    monkeypatch.setattr(stage_names, "_MOST_STEPS", 10, raising=False)
    assert named(saved, saved, may_be_folded=True) is None


def test_stages_with_many_tied_modules_are_not_taken_where_others_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = Pipeline((None, *(KINDS[0],) * 3), (2,))
    monkeypatch.setattr(stage_names, "_MOST_TIED", 0)
    assert named(saved, saved, may_be_folded=True) is None
    assert named(saved, saved) == truth(saved), "of DeepSpeed before 0.19.8"


def test_buffers_of_a_pipeline_are_met_once_for_all_its_weights() -> None:
    class Buffers(list[str]):
        times = 0

        def __iter__(self) -> Any:
            Buffers.times += 1
            return super().__iter__()

    stages = [replace(each, buffers=Buffers(["1.steps"])) for each in of_blocks(100, 50).numbered()]
    StateNames(needed=False)(replace(stages[0], stages=stages))
    assert Buffers.times < 100

"""Weighted pipeline stages: the syntax, the best cuts, and the patch of ``PipelineModule``."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.patches import pipeline_stages as pipe
from elastic_ckpt.patches import wrap as wrap_method
from elastic_ckpt.patches.pipeline_stages import (
    is_weighted,
    layer_name,
    layer_weights,
    partition_weights,
    unwatch_pipe,
)
from tests.source import code_of

Weights = Sequence[Fraction | int]
OWN = "_partition_layers"


class EmbedPipe(nn.Module):
    pass


class TransformerLayer(nn.Module):
    pass


class Head(nn.Module):
    pass


def norm(x: Any) -> Any:
    return x


@pytest.fixture(autouse=True)
def original() -> Iterator[Any]:
    """DeepSpeed's own method, which is in place before and after each test."""
    unwatch_pipe()
    function = vars(PipelineModule)[OWN]
    yield function
    PipelineModule._partition_layers = function


# --- the best cuts ---------------------------------------------------------------------------------------------------


def rank_of(weights: Weights, parts: Sequence[int]) -> tuple:
    """What the docstring of ``elastic_ckpt.patches.pipeline_stages`` promises, in its order: the least is the best."""
    spans = list(itertools.pairwise(parts))
    held = [sum(weights[start:stop]) for start, stop in spans]
    empty = sum(start == stop for start, stop in spans)
    lengths = sum((stop - start) ** 2 for start, stop in spans)
    return max(held), sum(weight * weight for weight in held), empty, lengths, [-cut for cut in parts]


def every_cut(count: int, num_parts: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations_with_replacement(range(count + 1), num_parts - 1):
        yield [0, *cuts, count]


def plain_programming(weights: Weights, num_parts: int) -> list[Any]:
    """The first four criteria by dynamic programming without any shortcut, for models too big for brute force."""
    count, sums = len(weights), [0, *itertools.accumulate(weights)]
    bound = min_max(sums, num_parts)
    best: list[Any] = [(0, 0, 0)] + [None] * count
    for _ in range(num_parts):
        after: list[Any] = [None] * (count + 1)
        for start, stop in itertools.combinations_with_replacement(range(count + 1), 2):
            held = sums[stop] - sums[start]
            if best[start] is not None and held <= bound:
                own = (held * held, int(start == stop), (stop - start) ** 2)
                offered = tuple(a + b for a, b in zip(best[start], own, strict=True))
                after[stop] = offered if after[stop] is None else min(after[stop], offered)
        best = after
    return [bound, *best[count]]


def min_max(sums: Sequence[Any], num_parts: int) -> Any:
    """The least weight of the heaviest stage, by dynamic programming."""
    best = list(sums)
    for _ in range(num_parts - 1):
        best = [
            min(max(best[start], sums[stop] - sums[start]) for start in range(stop + 1)) for stop in range(len(sums))
        ]
    return best[-1]


some_weight = st.one_of(
    st.sampled_from([0, 0, 1, 1, 2]),
    st.integers(0, 12),
    st.sampled_from([Fraction("0.1"), Fraction("0.3"), Fraction("2.5"), Fraction(1, 3)]),
    st.fractions(0, 5, max_denominator=6),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(some_weight, max_size=9), st.integers(1, 6))
def test_no_other_cuts_are_better(weights: list[Any], num_parts: int) -> None:
    best = min(every_cut(len(weights), num_parts), key=lambda parts: rank_of(weights, parts))
    assert partition_weights(weights, num_parts) == best


@settings(deadline=None, max_examples=60)
@given(st.lists(some_weight, min_size=10, max_size=28), st.integers(2, 14))
def test_shortcuts_of_the_search_miss_nothing_in_deeper_models(weights: list[Any], num_parts: int) -> None:
    parts = partition_weights(weights, num_parts)
    assert list(rank_of(weights, parts)[:4]) == plain_programming(weights, num_parts)


@settings(deadline=None)
@given(st.lists(some_weight, max_size=40), st.integers(1, 50))
def test_stages_are_consecutive_plain_ints_and_none_is_empty_that_need_not_be(weights: list[Any], stages: int) -> None:
    parts = partition_weights(weights, stages)
    assert [type(cut) for cut in parts] == [int] * (stages + 1)
    assert (parts[0], parts[-1]) == (0, len(weights))
    lengths = [stop - start for start, stop in itertools.pairwise(parts)]
    assert min(lengths) >= (1 if len(weights) >= stages else 0)
    assert max(lengths, default=0) <= 1 or len(weights) > stages


@pytest.mark.parametrize("count", [1, 3, 7, 8, 24, 25, 31])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_equal_weights_are_cut_as_uniform_cuts_them(count: int, stages: int) -> None:
    assert partition_weights([Fraction("0.7")] * count, stages) == partition_uniform(count, stages)


def test_stages_are_even_where_the_heaviest_leaves_a_choice() -> None:
    # 9 is alone whatever the rest does: [3, 1, 9] would be as good for the heaviest stage
    assert partition_weights([1, 1, 1, 1, 9], 3) == [0, 2, 4, 5]
    # layers of no weight are dealt out too
    assert partition_weights([1, 0, 0, 0, 0, 1], 2) == [0, 3, 6]
    assert partition_weights([5, 0, 0, 0], 4) == [0, 1, 2, 3, 4]


def test_sums_of_decimals_compare_exactly() -> None:
    # 0.1 + 0.2 + 0.5 and 0.5 + 0.3 tie, so the later cut is taken; in binary, the first sum is the greater one
    weights = layer_weights("type:a:0.1|b:0.2|c:0.5|d:0.3|e:0", ["a", "b", "c", "d", "e"])
    assert partition_weights(weights, 2) == [0, 3, 5]
    assert partition_weights([Fraction(float(weight)) for weight in weights], 2) == [0, 2, 5]
    # less than what a float of that size can tell apart
    assert partition_weights([Fraction("1.00000000000000000000000000001"), Fraction("1e-30"), 1], 2) == [0, 1, 3]


def test_the_heaviest_stage_is_lighter_than_deepspeeds_where_that_is_not_the_lightest() -> None:
    weights = [4, 5, 2, 3, 5, 4]
    theirs = rank_of(weights, [int(cut) for cut in partition_balanced(weights, 4)])
    ours = rank_of(weights, partition_weights(weights, 4))
    assert ours[0] < theirs[0]


def test_each_of_two_embeddings_gets_a_stage_of_its_own() -> None:
    names = ["EmbedPipe", *["TransformerLayer"] * 60, "EmbedPipe"]
    parts = partition_weights(layer_weights("type:embed:2|transformer:1", names), 32)
    assert parts == [0, *range(1, 62, 2), 62]


# --- the syntax ------------------------------------------------------------------------------------------------------

NAMES = ["EmbedPipe", "TransformerLayer", None, "TransformerLayer", "Head"]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("type:embed:2|transformer:1", [2, 1, 0, 1, 0]),
        ("TYPE:EMBED:2|Transformer:1", [2, 1, 0, 1, 0]),
        ("weighted_type:embed:2|transformer:1", [2, 1, 0, 1, 0]),
        ("Weighted_Type:transformer:0.1|head:2.50", [0, "0.1", 0, "0.1", "2.5"]),
        ("type:transformer:1", [0, 1, 0, 1, 0]),
        ("type:embed:0|transformer:1", [0, 1, 0, 1, 0]),
        ("type:transformer:0.1|head:2.50", [0, "0.1", 0, "0.1", "2.5"]),
        ("type:head:1e-3|embed:.5|transformer:+3.", ["0.5", 3, 0, 3, "0.001"]),
        ("type:head:2E2|embed : 1", [1, 0, 0, 0, 200]),
        # the first that matches
        ("type:former:3|transformer:5|.:1", [1, 3, 0, 3, 1]),
        (".:1|former:3", None),
        # a regex's own bars and colons
        ("type:(?:embed|head):2|transformer:1", [2, 1, 0, 1, 2]),
        # not lowercased: \S is not \s
        (r"type:^\S+$:2", [2, 2, 0, 2, 2]),
        ("type:^head$:2", [0, 0, 0, 0, 2]),
    ],
)
def test_layers_weigh_what_the_method_says(method: str, expected: list[Any] | None) -> None:
    assert is_weighted(method) == (expected is not None)
    if expected is not None:
        assert layer_weights(method, NAMES) == [Fraction(weight) for weight in expected]


@pytest.mark.parametrize(
    "method",
    [
        "uniform",
        "parameters",
        "profile",
        "embed:2",
        "type:transformer",
        "type:transformer|embed",
        "type:(?:transformer|embed)",
        "type:embed:",
        "type:embed:x",
        "type:",
        "",
        "xtype:embed:2",
        "type_embed:2",
    ],
)
def test_methods_without_weights_are_deepspeeds(method: str) -> None:
    assert not is_weighted(method)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("type:embed:2|transformer", ["a weight", "'transformer:'"]),
        ("type:embed|transformer:1", ["a weight", "'embed:'"]),
        ("type:embed:2|", ["a regex"]),
        ("type:embed:2||transformer:1", ["a regex"]),
        ("type::2", ["a regex"]),
        ("type: :2", ["a regex"]),
        ("type:embed:-1|transformer:1", ["'embed:-1'"]),
        ("type:embed:nan", ["'embed:nan'"]),
        ("type:embed:inf|transformer:1", ["'embed:inf'"]),
        ("type:embed:1e999", ["1e999"]),
        ("type:embed:1_0", ["1_0"]),
        ("type:embed:٣", ["٣"]),
        ("type:embed:2x|transformer:1", ["'embed:2x'"]),
        ("type:embed:|transformer:1", ["'embed:'"]),
        ("type:*embed:2", ["does not compile", "'*embed'", "nothing to repeat"]),
        ("type:[embed:2|transformer:1", ["does not compile"]),
        ("type:e{99999999999999}:2", ["does not compile"]),
        ("type:embed:2|decoder:1", ["'decoder'", "EmbedPipe, Head, TransformerLayer"]),
        ("type:embed:0|transformer:0.0", ["weigh nothing"]),
        ("weighted_type:embed|transformer:1", ["a weight", "'embed:'"]),
        ("weighted_type:transformer", ["a weight", "'transformer:'"]),
        ("weighted_type:", ["a regex"]),
    ],
)
def test_other_methods_are_refused_by_name(method: str, words: list[str]) -> None:
    assert is_weighted(method)
    with pytest.raises(ConfigError) as caught:
        layer_weights(method, NAMES)
    error = caught.value
    assert not [word for word in words if word not in str(error)], str(error)
    assert error.expected and error.remedy and method in str(error)


def test_a_regex_that_an_earlier_one_shadows_is_no_error() -> None:
    assert layer_weights("type:.:1|head:9", NAMES) == [1, 1, 0, 1, 1]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of sets that a later Python may read otherwise
@settings(deadline=None)
@given(st.text("()[]|:\\2a^. -", max_size=14))
def test_no_text_gets_past_the_errors(text: str) -> None:
    if is_weighted(method := f"type:{text}"):
        with suppress(ConfigError):
            weights = layer_weights(method, NAMES)
            assert len(weights) == len(NAMES) and any(weights) and min(weights) >= 0


# --- the patch -------------------------------------------------------------------------------------------------------

LAYERS: list[Any] = [
    TiedLayerSpec("embed", EmbedPipe),
    *[LayerSpec(TransformerLayer) for _ in range(4)],
    norm,
    functools.partial(norm),
    TransformerLayer(),
    Head(),
]


def a_module(
    rank: int = 0, stages: int = 3, layers: Sequence[Any] = LAYERS, cls: type = PipelineModule
) -> PipelineModule:
    """A ``PipelineModule`` as ``_partition_layers`` finds it, without the process group that the rest asks for."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.num_stages, module.global_rank, module.loss_fn = stages, rank, None
    module._topo = PipeDataParallelTopology(num_pp=stages, num_dp=1)
    module.stage_id = module._topo.get_coord(rank).pipe
    module._layer_specs = list(layers)
    return module


METHOD = "type:embed:4|transformer:2|head:1"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_module_is_cut_by_weight_the_same_way_on_every_rank(rank: int) -> None:
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    module = a_module(rank)
    assert module._partition_layers(method=METHOD) is None
    assert module.parts == [0, 2, 4, 9]
    assert [type(cut) for cut in module.parts] == [int] * 4
    assert (module._local_start, module._local_stop) == tuple(module.parts[rank : rank + 2])


def test_the_method_may_be_given_by_position() -> None:
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    module = a_module()
    module._partition_layers(METHOD)
    assert module.parts == partition_weights([4, 2, 2, 2, 2, 0, 0, 2, 1], 3)


def test_a_dualpipev_module_is_cut_into_twice_as_many_stages() -> None:
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    module = a_module(1, stages=2, cls=DualPipeVModule)
    module._partition_layers(METHOD)
    parts = partition_weights([4, 2, 2, 2, 2, 0, 0, 2, 1], 4)
    assert module.parts == parts
    assert module.phase_bounds == [(parts[1], parts[2]), (parts[2], parts[3])]


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:transformer", "type:transformer|embed"])
def test_other_methods_do_what_they_did(method: str, original: Any) -> None:
    theirs, ours = a_module(1), a_module(1)
    original(theirs, method)
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    ours._partition_layers(method)
    assert list(ours.parts) == list(theirs.parts)
    assert (ours._local_start, ours._local_stop) == (theirs._local_start, theirs._local_stop)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [((), {}), (("Uniform",), {}), ((), {"method": "type:A|b"}), ((None,), {}), (("type:a", 3), {"more": 4})],
)
def test_other_methods_go_to_deepspeed_with_unchanged_arguments(arguments: tuple, keywords: dict) -> None:
    calls: list[Any] = []

    def fake(self: Any, *args: Any, **kwargs: Any) -> str:
        calls.append((self, args, kwargs))
        return "done"

    PipelineModule._partition_layers = fake
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    module = a_module()
    assert module._partition_layers(*arguments, **keywords) == "done"
    assert calls == [(module, arguments, keywords)]


def test_a_refused_method_leaves_the_module_uncut() -> None:
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    module = a_module()
    with pytest.raises(ConfigError, match="decoder"):
        module._partition_layers("type:embed:2|decoder:1")
    assert not hasattr(module, "parts")


def test_rank_0_logs_one_line_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(pipe.logger, "info", lines.append)
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    a_module(1)._partition_layers(METHOD)
    assert lines == []
    a_module(0, stages=2)._partition_layers("type:embed:2.5|transformer:1|head:0.25")
    assert lines == [
        "Partitioning pipeline stages with method type:embed:2.5|transformer:1|head:0.25",
        "stage=0 layers=[0, 2) weight=3.5",
        "stage=1 layers=[2, 9) weight=4.25",
    ]


@pytest.mark.parametrize("pattern", ["embed", "TRANSFORMER", "norm", "^head$", "layer|head", ""])
def test_names_are_those_by_which_deepspeed_finds_layers(pattern: str) -> None:
    names = [layer_name(layer) for layer in LAYERS]
    assert names == ["EmbedPipe", *["TransformerLayer"] * 4, "norm", None, "TransformerLayer", "Head"]
    regex = re.compile(pattern, re.IGNORECASE)
    found = [index for index, name in enumerate(names) if name is not None and regex.search(name)]
    assert found == a_module()._find_layer_type(pattern)


def test_installing_twice_is_installing_once(original: Any) -> None:
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    once = vars(PipelineModule)[OWN]
    assert once is not original and once.__name__ == OWN and inspect.signature(once) == inspect.signature(original)
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    assert vars(PipelineModule)[OWN] is once
    unwatch_pipe()
    assert vars(PipelineModule)[OWN] is original
    unwatch_pipe()
    assert vars(PipelineModule)[OWN] is original


@pytest.mark.parametrize("wrap", [functools.wraps, lambda inner: lambda outer: outer])
def test_a_wrapper_around_the_patch_stays(wrap: Callable[..., Any]) -> None:
    wrap_method(PipelineModule, OWN, pipe._partition_layers)
    ours = vars(PipelineModule)[OWN]

    @wrap(ours)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    PipelineModule._partition_layers = theirs
    unwatch_pipe()
    assert vars(PipelineModule)[OWN] is theirs


def test_importing_the_package_patches_nothing(original: Any) -> None:
    assert original.__module__ == "deepspeed.runtime.pipe.module"
    assert inspect.unwrap(original) is original


# --- DeepSpeed's privates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["num_stages", "global_rank", "_layer_specs", "self.parts = ", "_topo.get_coord(self.global_rank).pipe"],
)
def test_deepspeed_still_has(name: str) -> None:
    assert name in code_of(PipelineModule._partition_layers), f"_partition_layers no longer has {name}"


def test_deepspeed_still_calls_what_is_patched_as_before() -> None:
    assert str(inspect.signature(PipelineModule._partition_layers)) == "(self, method='uniform')"
    assert str(inspect.signature(PipelineModule._set_bounds)) == "(self, start=None, stop=None)"
    assert "self._partition_layers(method=partition_method)" in code_of(PipelineModule.__init__)
    assert "super()._partition_layers(method)" in code_of(DualPipeVModule._partition_layers)


def test_deepspeed_has_no_weights_of_its_own_yet() -> None:
    with pytest.raises(NotImplementedError, match="weighted_type"):
        a_module()._partition_layers("weighted_type:transformer:1")
    weighted, plain = a_module(), a_module()
    weighted._partition_layers("type:transformer:2")  # what is behind the second colon is nothing to it
    plain._partition_layers("type:transformer")
    assert list(weighted.parts) == list(plain.parts)


def test_deepspeeds_own_cuts_by_type_are_no_plain_ints_yet() -> None:
    """Where ``seed_layers`` needs plain ones; when this fails, that is one reason less for weights."""
    module = a_module()
    module._partition_layers("type:transformer")
    assert {type(cut) for cut in module.parts} != {int}

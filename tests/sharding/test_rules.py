"""Rules on real shards, what DeepSpeed declares by DeepSpeed's own code, and the presets of ``configs/rules``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic_ckpt.core.name_patterns import matches_whole
from elastic_ckpt.core.shard_specs import CannotSplit, DeclaredSpecs, ShardSpec, declared_by, layout_of_affine
from elastic_ckpt.core.strided import TPLayout
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.sharding.rules import Preset, is_fused


def cut(whole: torch.Tensor, split: TPLayout) -> list[torch.Tensor]:
    """What each rank holds."""
    return [
        torch.cat([whole.narrow(split.dim, a, b - a) for a, b in held] or [whole.narrow(split.dim, 0, 0)], split.dim)
        for held in split.ranges
    ]


def by_rule(
    rule: Mapping[str, Any], whole: torch.Tensor, shards: Sequence[torch.Tensor], run: Mapping[str, Any] = {}
) -> None:
    """A rule finds out from the shards' shapes alone how they were cut."""
    split = ShardSpec(pattern="x", **rule).layout([tuple(shard.shape) for shard in shards], run)
    assert split.shape == tuple(whole.shape)
    found = cut(whole, split)
    assert len(found) == len(shards)
    assert all(torch.equal(a, b) for a, b in zip(found, shards, strict=True))


def refuses(rule: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], why: str, args: Mapping[str, Any] = {}) -> None:
    with pytest.raises(CannotSplit, match=why):
        ShardSpec(pattern="x", **rule).layout(shapes, args)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def parts_of(whole: torch.Tensor, widths: Sequence[int], degree: int, dim: int = 0) -> list[torch.Tensor]:
    pieces = [part.chunk(degree, dim) for part in whole.split(list(widths), dim)]
    return [torch.cat([part[rank] for part in pieces], dim) for rank in range(degree)]


# --- rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_plain_cuts(degree: int) -> None:
    whole = numbered(7, 5, 6)
    by_rule({"kind": "column"}, whole, whole.tensor_split(degree))
    by_rule({"kind": "vocabulary"}, whole, whole.tensor_split(degree))
    by_rule({"kind": "row"}, whole, whole.tensor_split(degree, 1))
    by_rule({"kind": "column", "dim": 2}, whole, whole.tensor_split(degree, 2))
    by_rule({"kind": "row", "dim": 2}, whole, whole.tensor_split(degree, 2))
    for kind in ("replicated", "averaged", "summed"):
        by_rule({"kind": kind}, whole, [whole] * degree)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize(("parts", "widths"), [([1, 1], [8, 8]), ([2, 1, 1], [16, 8, 8]), ([1, 3], [4, 12])])
@pytest.mark.parametrize("dim", [0, 1])
def test_sub_parameters_are_each_cut_on_their_own(parts: list[int], widths: list[int], degree: int, dim: int) -> None:
    whole = numbered(*((sum(widths), 3) if dim == 0 else (3, sum(widths))))
    shards = parts_of(whole, widths, degree, dim)
    by_rule({"kind": "row" if dim else "column", "sub_parameters": parts}, whole, shards)
    by_rule({"kind": "column", "dim": dim, "sub_parameters": parts}, whole, shards)


@pytest.mark.parametrize(
    ("args", "widths"),
    [
        ({"num_attention_heads": 8}, [8, 8, 8]),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, [16, 8, 8]),
        ({"num_attention_heads": 8, "num_query_groups": 2}, [32, 8, 8]),
        ({"num_attention_heads": 8, "num_query_groups": 2, "group_query_attention": True}, [32, 8, 8]),
        # Megatron Core writes one group where it means as many as heads
        ({"num_attention_heads": 8, "num_query_groups": 1, "group_query_attention": False}, [8, 8, 8]),
    ],
)
def test_queries_keys_and_values_by_the_heads_of_the_run(args: Mapping[str, Any], widths: list[int]) -> None:
    whole = numbered(sum(widths), 2)
    by_rule({"kind": "column", "sub_parameters": "qkv"}, whole, parts_of(whole, widths, 2), args)


@pytest.mark.parametrize("args", [{}, {"num_attention_heads": 8, "num_kv_heads": 3}, {"num_attention_heads": "8"}])
def test_queries_keys_and_values_of_unknown_heads_are_refused(args: Mapping[str, Any]) -> None:
    refuses({"kind": "column", "sub_parameters": "qkv"}, [(24, 2)] * 2, "how many attention heads", args)


def test_shards_that_a_rule_cannot_have_cut_are_refused() -> None:
    refuses({"kind": "row"}, [(4,), (4,)], "dimension 1")
    refuses({"kind": "column"}, [(4, 2), (4, 3)], "differ in others")
    refuses({"kind": "row"}, [(4, 2), (3, 2)], "differ in others")
    refuses({"kind": "replicated"}, [(4, 2), (3, 2)], "replicated, but")
    refuses({"kind": "column", "sub_parameters": [2, 1]}, [(6, 2), (4, 2)], "proportions")


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "column", "sub_parameters": []},
        {"kind": "column", "sub_parameters": [1, 0]},
        {"kind": "column", "sub_parameters": "kv"},
        {"kind": "replicated", "sub_parameters": [1, 1]},
        {"kind": "vocabulary", "sub_parameters": [1, 1]},
        {"kind": "custom"},
        {"kind": "column", "dim": -1},
        {"kind": "vocabulary", "vocabulary": 0},
        {"kind": "diagonal"},
        {"kind": "column", "pattern": "("},
        {"kind": "column", "pattern": "x" * 513},
        {"kind": "column", "extra": 1},
    ],
)
def test_rules_that_mean_nothing_are_refused(rule: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ShardSpec(**{"pattern": "x", **rule})


def test_a_rule_applies_to_whole_names_and_to_runs_that_have_all_it_asks_for() -> None:
    rule = ShardSpec(pattern=r"\d+\.weight", kind="column", when={"swiglu": [True, 1], "bias": False})
    assert rule.applies("3.weight", {"swiglu": True, "bias": False})
    for name, run in (
        ("3.weights", {"swiglu": True, "bias": False}),
        ("m.3.weight", {"swiglu": True, "bias": False}),
        ("3.weight", {"swiglu": False, "bias": False}),
        ("3.weight", {"swiglu": True, "bias": True}),
        ("3.weight", {"swiglu": True}),
        ("3.weight", {}),
    ):
        assert not rule.applies(name, run)


def test_names_of_parameters_that_are_made_of_several() -> None:
    fused = "attention.query_key_value.bias self_attn.qkv_proj.weight Wqkv.weight gate_up_proj dense_h_to_4h.weight kv_proj.weight"
    assert all(map(is_fused, fused.split()))
    plain = "q_proj.weight k_proj.weight dense_4h_to_h.weight gate_proj.weight up_proj.weight norm.weight kv_projection2.weight"
    assert not any(map(is_fused, plain.split()))


# --- what a checkpoint declares ---------------------------------------------------------------------------------


@st.composite
def recorded_maps(draw: st.DrawFn) -> ParamAffineMap:
    degree, dims = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape, dim = [draw(st.integers(1, 4)) for _ in range(dims)], draw(st.integers(0, dims - 1))

    def widths(size: int) -> list[int]:
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=degree - 1, max_size=degree - 1)))
        return [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]

    kind = draw(st.sampled_from(["contiguous", "sub", "segmented", "replicated", "blocks"]))
    subs = [draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 3)))]
    if kind == "replicated":
        return replicated_map(shape, degree)
    if kind == "blocks":
        order = draw(st.permutations(range(degree * 2)))
        shape[dim] = 4 * degree
        ids = {rank: order[2 * rank : 2 * rank + 2] for rank in range(degree)}
        return block_gather_map(shape, ids, 2, dim)
    shape[dim] = sum(subs)
    if kind == "contiguous":
        return contiguous_split_map(shape, widths(shape[dim]), dim)
    if kind == "sub":
        return sub_param_map(shape, subs, [widths(sub) for sub in subs], dim)
    segments = [(sub, draw(st.booleans())) for sub in subs]
    return segmented_map(shape, segments, dim, degree, [widths(sub) for sub, whole in segments if not whole])


@settings(deadline=None, max_examples=150)
@given(recorded_maps())
def test_a_recorded_map_is_read_as_deepspeed_reads_it(recorded: ParamAffineMap) -> None:
    entry = json.loads(json.dumps(recorded.to_dict()))  # keys of ranks are text then
    whole = numbered(*recorded.logical_shape)
    split = layout_of_affine(entry)
    found = cut(whole, split)
    assert split.shape == tuple(whole.shape)
    for rank in range(split.degree):
        assert torch.equal(found[rank], recorded.extract(whole, rank))
    assert torch.equal(recorded.rebuild(dict(enumerate(found))), whole)
    shapes = [tuple(shard.shape) for shard in found]
    declared = declared_by({"affine_map": {"version": 1, "params": {r"^a\.b$": recorded.to_dict()}}})
    assert declared.layout("a.b", shapes) == split
    assert declared.is_recorded("a.b")
    assert declared.layout("a.c", shapes) is None
    assert not declared.is_recorded("a.c")


def one_piece(shape: tuple[int, ...], piece: AffinePiece) -> ParamAffineMap:
    return ParamAffineMap(shape, {0: piece.shape}, {0: [piece]})


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        (replicated_map((4,), 2, scale=0.5), "scaled"),
        (one_piece((4, 4), AffinePiece((2, 2), 0, (4, 1), 0, (2, 1), [0])), r"dimensions \[0, 1\]"),
        (one_piece((4, 2), AffinePiece((2, 2), 0, (2, 1), 0, (1, 2), [0])), "no cut"),
        (one_piece((4, 2), AffinePiece((2, 2), 0, (4, 1), 0, (2, 1), [0])), "no cut"),
        (one_piece((4, 2), AffinePiece((2, 2), 1, (2, 1), 0, (2, 1), [0])), "no cut"),
        (one_piece((4, 2), AffinePiece((2, 2), 0, (2, 1), 0, (2, 1), [0])), "holes in dimension 0"),
        (one_piece((4, 2), AffinePiece((2, 2), 0, (2, 1), 2, (2, 1), [0])), "recorded with holes"),
    ],
)  # fmt: skip
def test_a_map_that_is_no_cut_along_one_dimension_is_refused(recorded: ParamAffineMap, why: str) -> None:
    with pytest.raises(CannotSplit, match=why):
        layout_of_affine(recorded.to_dict())


def test_empty_shards_of_untouched_parameters_say_nothing() -> None:
    empty = contiguous_split_map((0,), [0, 0], 0)
    declared = declared_by({"affine_map": {"params": {"a": empty.to_dict()}}})
    assert declared.layout("a", [(2,), (2,)]) is None
    split = declared.layout("a", [(0,), (0,)])
    assert split is not None
    assert split.shape == (0,)


def test_each_list_of_patterns_is_a_rule() -> None:
    info = {
        "vocabulary_parameter_patterns": ["words"],
        "tp_replicated_parameter_patterns": ["norm"],
        "parameter_to_average_patterns": ["drift"],
        "parameter_with_row_parallelism_patterns": ["row"],
        "parameter_with_2_sub_params_cat_dim_0": ["halves"],
        "parameter_with_sub_params": [
            {"patterns": ["heads"], "shape": [(960, 320, 320), -1], "partition_dim": 0},
            {"patterns": ["three"], "shape": [2, 3], "partition_dim": 1},
        ],
        "original_vocab_size": 17,
    }
    declared = declared_by(info)
    said = {
        name: declared.spec(f"{name}.weight") for name in ["words", "norm", "drift", "row", "halves", "heads", "three"]
    }
    kinds = ["vocabulary", "replicated", "averaged", "row", "column", "column", "column"]
    assert [rule.kind for rule in said.values() if rule] == kinds
    assert [rule.sub_parameters for rule in said.values() if rule] == [None] * 4 + [[1, 1], [3, 1, 1], [1, 1, 1]]
    assert [rule.cut_dim for rule in said.values() if rule][3:] == [1, 0, 0, 1]
    assert declared.spec("m.norm") is None  # from the start of the name, as re.match
    assert declared.vocabulary == 17


def test_of_several_patterns_the_first_list_counts_and_stages_are_united() -> None:
    one = declared_by({"parameter_with_row_parallelism_patterns": ["a"], "vocabulary_parameter_patterns": ["a"]})
    two = declared_by({"tp_replicated_parameter_patterns": ["a", "b"], "original_vocab_size": 5})
    both = one | two
    assert [both.spec(name).kind for name in "ab"] == ["vocabulary", "replicated"]  # type: ignore[union-attr]
    assert [(two | one).spec(name).kind for name in "ab"] == ["replicated", "replicated"]  # type: ignore[union-attr]
    assert both.vocabulary == (two | one).vocabulary == 5
    affine = [declared_by({"affine_map": {"params": {"a": replicated_map((n,), 2).to_dict()}}}) for n in (1, 2)]
    assert (affine[0] | affine[1]).layout("a", [(1,), (1,)]) is not None
    assert (declared_by([1]) | one).unreadable
    assert (one | declared_by([1])).unreadable


@pytest.mark.parametrize(
    "info",
    [
        [1],
        "abc",
        {"parameter_with_sub_params": ["x"]},
        {"parameter_with_sub_params": [{}]},
        {"parameter_with_sub_params": 5},
        {"parameter_with_sub_params": [{"patterns": ["x"], "shape": [3], "partition_dim": 2}]},
        {"affine_map": {"params": [1]}},
        {"affine_map": {"version": 2, "params": {}}},
        {"affine_map": {"params": {"(": {}}}},
        {"affine_map": {"params": {"x": {}}}},
        {"affine_map": {"params": {"x": {"logical_shape": [2], "ranks": []}}}},
        {"affine_map": {"params": {"x": {"logical_shape": [2] * 65, "ranks": {}}}}},
        {"affine_map": {"params": {"x": {"logical_shape": [2**62], "ranks": {}}}}},
        {"autotp_unsupported_parameter_patterns": ["x"]},
        {"autotp_unsupported_parameter_patterns": {"(": "y"}},
        {"vocabulary_parameter_patterns": [3]},
        {"vocabulary_parameter_patterns": ["x" * 513]},
        {"vocabulary_parameter_patterns": "x" * 20_000},
        {"vocabulary_parameter_patterns": ["x"] * 10_001},
        {"pipeline_replicated_parameter_patterns": ["(\\w+(?x:\n))+X"]},
        {"pipeline_replicated_parameter_patterns": [rf".*{number}.{{400}}" for number in range(100)]},
        {"parameter_with_sub_params": [{"patterns": ["x"], "shape": [10**9, 3], "partition_dim": 0}]},
        {"parameter_with_sub_params": [{"patterns": ["x"], "shape": [float("inf"), 3], "partition_dim": 0}]},
        {"sub_param_shard_widths": {"x": [[1, 1]]}},
    ],
)
def test_what_cannot_be_understood_is_an_error_only_once_it_is_asked(info: Any) -> None:
    declared = declared_by(info)
    assert declared.unreadable
    with pytest.raises(CannotSplit, match="cannot be understood"):
        declared.spec("x")


def test_patterns_as_people_write_them_are_understood() -> None:
    of_stages = [
        r"tied_modules.embed.(positions|norm.*|words.weight)",
        r"^.*layers\.\d+\..*(q|k|v)_proj.*",
    ]
    assert declared_by({"pipeline_replicated_parameter_patterns": of_stages}).one_stage == tuple(of_stages)


def test_a_run_that_declares_nothing_says_nothing() -> None:
    assert declared_by(None) == declared_by({}) == DeclaredSpecs()
    assert DeclaredSpecs().spec("x") is DeclaredSpecs().layout("x", [(1,)]) is None
    for size in (0, -1, "7", None):
        assert declared_by({"original_vocab_size": size}).vocabulary is None


@pytest.mark.parametrize("shape", [[(3, 0), 2], [0, 2], [-1, 2]])
def test_sub_parameters_without_a_width_are_ambiguous(shape: list[Any]) -> None:
    declared = declared_by({"parameter_with_sub_params": [{"patterns": ["x"], "shape": shape, "partition_dim": 0}]})
    rule = declared.spec("x")
    assert rule is not None
    assert rule.kind == "whole_only"
    assert "say nothing" in rule.ambiguous


# --- presets ----------------------------------------------------------------------------------------------------


def applying(preset: str, name: str, run: Mapping[str, Any]) -> ShardSpec | None:
    return next((rule for rule in Preset.load(preset).rules if rule.applies(name, run)), None)


def test_every_preset_loads_and_goes_by_the_name_of_its_file() -> None:
    assert len(Preset.names()) >= 6
    for name in Preset.names():
        assert Preset.load(name).name == name
        assert all(rule.ambiguous for rule in Preset.load(name).rules if rule.kind == "whole_only")


@pytest.mark.parametrize(
    ("preset", "name", "run", "kind", "parts"),
    [
        ("bloom", "3.self_attention.query_key_value.weight", {}, "column", None),
        ("bloom", "3.input_layernorm.weight", {}, "averaged", None),
        ("gpt-neox", "2.attention.dense.weight", {}, "row", None),
        ("megatron-core", "decoder.layers.0.mlp.linear_fc1.weight", {"swiglu": True}, "column", [1, 1]),
        ("megatron-core", "decoder.layers.0.mlp.linear_fc1.weight", {"swiglu": False}, "column", None),
        ("megatron-core", "decoder.layers.0.mlp.linear_fc1.weight", {}, "whole_only", None),
        ("megatron-core", "embedding.word_embeddings.weight", {}, "vocabulary", None),
        ("megatron-deepspeed-contiguous", "2.self_attention.query_key_value.weight", {}, "column", "qkv"),
        ("megatron-deepspeed-interleaved", "2.self_attention.query_key_value.weight", {}, "column", None),
        ("megatron-deepspeed-interleaved", "2.self_attention.query_key_value.weight",
         {"ds_sequence_parallel_fpdt": False}, "whole_only", None),
        ("megatron-deepspeed-contiguous", "2.mlp.dense_h_to_4h.bias", {"swiglu": True}, "column", [1, 1]),
        ("megatron-deepspeed-contiguous", "2.mlp.dense_4h_to_h.bias", {}, "replicated", None),
        ("gpt-neox-gptj-residual", "2.mlp.dense_4h_to_h.bias", {}, "summed", None),
    ],
)  # fmt: skip
def test_what_presets_say_of_well_known_parameters(
    preset: str, name: str, run: Mapping[str, Any], kind: str, parts: Any
) -> None:
    rule = applying(preset, name, run)
    assert rule is not None
    assert (rule.kind, rule.sub_parameters) == (kind, parts)


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match='no preset "gpt-5"') as caught:
        Preset.load("gpt-5")
    assert all(name in str(caught.value.expected) for name in Preset.names())


def test_a_preset_may_be_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "description": "", "rules": [{"pattern": "a", "kind": "row"}]}')
    assert Preset.load(str(path)).rules == [ShardSpec(pattern="a", kind="row")]


@pytest.mark.parametrize(
    "text",
    [None, "{", "[]", "[" * 100_000, '{"name": "x"}', '{"name": "x", "description": "", "rules": [{"pattern": "("}]}'],
)
def test_a_file_that_is_no_preset_is_refused_by_its_path(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        Preset.load(str(path))
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    "pattern", [r"(\w+)+\b!", r"(a|ab)*(?!x)c", r"(.*)(.*)\1$", r"(?i)(a*){2,}", r"(a*){400}\b(.*)"]
)
def test_patterns_that_could_take_for_ever_are_not_understood(pattern: str) -> None:
    declared = declared_by({"tp_replicated_parameter_patterns": [pattern]})
    with pytest.raises(CannotSplit, match="take forever"):
        declared.spec("layers.0.norm.weight")


def test_verbose_patterns_are_not_understood() -> None:
    """Their blanks stand between a group and what repeats it, where no look at the text finds it."""
    with pytest.raises(CannotSplit, match="verbose"):
        declared_by({"tp_replicated_parameter_patterns": ["(?x)(a+) +$"]}).spec("aab")


def test_maps_of_enormous_shapes_take_no_memory() -> None:
    entry = {
        "logical_shape": [10**12, 4],
        "ranks": {0: {"pieces": [{"shape": [5, 4], "source": [0, [4, 1]], "dest": [0, [4, 1]]}]}},
    }
    with pytest.raises(CannotSplit, match="holes"):
        layout_of_affine(entry)


def test_a_rule_applies_to_long_names_in_work_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own matching takes the square of a name that a checkpoint made for a preset's pattern."""
    rule = ShardSpec(pattern=r".*\.deepspeed_moe\.experts\..*", kind="row")
    experts = ".deepspeed_moe.experts."
    assert rule.applies(f"{experts}0", {})
    monkeypatch.delattr("re.fullmatch")
    assert rule.applies(f"{experts * 5_000}0", {})
    assert not rule.applies(f"{experts * 5_000}\n", {})


def test_a_rule_of_nested_repetition_is_matched_in_time() -> None:
    """Python's ``re`` takes twice as long with each character of the name."""
    rule = ShardSpec(pattern=r"(?:(\w+)*\.)*attn", kind="column")
    assert not rule.applies("a" * 200 + "!", {})
    assert rule.applies("a.b.attn", {})


def test_a_rule_that_takes_re_is_refused_for_a_long_name() -> None:
    """It did not apply, without a word."""
    rule = ShardSpec(pattern=r"(.+)\.(?<=x\.)(weight|bias)", kind="column")
    assert rule.applies("x.weight", {}) and not rule.applies("y.weight", {})
    with pytest.raises(ConfigError, match="could take forever"):
        rule.applies("x." * 200 + "weight", {})
    flags = ShardSpec(pattern=r"(?i)WEIGHT.*", kind="column")
    assert flags.applies("weight" * 100, {}), "a single repeat"


def test_no_rule_of_the_package_takes_re() -> None:
    for path in sorted((Path(__file__).parents[2] / "configs" / "rules").glob("*.json")):
        for rule in Preset.load(str(path)).rules:
            assert matches_whole(rule.pattern, "name") is not None, (path.name, rule.pattern)

"""Who holds what: every decision on real shards, cut by torch or DeepSpeed and put together again, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
    contiguous_split_map,
    segmented_map,
    sub_param_map,
)

from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import ModelLayout, RankCoordinates
from elastic_ckpt.core.shard_specs import layout_of_affine
from elastic_ckpt.core.strided import TPLayout
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.ties import adopt_live_names
from elastic_ckpt.sharding.resolve import FIRST, MEAN, STRICT, resolve
from elastic_ckpt.sharding.rules import Preset, ShardingRules
from tests.resolving import (
    affine,
    arrives,
    check,
    checkpoint,
    decided,
    layout,
    merged_halves,
    numbered,
    preset,
    refused,
    rules,
)

# --- recorded layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [STRICT, FIRST, MEAN])
@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("kind", ["sub-parameters", "segments"])
def test_a_parameter_whose_cut_is_recorded_on_both_sides_is_not_taken_for_replicated(
    kind: str, degree: int, policy: str
) -> None:
    def recorded(tp: int) -> ParamAffineMap:
        if kind == "segments":  # the last four rows are whole on every rank
            return segmented_map((12, 2), [(8, False), (4, True)], 0, tp, [[8 // tp] * tp])
        return sub_param_map((12, 2), [4, 4, 4], [[4 // tp] * tp] * 3, 0)

    name, whole = "h.0.attn.c_attn.weight", numbered(12, 2)
    saved = [recorded(2).extract(whole, rank) for rank in range(2)]
    live = [recorded(degree).extract(whole, rank) for rank in range(degree)]
    said = {"layout": layout_of_affine(recorded(degree).to_dict())} if degree > 1 else {}
    found = check(name, saved, live, policy=policy, said=said, info=affine(name, recorded(2)))
    assert not found.replicas
    assert "recorded layouts (1)" in found.notes[0]
    assert [second[0] for _, second in found.overlaps.get(name, ())] == ([1] if kind == "segments" else [])


def test_a_recorded_layout_goes_before_the_shapes_and_the_users_rule_before_it() -> None:
    name, whole = "m.weight", numbered(8, 2)
    info = affine(name, sub_param_map((8, 2), [4, 4], [[2, 2], [2, 2]], 0))
    saved = merged_halves(whole, 2)
    check(name, saved, [whole], info=info)
    check(name, saved, [torch.cat(saved)], info=info, book=rules(name, kind="column"))
    live = TPLayout((8, 2), 0, (((4, 8),), ((0, 4),)))
    check(name, [whole], [whole[4:], whole[:4]], said={"layout": live})
    check(name, [whole], [whole[:4], whole[4:]], said={"layout": live}, book=rules(name, kind="column"))


def test_columns_of_a_recorded_layout_are_cut_where_the_shapes_alone_leave_it_open() -> None:
    name, whole = "c_proj.weight", numbered(4, 6)
    recorded = contiguous_split_map((4, 6), [2, 4], 1)
    saved = [recorded.extract(whole, rank) for rank in range(2)]
    check(name, saved, [whole], info=affine(name, recorded))


def test_uneven_widths_that_a_checkpoint_records_are_followed() -> None:
    name, whole = "attn.weight", numbered(20, 1)
    widths = [[4, 4, 2, 2], [1, 1, 1, 1], [1, 1, 1, 1]]
    saved = [sub_param_map((20, 1), [12, 4, 4], widths, 0).extract(whole, rank) for rank in range(4)]
    info = {
        "parameter_with_sub_params": [{"patterns": [name], "shape": [(12, 4, 4), -1], "partition_dim": 0}],
        "sub_param_shard_widths": {name: widths},
    }
    check(name, saved, [whole], info=info)


def test_a_recorded_layout_with_holes_or_of_other_shards_is_refused() -> None:
    name, shards = "m.weight", [numbered(2), numbered(4)]
    pieces = {0: [AffinePiece((2,), 0, (1,), 0, (1,), [0])], 1: [AffinePiece((4,), 4, (1,), 0, (1,), [1])]}
    holey = ParamAffineMap((8,), {0: (2,), 1: (4,)}, pieces)
    assert "holes" in str(refused(name, shards, [numbered(8)], info=affine(name, holey)).expected)
    other = affine(name, contiguous_split_map((6,), [3, 3], 0))
    assert "records a layout of 2 ranks for (6,)" in str(refused(name, shards, [numbered(6)], info=other).expected)


def test_what_the_run_could_not_describe_is_refused_with_its_own_words() -> None:
    info = {"autotp_unsupported_parameter_patterns": {"^m": "interleaved by hand"}}
    error = refused("m.weight", numbered(4, 2).chunk(2), [numbered(4, 2)], info=info)
    assert "interleaved by hand" in str(error.expected)


def test_what_cannot_be_understood_is_refused_unless_the_user_says_it() -> None:
    name, whole = "m.weight", numbered(4, 2)
    info = {"affine_map": {"version": 2}}
    assert "version 2" in str(refused(name, whole.chunk(2), [whole], info=info).expected)
    check(name, whole.chunk(2), [whole], info=info, book=rules(name, kind="column"))


# --- names ------------------------------------------------------------------------------------------------------


def sub_params(name: str) -> dict[str, Any]:
    return {"parameter_with_sub_params": [{"patterns": [f"^{name}"], "shape": [(4, 4), -1], "partition_dim": 0}]}


def test_what_the_checkpoint_declares_holds_for_renamed_and_tied_parameters() -> None:
    whole, live = numbered(8, 2), [numbered(8, 2)]
    metadata = checkpoint({"m.weight": merged_halves(whole, 2)}, info=sub_params("m"))
    renamed = rename_saved(metadata, [("^m", "module")])
    engine = ModelLayout(ties={"tied.weight": ("module.weight",)})
    for changed, name in ((renamed, "module.weight"), (adopt_live_names(renamed, engine), "tied.weight")):
        found = decided(changed, name, layout(live))
        assert torch.equal(arrives(found, name, merged_halves(whole, 2), whole), whole)
        assert "universal_checkpoint_info" in found.notes[0]


def test_a_parameter_that_was_called_fused_is_fused_under_any_name() -> None:
    metadata = checkpoint({"query_key_value.weight": numbered(12, 2).chunk(2)})
    renamed = rename_saved(metadata, [("query_key_value", "plain")])
    with pytest.raises(MismatchError, match="made of several"):
        decided(renamed, "plain.weight", layout([numbered(12, 2)]))


@pytest.mark.parametrize("said_of", ["m.weight", "module.weight"])
def test_the_users_rules_may_use_either_name_and_a_preset_the_saved_one(said_of: str) -> None:
    whole = numbered(8, 2)
    metadata = rename_saved(checkpoint({"m.weight": merged_halves(whole, 2)}), [("^m", "module")])
    rule = {"kind": "column", "sub_parameters": [1, 1]}
    found = decided(metadata, "module.weight", layout([whole]), 0, rules(said_of, **rule))
    assert torch.equal(arrives(found, "module.weight", merged_halves(whole, 2), whole), whole)
    found = decided(metadata, "module.weight", layout([whole]), 0, preset(said_of, **rule))
    assert ('preset "mine"' in found.notes[0]) == (said_of == "m.weight")


# --- fused parameters, and others of which shapes do not tell ---------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "0.attention.query_key_value.weight", "attn.qkv_proj.weight", "mlp.gate_up_proj.weight", "W_pack.weight",
        "attn.c_attn.weight", "mlp.w12.weight", "in_proj.weight", "kv_proj.weight", "conv1d.weight", "m.fc1_weight",
    ],
)  # fmt: skip
def test_a_fused_parameter_is_refused_with_the_choices_unless_somebody_says_how(name: str) -> None:
    whole = numbered(24, 8)
    for said in ({}, {"dim": 0}):  # a partition_dim says nothing about the parts
        error = refused(name, whole.chunk(2), [whole], said=said)
        assert "made of several" in error.problem
        assert error.found == "none of these; 2 x (12, 8) in the checkpoint, 1 x (24, 8) in the live model"
        assert '"kind": "column"}' in str(error.remedy)
        assert '"sub_parameters": "<relative widths>"}' in str(error.remedy)
    check(name, merged_halves(whole, 2), [whole], said={"dim": 0, "stride": 2})
    check(name, merged_halves(whole, 2), [whole], book=rules(name, kind="column", sub_parameters=[1, 1]))
    check(name, whole.chunk(2), [whole], book=rules(name, kind="column"))


@pytest.mark.parametrize("name", ["mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.conv1d.bias"])
def test_mambas_parts_are_refused_even_with_the_preset_of_megatron_core(name: str) -> None:
    name, whole = f"decoder.layers.0.{name}", numbered(24, 2)
    said = {"dim": 0, "stride": 1, "owner": "megatron.core"}
    for book in (
        ShardingRules(preset=Preset.load("megatron-core")),
        ShardingRules(builtin=Preset.load("megatron-core")),
    ):
        assert "it is not known how" in refused(name, whole.chunk(2), [whole], book, said=said).problem


def test_partition_dim_says_all_of_what_megatron_core_interleaves_and_only_of_that() -> None:
    whole, name = numbered(24, 2), "decoder.layers.0.self_attention.linear_qkv.weight"
    check(name, whole.chunk(2), [whole], said={"dim": 0, "owner": "megatron.core"})
    refused(name, whole.chunk(2), [whole], said={"dim": 0, "owner": "elsewhere"})
    other = "decoder.layers.0.mlp.linear_fc1.weight"
    refused(other, whole.chunk(2), [whole], said={"dim": 0, "owner": "megatron.core"})


@pytest.mark.parametrize(("wide", "narrow"), [("h_to_4h", "4h_to_h"), ("linear_fc1", "linear_fc2")])
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_of_a_widening_layer_its_counterpart_tells_whether_a_gate_is_fused_into_it(
    wide: str, narrow: str, what: str
) -> None:
    name, whole = f"0.mlp.{wide}.{what}", numbered(16, *([4] if what == "weight" else []))
    for columns, is_gated in ((16, False), (8, True)):
        metadata = checkpoint({name: whole.chunk(2), f"0.mlp.{narrow}.weight": numbered(4, columns).chunk(2, dim=1)})
        if is_gated:
            with pytest.raises(MismatchError, match="made of several"):
                decided(metadata, name, layout([whole]))
        else:
            found = decided(metadata, name, layout([whole]))
            assert torch.equal(arrives(found, name, whole.chunk(2), whole), whole)


@pytest.mark.parametrize(
    ("columns", "parts", "why"),
    [
        (8, None, "so a gate is fused into it"),
        (16, [1, 1], "so nothing is fused into it"),
        (8, [1, 1], None),
        (16, None, None),
        (5, None, None),
    ],
)
def test_a_preset_is_held_against_the_counterpart_of_a_widening_layer(
    columns: int, parts: list[int] | None, why: str | None
) -> None:
    name, whole = "0.mlp.dense_h_to_4h.weight", numbered(16, 4)
    metadata = checkpoint({name: whole.chunk(2), "0.mlp.dense_4h_to_h.weight": [numbered(4, columns)]})
    rule = {"kind": "column", "sub_parameters": parts}
    if why is None:
        decided(metadata, name, layout([whole]), 0, preset(name, **rule))
    else:
        with pytest.raises(MismatchError, match="contradict") as caught:
            decided(metadata, name, layout([whole]), 0, preset(name, **rule))
        assert str(caught.value.expected).endswith(why)
        assert 'the preset "mine"' in str(caught.value.expected)
    decided(metadata, name, layout([whole]), 0, rules(name, **rule))  # the user may know better


@pytest.mark.parametrize(
    ("rows", "run", "is_refused"),
    [
        (16, {}, True),
        (24, {}, False),
        (16, {"num_key_value_heads": 2}, False),
        (16, {"num_attention_heads": 4, "kv_channels": 4, "hidden_size": 8}, False),
        (16, {"num_attention_heads": 4, "kv_channels": 2, "hidden_size": 8}, True),
    ],
)
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_fewer_key_value_heads_contradict_a_plain_cut(
    rows: int, run: dict[str, int], is_refused: bool, what: str
) -> None:
    name, weight = f"attention.query_key_value.{what}", numbered(rows, 8)
    whole = weight if what == "weight" else numbered(rows)
    metadata = checkpoint({"attention.query_key_value.weight": weight.chunk(2), name: whole.chunk(2)}, run=run)
    if is_refused:
        with pytest.raises(MismatchError, match="key-value heads are fewer"):
            decided(metadata, name, layout([whole]), 0, preset(name, kind="column"))
    else:
        decided(metadata, name, layout([whole]), 0, preset(name, kind="column"))


def test_shapes_that_leave_two_dimensions_or_none_are_refused() -> None:
    error = refused("m.weight", [numbered(2, 3)] * 2, [numbered(5, 3)])
    assert "made of several" not in error.problem
    assert [kind in str(error.remedy) for kind in ("column", "row", "vocabulary", "replicated")] == [True] * 4
    refused("m.weight", [numbered(4, 3)], [numbered(2, 3), numbered(3, 2)])
    refused("m.weight", [numbered(4)], [numbered(2, 1)] * 2)


def test_without_a_layout_of_the_live_side_nothing_is_decided() -> None:
    metadata, engine = checkpoint({"m.weight": [numbered(2, 3)] * 2}), ModelLayout()
    with pytest.raises(MismatchError, match="it is not known how"):
        resolve(metadata, engine, ["m.weight"], ShardingRules(), STRICT)
    assert not resolve(
        metadata, replace(engine, coordinates=RankCoordinates(tp=2)), ["m.weight"], ShardingRules(), STRICT
    ).transfers


@pytest.mark.parametrize("said", [{}, {"dim": 0}])
def test_a_name_that_tells_nothing_does_not_hide_a_gate(said: dict[str, Any]) -> None:
    up, down = numbered(16, 4), numbered(4, 8)
    for shards in ([up], list(up.chunk(2))):
        metadata = checkpoint(
            {"0.mlp.first.weight": shards, "0.mlp.second.weight": list(down.chunk(len(shards), dim=1))}
        )
        live = [up] if len(shards) == 2 else list(up.chunk(2))
        with pytest.raises(MismatchError, match="made of several"):
            decided(metadata, "0.mlp.first.weight", layout(live, **said))


@pytest.mark.parametrize("name", ["mlp.gate_up.weight", "mlp.w12.weight", "mlp.linear_fc1.weight"])
def test_a_gate_is_never_offered_the_widths_of_query_key_and_value(name: str) -> None:
    whole = numbered(16, 4)
    metadata = checkpoint({name: whole.chunk(2), "mlp.down.weight": list(numbered(4, 8).chunk(2, dim=1))})
    with pytest.raises(MismatchError, match="made of several") as caught:
        decided(metadata, name, layout([whole]))
    rules_of = [way.config["tp_rules"][0] for way in caught.value.remedies if "tp_rules" in way.config]
    assert [rule.get("sub_parameters") for rule in rules_of] == [None, [1, 1]]


@pytest.mark.parametrize(
    ("name", "saved", "live"),
    [
        ("attn.qkv_proj.weight", [numbered(12, 8)] * 2, [numbered(24, 8)]),
        ("m.weight", [numbered(2, 3)] * 2, [numbered(5, 3)]),
        ("m.weight", [numbered(2)] * 2, [numbered(3)]),
    ],
)
def test_of_rules_of_which_one_is_true_each_says_when(
    name: str, saved: list[torch.Tensor], live: list[torch.Tensor]
) -> None:
    """A program that follows the others would load wrong values."""
    when = [way.when for way in refused(name, saved, live).remedies]
    assert len(when) > 1 and all(when) and len(set(when)) == len(when)


def test_widths_of_query_key_and_value_are_told_by_the_layer_behind() -> None:
    name, whole = "attn.qkv_proj.weight", numbered(24, 16)  # 16 of queries, 4 of keys, 4 of values
    metadata = checkpoint({name: whole.chunk(2), "attn.o_proj.weight": numbered(16, 16).chunk(2, dim=1)})
    with pytest.raises(MismatchError, match="made of several") as refused_one:
        decided(metadata, name, layout([whole]))
    assert '"sub_parameters": [4, 1, 1]}' in str(refused_one.value.remedy)
    with pytest.raises(MismatchError, match=r"as wide as \[4, 1, 1\]"):
        decided(metadata, name, layout([whole]), 0, rules(name, kind="column", sub_parameters=[1, 1, 1]))


def test_buffers_that_differ_between_live_ranks_are_no_copies_of_a_saved_one() -> None:
    start = numbered(1)
    metadata = checkpoint({"embed.start": [start]})
    same = replace(layout([start, start]), values=(7, 7))
    assert torch.equal(arrives(decided(metadata, "embed.start", same), "embed.start", [start], start), start)
    with pytest.raises(MismatchError, match="it is not known how"):
        decided(metadata, "embed.start", replace(same, values=(7, 8)))

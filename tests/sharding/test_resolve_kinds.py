"""Vocabularies, parameters that every rank holds whole, and what is said against what is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import LiveShards, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.core.strided import TPLayout
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.sharding.resolve import FIRST, MEAN, STRICT, resolve
from elastic_ckpt.sharding.rules import Preset, ShardingRules
from elastic_ckpt.sharding.specs import Sharding, Shardings
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

NAME = "m.weight"

# --- vocabularies -----------------------------------------------------------------------------------------------

WORDS = "word_embeddings.weight"


def padded(whole: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows that the checkpoint does not hold are NaN."""
    return torch.cat([whole, torch.full((rows - len(whole), *whole.shape[1:]), torch.nan)])


def test_rows_of_padding_that_the_checkpoint_lacks_are_left_alone() -> None:
    saved, name = numbered(10, 2), WORDS
    for book, info in (
        (rules(name, kind="vocabulary"), None),
        (None, {"vocabulary_parameter_patterns": [name]}),
        (preset(name, kind="vocabulary"), None),
    ):
        metadata = checkpoint({name: saved.chunk(2)}, info=info)
        live = padded(saved, 12).chunk(3)
        for rank, expected in enumerate(live):
            found = decided(metadata, name, layout(live), rank, book)
            got = arrives(found, name, saved.chunk(2), expected)
            assert torch.equal(got.nan_to_num(-1), expected.nan_to_num(-1))
        assert found.transfers[name, ""].missing == (FlatRange(4, 8),)
        assert found.notes[1:] == (
            f"rows of vocabulary padding that the checkpoint lacks keep the live values: {name}",
        )


@pytest.mark.parametrize(("real", "live", "fits"), [(9, 10, True), (10, 10, True), (11, 10, False), (None, 10, False)])
def test_rows_are_dropped_only_where_they_are_known_to_be_padding(real: int | None, live: int, fits: bool) -> None:
    saved = numbered(12, 2)
    info = {"vocabulary_parameter_patterns": [WORDS], "original_vocab_size": real}
    said: list[tuple[ShardingRules | None, dict[str, Any]]] = [
        (rules(WORDS, kind="vocabulary", vocabulary=real), {}),
        (None, {"info": info}),
    ]
    for book, more in said:
        if fits:
            check(WORDS, saved.chunk(3), saved[:live].chunk(2), book=book, **more)
            continue
        error = refused(WORDS, saved.chunk(3), saved[:live].chunk(2), book, **more)
        assert error.problem == "the live vocabulary has fewer rows than the saved one"
        assert str(error.expected) == "10 rows"
        assert str(error.found).startswith("12 rows")
        known = "of which 11 are no padding" if real else "nothing says which of them are padding"
        assert known in str(error.found)
        assert f'"vocabulary": {real or 10}' in str(error.remedy)


def test_a_rules_own_number_of_tokens_goes_before_that_of_the_checkpoint() -> None:
    saved, info = numbered(12, 2), {"original_vocab_size": 11}
    check(WORDS, saved.chunk(3), saved[:10].chunk(2), info=info, book=rules(WORDS, kind="vocabulary", vocabulary=9))
    refused(WORDS, saved.chunk(3), saved[:10].chunk(2), rules(WORDS, kind="vocabulary"), info=info)


def test_more_rows_or_columns_than_saved_are_no_padding_of_any_other_parameter() -> None:
    for kind, saved, live in (("column", (4, 3), (6, 3)), ("row", (3, 4), (3, 6)), ("vocabulary", (4, 3), (6, 4))):
        dim = int(kind == "row")
        shards = [numbered(*saved).chunk(2, dim), numbered(*live).chunk(3, dim)]
        error = refused(NAME, shards[0], shards[1], rules(NAME, kind=kind))
        assert str(error.expected).startswith(f'{kind}, according to your "tp_rules": the whole parameter would be')
        assert f"{saved} in the checkpoint and {live} in the live model" in str(error.expected)
        found = f"2 x {tuple(shards[0][0].shape)} in the checkpoint, 3 x {tuple(shards[1][0].shape)} in the live model"
        assert error.found == found
    assert '"kind": "vocabulary"' in str(
        refused(NAME, numbered(4).chunk(2), [numbered(6)], rules(NAME, kind="column")).remedy
    )


@pytest.mark.parametrize("name", ["word_embeddings.weight", "wte.weight", "lm_head.weight", "m.output_layer.weight"])
def test_as_many_rows_on_each_rank_as_on_one_may_be_a_padded_vocabulary(name: str) -> None:
    same = numbered(8, 2)
    refused(name, [same], [same, same])
    check(name, [same], [same, same], book=rules(name, kind="replicated"))
    check(name, [same, same], [same])  # several ranks that saved as much as one holds now have no such doubt


@pytest.mark.parametrize(
    "name", ["position_embeddings.weight", "wpe.weight", "token_type_embeddings.weight", "norm.weight"]
)
def test_equal_shapes_of_other_names_are_replicated(name: str) -> None:
    same = numbered(8, 2)
    assert not check(name, [same], [same, same]).replicas
    found = check(name, [same] * 2, [same] * 4)
    assert found.replicas == {name}
    assert found.notes == (
        "tensor-parallel layout of parameters according to: the shapes (1)",
        f"only their shapes show how these are sharded: {name}",
    )


def test_a_cut_along_rows_is_a_vocabulary_once_anybody_knows_that() -> None:
    saved, live = numbered(10, 2), padded(numbered(10, 2), 12).chunk(3)
    said = {"dim": 0, "owner": "megatron.core"}
    builtin = ShardingRules(builtin=preset(WORDS, kind="vocabulary").preset)
    found = decided(checkpoint({WORDS: saved.chunk(2)}), WORDS, layout(live, **said), 2, builtin)
    assert found.transfers[WORDS, ""].missing
    refused(WORDS, saved.chunk(2), live, builtin, said={"dim": 0, "owner": "elsewhere"})  # a preset for others' models


# --- who says what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"kind": "row"}, {"dim": 0}),
        ({"kind": "column"}, {"dim": -1}),
        ({"kind": "replicated"}, {"dim": 0}),
        ({"kind": "column", "sub_parameters": [2, 1]}, {"dim": 0, "stride": 2}),
    ],
)  # fmt: skip
def test_a_preset_and_a_live_parameter_that_disagree_are_both_shown(rule: dict[str, Any], said: dict[str, Any]) -> None:
    whole = numbered(12, 12)
    error = refused(NAME, whole.chunk(2), [whole], preset(NAME, **rule), said=said)
    live = "not tensor_model_parallel" if said["dim"] < 0 else f"partition_dim {said['dim']}"
    assert f'{rule["kind"]}, according to the preset "mine": but ' in str(error.expected)
    assert live in str(error.expected)


def test_the_users_rule_is_not_held_against_others() -> None:
    whole = numbered(12, 12)
    check(NAME, whole.chunk(2), [whole], book=rules(NAME, kind="column"), said={"dim": 1})
    book = ShardingRules(rules(NAME, kind="column").rules, preset(NAME, kind="row").preset)
    check(NAME, whole.chunk(2), [whole], book=book)


def test_what_agrees_is_no_contradiction() -> None:
    whole = numbered(12, 2)
    check(
        NAME, merged_halves(whole, 2), [whole], book=preset(NAME, kind="column", sub_parameters=[1, 1]), said={"dim": 0}
    )
    check(NAME, [whole, whole], [whole], book=preset(NAME, kind="averaged"), said={"dim": -1})
    check(NAME, whole.chunk(2), [whole], book=preset(NAME, kind="vocabulary"), said={"dim": 0})


def test_the_checkpoint_goes_before_the_preset_and_the_first_user_rule_before_the_second() -> None:
    whole, halves = numbered(8, 2), {"parameter_with_2_sub_params_cat_dim_0": [NAME]}
    check(NAME, merged_halves(whole, 2), [whole], info=halves, book=preset(NAME, kind="column"))
    two = ShardingRules((*rules(NAME, kind="column", sub_parameters=[1, 1]).rules, *rules(NAME, kind="row").rules))
    check(NAME, merged_halves(whole, 2), [whole], book=two)


def test_a_rule_is_for_whole_names_and_for_runs_with_its_arguments() -> None:
    whole = numbered(8, 8)
    error = refused(NAME, whole.chunk(2), [numbered(5, 8)], rules("weight", kind="vocabulary", vocabulary=5))
    assert "none of these" in str(error.found)
    book = ShardingRules(preset=Preset(name="mine", description="", rules=[
        ShardSpec(pattern=".*", kind="column", sub_parameters=[1, 1], when={"swiglu": [True]}),
        ShardSpec(pattern=".*", kind="column"),
    ]))  # fmt: skip
    check(NAME, merged_halves(whole, 2), [whole], book=book, run={"swiglu": True})
    for run in ({}, {"swiglu": False}):
        check(NAME, whole.chunk(2), [whole], book=book, run=run)


def test_what_a_preset_leaves_open_is_refused_with_its_reason_unless_somebody_knows() -> None:
    whole, book = numbered(8, 2), preset(NAME, kind="whole_only", ambiguous="swiglu decides")
    error = refused(NAME, whole.chunk(2), [whole], book)
    assert str(error.found).startswith('the preset "mine": swiglu decides; 2 x (4, 2)')
    check(NAME, whole.chunk(2), [whole], book=book, said={"dim": 0})
    recorded = contiguous_split_map((8, 2), [4, 4], 0)
    check(NAME, whole.chunk(2), [whole], book=book, info=affine(NAME, recorded))


def test_a_declaration_without_widths_is_refused() -> None:
    info = {"parameter_with_sub_params": [{"patterns": [NAME], "shape": [(4, 0), -1], "partition_dim": 0}]}
    error = refused(NAME, numbered(8, 2).chunk(2), [numbered(8, 2)], info=info)
    assert "sub-parameters of the widths (4, 0), which say nothing" in str(error.found)


# --- whole on every rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "policy"), [("replicated", MEAN), ("averaged", STRICT), ("averaged", FIRST)])
def test_the_mean_is_taken_where_a_rule_or_the_policy_says_so(kind: str, policy: str) -> None:
    copies = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    mean = torch.tensor([2.0, 4.0])
    found = check(NAME, copies, [mean] * 4, book=rules(NAME, kind=kind), policy=policy)
    assert found.replicas == {NAME}
    assert found.averaged == ({NAME} if kind == "averaged" else set())


@pytest.mark.parametrize("policy", [STRICT, FIRST])
def test_otherwise_the_first_ranks_copy_is_taken(policy: str) -> None:
    copies = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    found = check(NAME, copies, [copies[0]], book=rules(NAME, kind="replicated"), policy=policy)
    assert found.replicas == {NAME}
    assert not found.averaged
    assert not check(NAME, copies[:1], [copies[0]] * 3, book=rules(NAME, kind="averaged")).replicas


def test_numbers_that_are_no_fractions_are_not_averaged() -> None:
    ids = torch.tensor([3, 5])
    metadata = checkpoint({NAME: [ids, ids]}, key=BUFFER)
    for kind in ("replicated", "averaged"):
        found = decided(metadata, NAME, layout([ids]), 0, rules(NAME, kind=kind), MEAN)
        assert found.transfers[NAME, ""].scale is None


@pytest.mark.parametrize("key", [MASTER, FROZEN])
@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (2, 4), (4, 3)])
def test_a_summed_value_is_shared_out_and_its_moments_are_copied(source: int, target: int, key: str) -> None:
    shares = [torch.tensor([1.0, 2.0, 3.0]) * (rank + 1) for rank in range(source)]
    book = rules(NAME, kind="summed")
    for rank in range(target):
        found = decided(checkpoint({NAME: shares}, key=key), NAME, layout([shares[0]] * target), rank, book)
        got = arrives(found, NAME, shares, shares[0], key)
        assert torch.allclose(got, torch.stack(shares).sum(0) / target)
        assert torch.equal(arrives(found, NAME, shares, shares[0], "exp_avg"), shares[0])
        assert not found.replicas


def test_what_is_summed_cannot_be_cut_and_what_is_whole_has_one_shape() -> None:
    cut = LiveShards(((2,), (2,)), layout=TPLayout((4,), 0, (((0, 2),), ((2, 4),))))
    for kind in ("summed", "replicated"):
        metadata = checkpoint({NAME: [numbered(4)] * 4}, info=None)
        if kind == "summed":
            with pytest.raises(MismatchError, match="contradict"):
                decided(metadata, NAME, cut, 0, preset(NAME, kind=kind))
        else:
            found = decided(metadata, NAME, cut, 1, preset(NAME, kind=kind))
            assert torch.equal(arrives(found, NAME, [numbered(4)] * 4, numbered(2)), numbered(4)[2:])
    refused(NAME, [numbered(4)] * 2, [numbered(8)], rules(NAME, kind="replicated"))
    refused(NAME, [numbered(4), numbered(5)], [numbered(4)], rules(NAME, kind="replicated"))


@pytest.mark.parametrize("policy", [STRICT, MEAN])
def test_a_recorded_copy_on_every_rank_is_replicated_or_averaged(policy: str) -> None:
    copies, info = [numbered(4), numbered(4) + 2], affine(NAME, replicated_map((4,), 2))
    wanted = numbered(4) + 1 if policy == MEAN else numbered(4)
    assert check(NAME, copies, [wanted], info=info, policy=policy).replicas == {NAME}
    info["parameter_to_average_patterns"] = [re.escape(NAME)]
    found = check(NAME, copies, [numbered(4) + 1], info=info, policy=policy)
    assert found.averaged == {NAME}


def test_of_the_same_degree_nothing_has_to_be_known() -> None:
    shards = [numbered(4, 2)] * 2
    name = "query_key_value.weight"
    found = decided(checkpoint({name: shards}, info={"affine_map": {"version": 9}}), name, layout(shards, dim=1))
    assert (found.transfers, found.notes) == ({}, ())


# --- universal checkpoints --------------------------------------------------------------------------------------


def universal(name: str, shards: Sequence[torch.Tensor], info: Any = None) -> Any:
    """What two tensor-parallel ranks saved and the converter merged: whole, or concatenated and divided again."""
    metadata = checkpoint({name: shards}, info=info)
    return replace(metadata, source=replace(metadata.source, format="universal", by_rank=False, merged_from=2))


FUSED = "mlp.gate_up.weight"
HALVES = {"parameter_with_2_sub_params_cat_dim_0": [FUSED]}


@pytest.mark.parametrize("degree", [1, 4])
def test_a_fused_parameter_whose_shards_the_converter_concatenated_is_resharded_and_reported(degree: int) -> None:
    whole = numbered(8, 2)
    shards, live = merged_halves(whole, 2), merged_halves(whole, degree)
    book = preset(FUSED, kind="column", sub_parameters=[1, 1])
    for rank, expected in enumerate(live):
        found = decided(universal(FUSED, shards), FUSED, layout(live), rank, book)
        assert torch.equal(arrives(found, FUSED, shards, expected), expected)
        assert any(f"divided again: {FUSED}" in note for note in found.notes)
    with pytest.raises(MismatchError, match="it is not known how"):
        decided(universal(FUSED, shards), FUSED, layout(live))
    assert decided(universal(FUSED, shards), FUSED, layout(shards)).transfers == {}  # the shards that were saved


@pytest.mark.parametrize("degree", [1, 2])
def test_a_fused_parameter_of_which_the_converter_knew_is_whole(degree: int) -> None:
    whole = numbered(8, 2)
    live, book = layout(merged_halves(whole, degree)), preset(FUSED, kind="column", sub_parameters=[1, 1])
    for info in (HALVES, affine(FUSED, contiguous_split_map((8, 2), [4, 4], 0))):
        for rank, expected in enumerate(merged_halves(whole, degree)):
            found = decided(universal(FUSED, [whole], info), FUSED, live, rank, book)
            assert torch.equal(arrives(found, FUSED, [whole], expected), expected)


def test_what_is_interleaved_the_converter_merges_right() -> None:
    whole = numbered(8, 2)
    shards, book = whole.chunk(2), preset(FUSED, kind="column")
    found = decided(universal(FUSED, shards), FUSED, layout([whole]), 0, book)
    assert torch.equal(arrives(found, FUSED, shards, whole), whole) and "divided" not in str(found.notes)


def test_copies_that_the_converter_concatenated_are_copies_again() -> None:
    copy = numbered(4, 2)
    found = decided(universal("position.weight", [copy, copy]), "position.weight", layout([copy]))
    assert torch.equal(arrives(found, "position.weight", [copy, copy], copy), copy)
    assert found.replicas == {"position.weight"} and "divided again: position.weight" in str(found.notes)


def test_the_padding_that_the_converter_has_stripped_is_left_alone() -> None:
    whole, book = numbered(10, 2), preset(WORDS, kind="vocabulary")
    for degree, gaps in ((1, (FlatRange(20, 24),)), (2, (FlatRange(8, 12),))):
        found = decided(universal(WORDS, [whole]), WORDS, layout(numbered(12, 2).chunk(degree)), degree - 1, book)
        assert found.transfers[WORDS, ""].missing == gaps
    assert not decided(universal(WORDS, [whole]), WORDS, layout([whole]), 0, book).transfers


def test_shards_are_compared_with_their_counterpart_too() -> None:
    name, whole = "mlp.dense_h_to_4h.weight", numbered(8, 2)
    metadata = universal(name, whole.chunk(2))
    counterpart = checkpoint({"mlp.dense_4h_to_h.weight": [numbered(2, 4)]}).tensors
    metadata = replace(metadata, tensors={**metadata.tensors, **counterpart})
    with pytest.raises(MismatchError, match="a gate is fused into it"):
        decided(metadata, name, layout([whole]), 0, preset(name, kind="column"))


@pytest.mark.parametrize("name", [FUSED, "mlp.proj.weight"])
@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("who", ["user", "preset", "stride"])
def test_whoever_knows_of_parts_settles_it(name: str, degree: int, who: str) -> None:
    whole, book = numbered(8, 2), None
    shards, live = merged_halves(whole, 2), merged_halves(whole, degree)
    said: dict[str, Any] = {}
    if who == "stride":
        said = {"dim": 0, "stride": 2}
    else:
        book = {"user": rules, "preset": preset}[who](name, kind="column", sub_parameters=[1, 1])
    for rank, expected in enumerate(live):
        found = decided(universal(name, shards), name, layout(live, **said), rank, book)
        assert torch.equal(arrives(found, name, shards, expected), expected)


# --- code bases that the arguments of their runs prove ------------------------------------------------------------

QKV = "2.self_attention.query_key_value.weight"
OLD = {"padded_vocab_size": 64, "moe_expert_parallel_size": 1, "num_attention_heads": 4}
NEW = {**OLD, "ds_sequence_parallel_fpdt": False}
BIGSCIENCE = {"padded_vocab_size": 64, "codecarbon_dir": None, "num_attention_heads": 4}


@pytest.mark.parametrize(("run", "parts"), [(OLD, 1), (NEW, 3), (BIGSCIENCE, 1)], ids=["old", "new", "bigscience"])
def test_the_arguments_of_the_run_prove_how_its_code_arranges_query_key_and_value(
    run: dict[str, Any], parts: int
) -> None:
    whole = numbered(24, 8)
    shards = [torch.cat([part.chunk(2)[rank] for part in whole.chunk(parts)]) for rank in range(2)]
    metadata = checkpoint({QKV: shards, "2.self_attention.dense.weight": [numbered(8, 4)] * 2}, run=run)
    found = decided(metadata, QKV, layout([whole]))
    assert torch.equal(arrives(found, QKV, shards, whole), whole)
    assert "by the checkpoint's args with" in " ".join(found.notes)
    with pytest.raises(MismatchError, match="it is not known how") as caught:
        decided(replace(metadata, run={}), QKV, layout([whole]))
    assert '"tp_preset": "megatron-deepspeed-contiguous"' in str(caught.value.remedy)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_live_code_that_arranges_them_in_another_way_is_refused_at_every_degree(degree: int) -> None:
    shards = numbered(24, 8).chunk(2)
    metadata = checkpoint({QKV: shards}, run=OLD)
    model = ModelLayout(RankCoordinates(tp=degree), {QKV: layout(numbered(24, 8).chunk(degree))}, run=NEW)
    with pytest.raises(MismatchError, match="arranges this parameter in another way") as caught:
        resolve(metadata, model, [QKV], ShardingRules(), "strict")
    assert caught.value.parameter == QKV and "ds_sequence_parallel_fpdt" in str(caught.value.expected)
    for book in (rules(QKV, kind="column"), preset(QKV, kind="column")):
        resolve(metadata, model, [QKV], book, "strict")
    resolve(metadata, replace(model, run=OLD), [QKV], ShardingRules(), "strict")


def test_a_vocabulary_is_never_taken_for_a_fused_parameter() -> None:
    """In a module with position embeddings, its rows look as if something were fused with them."""
    name = "0.word_embeddings.weight"
    others = {"0.position_embeddings.weight": [numbered(4, 4)], "0.x.weight": [numbered(4, 8)]}
    metadata = checkpoint({name: numbered(16, 4).chunk(2), **others})
    with pytest.raises(MismatchError) as caught:
        decided(metadata, name, layout([numbered(20, 4)]))
    assert '"kind": "vocabulary"' in str(caught.value.remedy) and "sub_parameters" not in str(caught.value.remedy)


@pytest.mark.parametrize(("saved", "is_padding_possible"), [((4, 64), True), ((4, 32), False)])
def test_models_of_different_sizes_on_one_tensor_parallel_rank_are_named_as_such(
    saved: tuple[int, ...], is_padding_possible: bool
) -> None:
    metadata = checkpoint({"gate": [torch.zeros(saved)]})
    tensor, live = metadata.tensors["gate", MASTER], LiveShards(((8, 64),))
    error = Sharding(Shardings(metadata, ShardingRules()), tensor, live).contradiction("differs", is_recorded=True)
    assert "the shape of this parameter differs" in str(error) and "(8, 64) in the live model" in str(error)
    assert ('"kind": "vocabulary"' in str(error)) == is_padding_possible

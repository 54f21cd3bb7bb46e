"""The user's renames: what becomes of every saved name, and of what hangs on it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.fqn import RenameRules, rename, rename_saved
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.core.names import WHOLES, names_in
from tests.simulation import TWO, live, names_of, saved

# --- renames of the user's --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], "model.layer.1.weight"),
        ([("layer", "block")], "model.block.1.weight"),
        ([(r"^model\.", "")], "layer.1.weight"),
        ([(r"layer\.(\d+)", r"blocks.\1.inner")], "model.blocks.1.inner.weight"),
        ([(r"layer\.(?P<number>\d+)", r"\g<number>")], "model.1.weight"),
        ([("l", "L")], "modeL.Layer.1.weight"),
        ([("nothing", "x"), ("weight$", "kernel")], "model.layer.1.kernel"),
        ([("layer", "block"), ("block", "stage"), ("model", "net")], "model.block.1.weight"),
        ([("$", ".main")], "model.layer.1.weight.main"),
        ([("LAYER", "block")], "model.layer.1.weight"),
        ([("layer", "layer"), ("layer", "block")], "model.layer.1.weight"),
    ],
)
def test_the_first_rule_found_in_a_name_is_applied_to_it_and_no_other(rules: RenameRules, expected: str) -> None:
    assert rename("model.layer.1.weight", rules) == expected


@given(
    st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=6, unique=True),
    st.lists(st.tuples(st.sampled_from(["a", "b", "^a", "b$", "(a|b)", r"\."]), st.text("xy", max_size=2)), max_size=3),
)
def test_every_saved_name_goes_by_its_first_rule_or_two_that_collide_are_refused(
    names: list[str], rules: list[tuple[str, str]]
) -> None:
    expected = []
    for name in names:
        fitting = [(pattern, new) for pattern, new in rules if re.compile(pattern).search(name)]
        expected.append(re.compile(fitting[0][0]).sub(fitting[0][1], name) if fitting else name)
    metadata = saved(dict.fromkeys(names, (1,)))
    if len(set(expected)) < len(expected):
        with pytest.raises(MismatchError, match="one name"):
            rename_saved(metadata, rules)
    else:
        renamed = rename_saved(metadata, rules)
        assert list(renamed.parameters) == expected
        for old, new in zip(names, expected, strict=True):
            assert renamed.parameters[new] == metadata.parameters[old]
            for key in (MASTER, "exp_avg", "exp_avg_sq"):
                assert renamed.tensors[new, key] == replace(metadata.tensors[old, key], name=new)


def test_buffers_frozen_weights_and_ties_are_renamed_too() -> None:
    metadata = saved({"old.weight": (3,)}, wholes={**WHOLES, ("old.mask", BUFFER): ((1,), "bool")})
    metadata = replace(metadata, aliases={"old.head": "old.weight"})
    renamed = rename_saved(metadata, [("^old", "new")])
    assert names_in(renamed) == {"new.weight", "new.bias", "new.mask", "mask", "new.head"}
    assert renamed.names(FROZEN) == ["new.bias"]
    assert renamed.names(BUFFER) == ["mask", "new.mask"]
    assert renamed.aliases == {"new.head": "new.weight"}


def test_a_catalog_without_rules_is_handed_on_as_it_is() -> None:
    metadata = saved(TWO)
    assert rename_saved(metadata, []) is metadata


@pytest.mark.parametrize(
    ("rules", "clash"),
    [
        ([("^[ab]", "c")], "c.weight"),
        ([("^a", "b")], "b.weight"),
        ([("^a.weight$", "mask")], "mask"),
        ([("^mask$", "b.weight")], "b.weight"),
        ([("^old", "a"), ("^a.weight", "a.bias")], "a.bias"),
        ([("^tied$", "a.weight")], "a.weight"),
    ],
)
def test_two_saved_names_that_become_one_are_refused_and_both_are_shown(rules: RenameRules, clash: str) -> None:
    metadata = replace(saved(TWO, wholes=WHOLES), aliases={"tied": "a.weight"})
    with pytest.raises(MismatchError, match="one name") as caught:
        rename_saved(metadata, rules)
    assert caught.value.parameter == clash
    found = str(caught.value.found).split(", ")
    assert len(found) == 2
    assert all(rename(name, rules) == clash for name in found)
    assert '"rename"' in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([("^(a|b)", "c")], "narrower"),
        ([("^old", "x"), ("^mask$", "b.weight")], "a parameter of that name"),
        ([("^tied$", "a.weight")], "leaves the rule out: each name"),
        ([("^old", "x"), ("^a.weight$", "tied")], "leaves the rule out: each name"),
        ([("^(a.weight|tied)$", "x")], "leaves the rule out: each name"),
    ],
)
def test_a_narrower_pattern_is_the_remedy_only_where_one_can_help(rules: RenameRules, says: str) -> None:
    metadata = replace(saved(TWO, wholes=WHOLES), aliases={"tied": "a.weight"})
    with pytest.raises(MismatchError, match="one name") as caught:
        rename_saved(metadata, rules)
    (remedy,) = caught.value.remedies
    assert says in str(remedy) and remedy.is_data == (says != "narrower")
    if remedy.is_data:
        assert rename_saved(metadata, remedy.config["rename"]).parameters.keys() == metadata.parameters.keys()


def test_names_that_change_places_do_not_collide() -> None:
    metadata = saved({"a": (2,), "b": (3,)})
    renamed = rename_saved(metadata, [("^a$", "b"), ("^b$", "a")])
    assert {name: parameter.shape for name, parameter in renamed.parameters.items()} == {"b": (2,), "a": (3,)}


def test_notes_count_the_names_of_every_rule_and_name_the_idle_ones() -> None:
    metadata = replace(saved({"a1": (1,), "a2": (1,), "b": (1,)}, wholes=WHOLES), notes=("before",))
    renamed = rename_saved(metadata, [("^nothing", "x"), ("^a", "c"), ("1$", "9"), ("mask", "cover")])
    assert renamed.notes[0] == "before"
    told = {
        pattern: note for note in renamed.notes[1:] for pattern in ("^nothing", "^a", "1$", "mask") if pattern in note
    }
    assert len(told) == len(renamed.notes) - 1 == 4
    assert "no name" in told["^nothing"]
    assert " 2 names" in told["^a"]
    assert "no name" in told["1$"], "an earlier rule took its only name"
    assert " 1 names" in told["mask"]


def test_a_plan_is_made_by_the_new_names() -> None:
    metadata = saved({"net.0.w": (2, 5), "net.1.w": (3,)}, wholes={("net.mask", BUFFER): ((2,), "int64")})
    engine = live({"body.0.w": (2, 5), "body.1.w": (3,)}, wholes={("body.mask", BUFFER): ((2,), "int64")})
    with pytest.raises(MismatchError) as caught:
        plan_load(metadata, engine, LoadOptions())
    assert '"rename"' in str(caught.value.remedy)
    plan = plan_load(metadata, engine, LoadOptions(ElasticConfig(rename=[(r"^net\.", "body.")])))
    assert names_of(plan, MASTER, "restored") == ("body.0.w", "body.1.w")
    assert names_of(plan, BUFFER, "restored") == ("body.mask",)
    assert plan.reads.items == plan_load(saved_as(metadata, "body."), engine, LoadOptions()).reads.items
    assert any("rename" in note for note in plan.notes)


def saved_as(metadata: CheckpointMetadata, prefix: str) -> CheckpointMetadata:
    """The same checkpoint as if it had been saved under the new names."""
    old = len("net.")
    return replace(
        metadata,
        parameters={prefix + name[old:]: parameter for name, parameter in metadata.parameters.items()},
        tensors={
            (prefix + name[old:], key): replace(tensor, name=prefix + name[old:])
            for (name, key), tensor in metadata.tensors.items()
        },
    )

"""What only the live model settles: the names of what is tied in it, and what is a buffer or a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import LiveShards, ModelLayout
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, DerivedTensors
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.planning.ties import adopt_live_kinds, adopt_live_names
from tests.core.names import WHOLES, names_in
from tests.simulation import TWO, live, names_of, saved

HEAD = ModelLayout(ties={"head": ("embedding",)})


def test_a_tied_parameter_is_found_under_another_of_its_live_names() -> None:
    engine = replace(live({"head": (2, 5)}), model=ModelLayout(ties={"head": ("embedding",)}))
    plan = plan_load(saved({"embedding": (2, 5)}), engine, LoadOptions())
    assert sum(copy.numel for copy in plan.reads.items) == 30
    assert {target.key for target in plan.reads.targets} >= {MASTER}
    assert any("embedding" in note and "head" in note for note in plan.notes)


#: What is saved under each name of a parameter that is tied now.
NAMES = [("embedding", "head"), ("head", "embedding", "decoder"), ("decoder", "embedding")]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("with_states", [True, False])
def test_names_that_are_tied_now_are_compared_in_each_load(
    names: tuple[str, ...], strict: bool, with_states: bool
) -> None:
    model = ModelLayout(ties={"head": ("embedding", "decoder")})
    engine = replace(live({"head": (2, 5)}), model=model)
    options = LoadOptions(strict=strict, optimizer_states=with_states)
    plan = plan_load(saved(dict.fromkeys(names, (2, 5))), engine, options)
    first = next(name for name in ("head", "embedding", "decoder") if name in names)
    keys = {MASTER, "exp_avg", "exp_avg_sq"} if with_states else {MASTER}
    found = [(check.names, check.key) for check in plan.replica_checks]
    assert sorted(found) == sorted(((first, name), key) for name in names if name != first for key in keys)
    assert names_of(plan, MASTER, "restored") == ("head",)
    assert all(check.numel == 10 and len(check.replicas) == 2 for check in plan.replica_checks)
    assert any("tied here, not in the checkpoint" in note for note in plan.notes)
    assert not [each for each in plan.outcomes if each.what == "ignored"]


def _of_another(change: str) -> Any:
    """A checkpoint whose head and embedding cannot be compared, by a ``change`` of the head."""
    metadata = saved({"embedding": (2, 5), "head": (5, 2) if change == "shape" else (2, 5)})
    if change == "scalars":
        head = replace(metadata.parameters["head"], scalars=(("step", 9.0),))
        return replace(metadata, parameters={**metadata.parameters, "head": head})
    tensors = {at: metadata.tensors[at] for at in metadata.tensors}
    if change == "states":
        del tensors["head", "exp_avg"]
    if change in ("dtype", "own shape"):
        at = "head", MASTER if change == "dtype" else "exp_avg"
        tensors[at] = replace(tensors[at], dtype="bfloat16", has_own_shape=change == "own shape")
    return replace(metadata, tensors=tensors)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", ["shape", "dtype", "scalars", "states", "own shape"])
def test_names_that_are_tied_now_and_cannot_be_compared_are_refused_unless_one_is_asked_for(
    change: str, strict: bool
) -> None:
    model = ModelLayout(ties={"embedding": ("head",)})
    engine = replace(live({"embedding": (2, 5)}), model=model)
    with pytest.raises(MismatchError, match="cannot be compared") as caught:
        plan_load(_of_another(change), engine, LoadOptions(strict=strict))
    (remedy,) = [each for each in caught.value.remedies if each.is_data]
    plan = plan_load(_of_another(change), engine, LoadOptions(ElasticConfig(**remedy.config), strict=strict))
    assert names_of(plan, MASTER, "restored") == names_of(plan, "exp_avg", "restored") == ("embedding",)
    assert [note for note in plan.notes if "left out are head" in note]


@pytest.mark.parametrize("change", ["scalars", "states", "own shape"])
def test_states_do_not_matter_to_a_load_of_weights(change: str) -> None:
    engine = replace(live({"embedding": (2, 5)}), model=ModelLayout(ties={"embedding": ("head",)}))
    plan = plan_load(_of_another(change), engine, LoadOptions(optimizer_states=False))
    assert [check.key for check in plan.replica_checks] == [MASTER]


def _untied(aliases: dict[str, str], names: Sequence[str]) -> tuple[Any, Any]:
    """A checkpoint of an embedding with other names, and an engine with parameters of ``names``."""
    shape = (2, 5)
    model = ModelLayout(layouts={name: LiveShards((shape,)) for name in names})
    metadata = saved({"embedding": shape, "norm": (3,)})
    return replace(metadata, aliases=aliases), replace(
        live({name: (3,) if name == "norm" else shape for name in names}), model=model
    )


@pytest.mark.parametrize("names", [("embedding", "head", "norm"), ("norm", "decoder", "head", "embedding")])
def test_names_that_were_tied_need_states_of_their_own_or_a_load_that_is_not_strict(names: tuple[str, ...]) -> None:
    metadata, engine = _untied({"head": "embedding", "decoder": "embedding"}, names)
    with pytest.raises(MismatchError, match="one parameter at the save") as caught:
        plan_load(metadata, engine, LoadOptions())
    assert "not in the checkpoint" not in str(caught.value)
    ways = {tuple(each.arguments.items()) for each in caught.value.remedies if each.is_data}
    assert ways == {(("load_module_strict", False),), (("load_optimizer_states", False),)}
    untied = tuple(sorted({*names} - {"embedding", "norm"}))
    for strict, with_states in ((False, True), (True, False)):
        plan = plan_load(metadata, engine, LoadOptions(strict=strict, optimizer_states=with_states))
        assert names_of(plan, MASTER, "restored") == tuple(sorted(names))
        assert names_of(plan, "exp_avg", "restored") == (("embedding", "norm") if with_states else ())
        fresh = [each for each in plan.outcomes if each.what == "fresh" and set(each.names) & set(untied)]
        assert [(each.names, "those of embedding" in each.reason) for each in fresh] == [(untied, True)] * with_states


@pytest.mark.parametrize("names", [("head", "norm"), ("norm", "decoder", "head")])
def test_the_states_of_what_was_tied_go_to_a_name_that_the_live_model_has(names: tuple[str, ...]) -> None:
    metadata, engine = _untied({"head": "embedding", "decoder": "embedding"}, names)
    plan = plan_load(metadata, engine, LoadOptions(strict="decoder" not in names))
    assert names_of(plan, MASTER, "restored") == tuple(sorted(names))
    assert names_of(plan, "exp_avg", "restored") == ("head", "norm")
    assert any("embedding in the checkpoint is head here" in note for note in plan.notes)


@pytest.mark.parametrize("ties", [{}, {"head": ("decoder",)}, {"embedding": ("head",)}])
def test_ties_that_the_checkpoint_does_not_need_change_nothing(ties: dict[str, Sequence[str]]) -> None:
    metadata = saved({"embedding": (2, 5)})
    engine = replace(
        live({"embedding": (2, 5)}), model=ModelLayout(ties={name: tuple(others) for name, others in ties.items()})
    )
    assert adopt_live_names(metadata, engine.model) is metadata


def test_a_frozen_tied_parameter_and_a_tied_buffer_are_found_too() -> None:
    metadata = replace(saved(TWO, wholes=WHOLES), aliases={"tied": "old.bias"}, notes=("before",))
    engine = replace(live(TWO), model=ModelLayout(ties={"new.bias": ("old.bias",), "cover": ("mask",)}))
    adopted = adopt_live_names(metadata, engine.model)
    assert names_in(adopted) == {*TWO, "new.bias", "cover", "tied"}
    assert adopted.aliases == {"tied": "new.bias"}
    assert adopted.notes[0] == "before"
    assert [("old.bias" in note, "mask" in note) for note in adopted.notes[1:]] == [(True, False), (False, True)]


def test_ties_are_looked_for_behind_the_renames() -> None:
    engine = replace(live({"head": (2, 5)}), model=ModelLayout(ties={"head": ("body.embedding",)}))
    plan = plan_load(saved({"net.embedding": (2, 5)}), engine, LoadOptions(ElasticConfig(rename=[("^net", "body")])))
    assert names_of(plan, MASTER, "restored") == ("head",)


def with_copy(shape: tuple[int, ...] = (2, 5), dtype: str = "float32", **more: Any) -> Any:
    """A checkpoint in which no optimizer owns a second name of a trained parameter."""
    return replace(saved({"embedding": shape}, wholes={("head", FROZEN): (shape, dtype)}), **more)


def test_what_no_optimizer_owned_under_a_second_name_is_a_copy_that_is_compared() -> None:
    engine = replace(live({"head": (2, 5)}), model=HEAD)
    plan = plan_load(with_copy(), engine, LoadOptions())
    (check,) = plan.replica_checks
    assert check.names == ("embedding", "head") and len(check.replicas) == 2 and check.numel == 10
    assert names_of(plan, MASTER, "restored") == ("head",)
    adopted = adopt_live_names(with_copy(), HEAD)
    assert ("head", FROZEN) not in adopted.tensors and isinstance(adopted.tensors, DerivedTensors)


@pytest.mark.parametrize("crc32s", [{"head": (7, 8), "embedding": (7, 8)}, {}, {"head": (7, 9), "embedding": (7, 8)}])
def test_copies_that_cannot_be_compared_need_equal_checksums(crc32s: dict[str, tuple[int, ...]]) -> None:
    """As of a mixture of experts: copies are of the weights, in bf16, and not of the masters."""
    metadata, engine = with_copy(dtype="bfloat16", crc32s=crc32s), replace(live({"head": (2, 5)}), model=HEAD)
    if crc32s.get("head") == (7, 8):
        plan = plan_load(metadata, engine, LoadOptions())
        assert plan.replica_checks == () and names_of(plan, MASTER, "restored") == ("head",)
        return
    with pytest.raises(MismatchError, match="cannot be compared"):
        plan_load(metadata, engine, LoadOptions(strict=False))


def test_empty_copies_need_no_comparison() -> None:
    plan = plan_load(with_copy((0, 4), "bfloat16"), replace(live({"head": (0, 4)}), model=HEAD), LoadOptions())
    assert plan.replica_checks == () and names_of(plan, MASTER, "restored") == ("head",)


TIED = "tied_modules.embed.weight"


@pytest.mark.parametrize(
    ("files", "others", "found"),
    [
        (["3.weight"], [], True),
        (["3.weight", "9.weight"], [], False),
        (["3.weight"], ["3.weight"], False),
        (["3.weight"], ["tied_modules.head.weight"], False),
        (["3.bias"], [], False),
    ],
)
def test_a_frozen_tied_module_is_found_under_the_number_of_its_layer(
    files: list[str], others: list[str], found: bool
) -> None:
    model = ModelLayout(layouts=dict.fromkeys([TIED, *others], LiveShards(())))
    metadata = saved({"0.weight": (2,)}, wholes={(name, FROZEN): ((4,), "float32") for name in files})
    adopted = adopt_live_names(metadata, model)
    assert ((TIED, FROZEN) in adopted.tensors) == found
    assert (adopted is metadata) == (not found)
    assert not found or (adopted.tensors[TIED, FROZEN].sources == metadata.tensors["3.weight", FROZEN].sources)


def test_copies_of_what_is_a_buffer_here_are_compared_as_one() -> None:
    wholes = {(name, FROZEN): ((4,), "float32") for name in ("cover", "mask")}
    engine = live(TWO, wholes={("cover", BUFFER): ((4,), "float32")})
    adopted = adopt_live_names(saved(TWO, wholes=wholes), ModelLayout(ties={"cover": ("mask",)}))
    kinds = adopt_live_kinds(adopted, engine.wholes)
    assert set(kinds.replicas) == {("cover", BUFFER)} and ("mask", FROZEN) not in kinds.tensors

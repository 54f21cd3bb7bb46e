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
from elastic_ckpt.planning.live_names import adopt_live_kinds, adopt_live_names
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.core.names import WHOLES, names_in
from tests.simulation import TWO, live, names_of, saved

HEAD = ModelLayout(ties={"head": ("embedding",)})


def test_a_tied_parameter_is_found_under_another_of_its_live_names() -> None:
    engine = replace(live({"head": (2, 5)}), model=ModelLayout(ties={"head": ("embedding",)}))
    plan = plan_load(saved({"embedding": (2, 5)}), engine, LoadOptions())
    assert sum(copy.numel for copy in plan.reads.items) == 30
    assert {target.key for target in plan.reads.targets} >= {MASTER}
    assert any("embedding" in note and "head" in note for note in plan.notes)


def test_a_tied_parameter_is_not_taken_from_a_name_of_its_own() -> None:
    """Untied at save time: two parameters, of which a tied live model can take only its own."""
    engine = replace(live({"head": (2, 5)}), model=ModelLayout(ties={"head": ("embedding",)}))
    with pytest.raises(MismatchError) as caught:
        plan_load(saved({"embedding": (2, 5), "head": (2, 5)}), engine, LoadOptions())
    assert "embedding" in str(caught.value.found)


@pytest.mark.parametrize("names", [("embedding", "head"), ("head", "embedding", "decoder"), ("decoder", "embedding")])
@pytest.mark.parametrize("strict", [True, False])
def test_weights_alone_of_names_that_are_tied_now_are_compared(names: tuple[str, ...], strict: bool) -> None:
    model = ModelLayout(ties={"head": ("embedding", "decoder")})
    engine = replace(live({"head": (2, 5)}), model=model)
    options = LoadOptions(strict=strict, optimizer_states=False)
    metadata = saved(dict.fromkeys(names, (2, 5)))
    plan = plan_load(metadata, engine, options)
    if not strict:  # which restores what has its name, and reports the rest
        assert plan.replica_checks == ()
        return
    first = next(name for name in ("head", "embedding", "decoder") if name in names)
    found = [check.names for check in plan.replica_checks]
    assert sorted(found) == sorted((first, name) for name in names if name != first)
    assert names_of(plan, MASTER, "restored") == ("head",)
    assert all(check.numel == 10 and len(check.replicas) == 2 for check in plan.replica_checks)
    assert any("tied here, not in the checkpoint" in note for note in plan.notes)


def test_names_of_other_shapes_are_not_united() -> None:
    engine = replace(live({"head": (2, 5)}), model=HEAD)
    with pytest.raises(MismatchError):
        plan_load(saved({"embedding": (5, 2), "head": (2, 5)}), engine, LoadOptions(optimizer_states=False))


def test_a_tied_parameter_is_not_taken_from_two_others() -> None:
    engine = replace(live({"head": (2, 5)}), model=ModelLayout(ties={"head": ("embedding", "decoder")}))
    metadata = saved({"embedding": (2, 5), "decoder": (2, 5)})
    assert adopt_live_names(metadata, engine.model) is metadata
    with pytest.raises(MismatchError):
        plan_load(metadata, engine, LoadOptions())


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
    with pytest.raises(MismatchError, match="same parameters"):
        plan_load(metadata, engine, LoadOptions())


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

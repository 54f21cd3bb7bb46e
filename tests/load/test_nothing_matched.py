"""What the error for a checkpoint without a trained weight of the live model names, and what it says to do."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ckpt.core.metadata import FROZEN
from elastic_ckpt.core.read_plan import RestoredShare
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.load.nothing_matched import refuse_nothing
from elastic_ckpt.planning.matching import match_parameters
from elastic_ckpt.planning.planner import restored_share
from tests.simulation import live, saved

SAVED = {"model.a.weight": (2, 5), "model.b.weight": (3,)}
ALONE = "load_module_only=True"


def refusal(engine: Any, rules: Any = (), with_states: bool = True, shapes: Any = SAVED) -> MismatchError:
    metadata = saved(shapes)
    share = restored_share(metadata, engine, match_parameters(metadata, engine, strict=False))
    with pytest.raises(MismatchError) as caught:
        refuse_nothing(metadata, engine, share, rules, with_states)
    return caught.value


def test_it_names_what_is_on_each_side_and_the_rule_between() -> None:
    error = refusal(live({"lm.a.weight": (2, 5), "lm.b.weight": (3,)}))
    assert error.parameter == "lm.a.weight, lm.b.weight"
    assert "model.a.weight, model.b.weight" in str(error.found) and "model.a.weight -> lm.a.weight" in str(error.found)
    assert '{"rename": [["^model\\\\.(.*)$", "lm.\\\\1"]]} restores 2' in str(error.remedy)
    assert ALONE not in str(error.remedy)


def test_rules_that_settle_nothing_are_replaced_and_names_are_shown_as_they_make_them() -> None:
    error = refusal(live({"lm.a.weight": (2, 5), "lm.b.weight": (3,)}), rules=[("^model", "wrong")])
    assert "wrong.a.weight" in str(error.found)
    assert '[["^model\\\\.(.*)$", "lm.\\\\1"]]' in str(error.remedy)


@pytest.mark.parametrize(("shape", "may_be_renamed"), [((3,), True), ((7,), False)])
def test_without_a_rule_it_says_what_one_looks_like_if_any_can_help(shape: tuple[int], may_be_renamed: bool) -> None:
    error = refusal(live({"other": shape}))
    assert "give the folder of this model" in str(error.remedy)
    assert ('"rename"' in str(error.remedy)) == may_be_renamed


@pytest.mark.parametrize("with_states", [True, False])
def test_weights_for_what_is_frozen_here_are_restored_alone(with_states: bool) -> None:
    base = {("base.model.a.weight", FROZEN): ((2, 5), "float32"), ("base.model.b.weight", FROZEN): ((3,), "float32")}
    error = refusal(live({"adapter": (4,)}, wholes=base), with_states=with_states)
    assert '[["^(.*)$", "base.\\\\1"]]' in str(error.remedy)
    assert (ALONE in str(error.remedy)) == with_states
    named = {(name.removeprefix("base."), key): value for (name, key), value in base.items()}
    assert refusal(live({"adapter": (4,)}, wholes=named)).remedy.startswith(f"load_checkpoint(..., {ALONE})")  # type: ignore[union-attr]


def test_names_that_do_not_train_are_not_what_is_missing() -> None:
    """Beside an adapter that has another name, a base that was left out of the save, or has another name too."""
    base = {(f"base.{number}", FROZEN): ((7,), "float32") for number in range(9)}
    engine = live({"lora.other.weight": (2, 5)}, wholes=base)
    error = refusal(engine, shapes={"lora.default.weight": (2, 5)})
    assert error.parameter == "lora.other.weight"
    assert error.expected == "parameters that the live engine trains: lora.other.weight"
    renamed = {f"old.{number}": (7,) for number in range(9)}
    error = refusal(engine, shapes={"lora.default.weight": (2, 5), **renamed})
    assert error.parameter == "lora.other.weight"
    assert str(error.found).endswith("nearly the same: lora.default.weight -> lora.other.weight")
    assert "restores 10 of them" in str(error.remedy)
    error = refusal(engine, shapes=renamed)
    assert "old.0 -> base.0" in str(error.found), "where nothing else is nearly the same"


def test_what_a_rank_restores_is_counted_in_elements() -> None:
    metadata = saved({"a": (2, 5), "b": (3,), "c": (4,)}, wholes={("d", FROZEN): ((6,), "float32")})
    wholes = {(name, FROZEN): ((numel,), "float32") for name, numel in {"c": 4, "d": 6, "e": 7}.items()}
    engine = live({"a": (2, 5), "new": (9,)}, wholes=wholes)
    share = restored_share(metadata, engine, match_parameters(metadata, engine, strict=False))
    assert share == RestoredShare(19, 10, frozen_numel=17, frozen_restored_numel=10, placed_numel=4)

"""Rules that bring saved names to live ones: those that frameworks' renames need, and none that are wrong."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.fqn import rename
from elastic_ckpt.planning.near_names import Renames, propose_renames

Shapes = dict[str, tuple[int, ...] | None]
MODULES = {"self_attn.q_proj": (8, 8), "self_attn.v_proj": (4, 8), "mlp.down_proj": (8, 16), "input_layernorm": (8,)}


def decoder(prefix: str = "", layers: int = 3) -> Shapes:
    """Names and shapes as of a causal language model."""
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (50, 8), f"{prefix}norm.weight": (8,)}
    for layer, (module, shape) in product(range(layers), MODULES.items()):
        shapes[f"{prefix}layers.{layer}.{module}.weight"] = shape
    return shapes


def adapted(base: Shapes, adapter: str = "default", targets: tuple[str, ...] = ("q_proj", "v_proj")) -> Shapes:
    """The same under PEFT, with LoRA at some modules."""
    found: Shapes = {}
    for name, shape in base.items():
        module = name.removesuffix(".weight")
        if not module.endswith(targets) or shape is None:
            found[f"base_model.model.{name}"] = shape
            continue
        found[f"base_model.model.{module}.base_layer.weight"] = shape
        found[f"base_model.model.{module}.lora_A.{adapter}.weight"] = (2, shape[-1])
        found[f"base_model.model.{module}.lora_B.{adapter}.weight"] = (shape[0], 2)
    return found


def adapters_of(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if "lora_" in name}


PAIRS: dict[str, tuple[Shapes, Shapes]] = {
    "another prefix": (decoder("model."), decoder("language_model.")),
    "a longer prefix": (decoder("model."), decoder("model.language_model.")),
    "a prefix more": (decoder(), decoder("model.")),
    "a prefix fewer": (decoder("module.model."), decoder("model.")),
    "under an adapter": (decoder("model."), adapted(decoder("model."))),
    "out of an adapter": (adapted(decoder("model.")), decoder("model.")),
    "another adapter": (adapters_of(adapted(decoder("model."))), adapted(decoder("model."), "other")),
    "another adapter beside its base": (adapted(decoder("model.")), adapted(decoder("model."), "other")),
    "another adapter and prefix": (
        adapters_of(adapted(decoder("model."))),
        adapted(decoder("model.language_model."), "other"),
    ),
    "a segment within": (
        decoder("model."),
        {name.replace("layers", "h"): shape for name, shape in decoder("model.").items()},
    ),
}


@pytest.mark.parametrize("knows_shapes", [True, False])
@pytest.mark.parametrize("case", PAIRS)
def test_renames_of_frameworks_are_found_and_settle_all_that_can_be(case: str, knows_shapes: bool) -> None:
    saved, live = PAIRS[case]
    known = live if knows_shapes else dict.fromkeys(live)
    renames = propose_renames(saved, known)
    settled = {rename(name, renames.rules) for name in saved} & live.keys()
    # of a base in an adapter, what the adapter adds has no counterpart
    expected = len(saved.keys() - adapters_of(saved) if case == "out of an adapter" else saved)
    assert len(settled) == expected, renames.config
    assert {new for _, new in renames.pairs} == settled - saved.keys()
    assert all(saved[old] == live[new] for old, new in renames.pairs)


def test_the_lines_are_json_that_means_the_rules() -> None:
    renames = propose_renames(*PAIRS["under an adapter"])
    section = re.fullmatch('"elastic_checkpoint": (.*)', renames.config)
    assert section is not None
    assert [tuple(rule) for rule in json.loads(section[1])["rename"]] == list(renames.rules)


NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "w\\1", "x y", ""]), min_size=1, max_size=4).map(".".join)
SHAPES = st.dictionaries(NAMES, st.sampled_from([(2,), (3,), None]), max_size=8)


@given(SHAPES, SHAPES)
def test_what_is_proposed_is_a_rename_that_a_load_takes(saved: Shapes, live: Shapes) -> None:
    renames = propose_renames(saved, live)
    if not renames.rules:
        assert renames == Renames()
        return
    new_names = {name: rename(name, renames.rules) for name in saved}
    assert len({*new_names.values()}) == len(saved)
    assert all(new_names[name] == name for name in saved.keys() & live.keys())
    assert [(old, new_names[old]) for old, _ in renames.pairs] == list(renames.pairs)
    settled = {new for _, new in renames.pairs}
    assert len(settled) == len(renames.pairs) and settled <= live.keys() - saved.keys()
    assert all(None in (saved[old], live[new]) or saved[old] == live[new] for old, new in renames.pairs)

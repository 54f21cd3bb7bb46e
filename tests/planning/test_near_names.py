"""Rules that bring saved names to live ones: those that frameworks' renames need, and none that are wrong."""

from __future__ import annotations

import json
import re
import tracemalloc
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.fqn import RenameRules, rename
from elastic_ckpt.planning import near_names
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


def block(*modules: str, layers: int = 2) -> Shapes:
    """Square weights of these modules in each layer."""
    return {f"layers.{layer}.{module}.weight": (8, 8) for layer in range(layers) for module in modules}


#: Modules of one shape, saved and live, whose names do not tell which is which.
CHOICES = {
    "Meta's names": (block("gate_proj", "up_proj"), block("w1", "w3")),
    "towers": (block("encoder", "decoder"), block("tower_a", "tower_b")),
    "letters": (block("q", "k"), block("x", "y")),
    "one of two": (block("model"), block("language_model", "vision_model")),
    "two of one": (block("base", "other"), block("model")),
    "words and letters": (block("to_q", "to_k", "to_v", "to_out"), block("wq", "wk", "wv", "wo")),
    "a prefix of two": (block("attn"), block("text.attn", "image.attn")),
    "numbers": (block("self_attn", "cross_attn"), block("attn1", "attn2")),
}
#: Modules of one shape whose names tell.
TOLD = {
    "a word less": (block("gate_proj", "up_proj", "down_proj"), block("gate", "up", "down")),
    "a word more": (block("q", "k", "v"), block("q_proj", "k_proj", "v_proj")),
    "another word": (block("self_attn", "cross_attn"), block("selfAttention_self", "crossAttention_cross")),
    "a segment above": (block("a.gate", "a.up"), block("b.gate", "b.up")),
    "by the shape of one": (
        {"a.weight": (8, 4), "a.bias": (8,), "b.weight": (4, 8), "b.bias": (8,)},
        {"x.weight": (8, 4), "x.bias": (8,), "y.weight": (4, 8), "y.bias": (8,)},
    ),
    "one alone": (block("gate", "up"), block("gate", "w3")),
}


def in_any_order(shapes: Shapes, order: int) -> Shapes:
    return shapes if order == 0 else dict(reversed(shapes.items()))


@pytest.mark.parametrize("case", CHOICES)
def test_nothing_is_proposed_where_other_rules_would_do_as_well(case: str) -> None:
    saved, live = CHOICES[case]
    for old, new in product((0, -1), (0, -1)):
        assert propose_renames(in_any_order(saved, old), in_any_order(live, new)) == Renames()


@pytest.mark.parametrize("case", TOLD)
def test_words_that_names_have_in_common_settle_a_choice(case: str) -> None:
    saved, live = TOLD[case]
    renames = propose_renames(saved, live)
    new_names = [rename(name, renames.rules) for name in saved]
    assert new_names == list(live), renames


@given(st.permutations(["gate", "up", "down", "inner"]), st.permutations(["w1", "w2", "w3", "w4"]), st.integers(2, 4))
def test_no_pairing_of_names_without_a_common_word_is_proposed(old: list[str], new: list[str], count: int) -> None:
    assert propose_renames(block(*old[:count]), block(*new[:count])) == Renames()


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


def test_names_of_many_segments_are_left_out() -> None:
    """Each would be kept as often as it has segments, each time with all of them."""
    saved = {f"old.{'a.' * 26}layers.{layer}.q.weight": (8, 8) for layer in range(4)}
    live = {f"new.{'a.' * 26}layers.{layer}.q.weight": (8, 8) for layer in range(4)}
    assert len(propose_renames(saved, live).pairs) == 4
    longer = {name.replace(".layers", ".a.a.layers"): shape for name, shape in saved.items()}
    assert propose_renames(longer, {name.replace(".layers", ".a.a.layers"): (8, 8) for name in live}) == Renames()


def test_no_rule_is_tried_on_names_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has up to three wildcards, each of which takes the length of the name once more."""
    tried = list[str]()

    def noted(name: str, rules: RenameRules) -> str:
        tried.append(name)
        return rename(name, rules)

    monkeypatch.setattr(near_names, "rename", noted)
    saved = {f"old.{layer}.q.weight": (8, 8) for layer in range(4)}
    live = {f"new.{layer}.q.weight": (8, 8) for layer in range(4)}
    long = ".removed" * 10_000
    assert len(propose_renames({**saved, long: (1,)}, live).pairs) == 4
    assert tried and long not in tried


def test_memory_follows_the_size_of_names() -> None:
    live = decoder("model.")
    saved = {name.replace("model.", f"{'x.' * 20}"): shape for name, shape in live.items()}
    names = {f"{number}.{'y.' * 28}weight": (5, 5) for number in range(2000)}
    tracemalloc.start()
    try:
        assert len(propose_renames({**saved, **names}, live).pairs) == len(live)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= 16 * sum(map(len, names)) + (4 << 20)

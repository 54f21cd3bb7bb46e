"""Patterns of a checkpoint match as Python's own, in work that is counted."""

from __future__ import annotations

import pickle
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import name_patterns
from elastic_ckpt.core.name_patterns import NamePatterns, matches_whole
from elastic_ckpt.core.shard_specs import CannotSplit, declared_by

#: Patterns of Megatron-DeepSpeed and of people.
PATTERNS = [
    r"^tied_modules.embed",
    r"\d+.self_attention.dense.weight",
    r"transformer.layers.\d+.mlp.dense_4h_to_h.weight",
    r"language_model\.encoder\.layers\.\d+\.(input_layernorm|post_attention_layernorm)\.(weight|bias)",
    r".*\.layers\.\d+\..*(q|k|v)_proj\.weight$",
    r"^model\.layers\.0\.mlp\.weight$",
    r"(?!.*bias).*mlp.*",
    r"\w+(?:\.[a-z0-9_]+)*\.weight\Z",
    r".*\bweight",
    r"lm_head",
]
NAMES = [
    "tied_modules.embed.word_embeddings.weight",
    "tiedXmodules.embed",
    "12.self_attention.dense.weight",
    "transformer.layers.7.mlp.dense_4h_to_h.weight",
    "language_model.encoder.layers.11.post_attention_layernorm.bias",
    "model.layers.0.mlp.weight",
    "model.layers.0.mlp.weight\n",
    "model.layers.0.mlp.weight\nx",
    "model.layers.0.mlp.bias",
    "model.layers.10.self_attn.k_proj.weight",
    "lm_head.weight",
    "",
]
#: Small enough that Python's own are done with them.
ATOMS = ["a", "b", ".", r"\.", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[0-9b.]", "^", "$", r"\Z", r"\A", r"\b", "(?=a)"]
PIECES = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_as_checkpoints_have_them_match_as_pythons_own(pattern: str) -> None:
    patterns = NamePatterns([pattern])
    for name in NAMES:
        assert bool(patterns.matching(name)) == bool(re.match(pattern, name)), name
        assert matches_whole(pattern, name) == bool(re.fullmatch(pattern, name)), name


@given(st.lists(PIECES, min_size=1, max_size=3), st.text("ab.0_\né", max_size=8))
def test_any_pattern_matches_as_pythons_own_or_is_refused(patterns: list[str], name: str) -> None:
    understood = []
    for pattern in patterns:
        try:
            NamePatterns([pattern])
        except ValueError as error:
            assert "take forever" in str(error)
            continue
        understood.append(pattern)
    expected = tuple(pattern for pattern in dict.fromkeys(understood) if re.match(pattern, name))
    assert NamePatterns(understood).matching(name) == expected
    assert pickle.loads(pickle.dumps(NamePatterns(understood))).matching(name) == expected


@given(st.text("ab.\\n$^-_:\n", max_size=6), st.text("ab.\n$", max_size=6), st.booleans(), st.booleans())
def test_names_written_out_are_looked_up_as_pythons_own_match(text: str, name: str, start: bool, end: bool) -> None:
    pattern = "^" * start + re.escape(text) + "$" * end
    assert bool(NamePatterns([pattern]).matching(name)) == bool(re.match(pattern, name))
    assert bool(NamePatterns([pattern]).matching(text + name)) == bool(re.match(pattern, text + name))


@pytest.mark.parametrize(
    "pattern",
    [
        ".*.*.*.*.*XYZ",
        ".*" * 200 + "X",
        r"(\w|\w)" * 30 + "X",
        r"(\w?){40}X",
        "([a-z_.0-9]+)+!",
        "((a+))+$",
        "(a*){2,}X",
        "(?:(?:a?){20}){20}X",
        r".{0,300}.{0,200}X",
        "(?!(a+)+b).*.*X",
    ],
)
def test_the_work_of_a_pattern_grows_with_the_length_of_the_name(pattern: str) -> None:
    steps = []
    for length in (400, 800):
        (_, matcher), *_ = NamePatterns([pattern])._others
        steps.append(matcher.match("a" * length)[1])
    assert steps[1] <= 2 * steps[0]
    assert steps[0] <= 400 * 4 * matcher.size


def test_all_names_together_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "_MOST_STEPS", 5_000)
    declared = declared_by({"tp_replicated_parameter_patterns": [r".*.*.*X", r"\w+\d"]})
    assert declared.spec("a.b") is None
    with pytest.raises(CannotSplit, match="too long to match"):
        for number in range(10_000):
            declared.spec(f"a.b.{number}")
    assert declared.spec("a.b") is None  # which is known


def test_a_name_written_in_many_ways_is_charged_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hyphen may be escaped, so that 4,096 patterns are one beginning."""
    monkeypatch.setattr(name_patterns, "_MOST_STEPS", 1 << 22)
    ways = ["".join(way) for way in product(("-", r"\-"), repeat=12)]
    patterns = NamePatterns(ways)
    assert len(patterns.matching("-" * 12)) == len(ways)
    with pytest.raises(ValueError, match="too long to match"):
        for number in range(10_000):
            patterns.matching(f"{'-' * 12}{number}")


def test_beginnings_of_many_lengths_are_charged_for_what_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "_MOST_STEPS", 1 << 22)
    patterns = NamePatterns("a" * length for length in range(1, 4_000))
    with pytest.raises(ValueError, match="too long to match"):
        for number in range(2_000):
            patterns.matching(f"{'b' * 4_000}{number}")


def test_as_many_names_written_out_as_parameters_are_looked_up() -> None:
    """DeepSpeed's automatic tensor parallelism declares each by name."""
    names = [f"model.layers.{number}.mlp.weight" for number in range(5_000)]
    maps = {f"^{re.escape(name)}$": "why" for name in names}
    declared = declared_by({"autotp_unsupported_parameter_patterns": maps, "vocabulary_parameter_patterns": ["model"]})
    for name in names:
        assert declared.spec(name) is not None
        assert not declared.is_recorded(name)
        assert declared._entries_for(name) == [(0, f"^{re.escape(name)}$")]


@pytest.mark.parametrize("pattern", ["(", "a" * 600, "(" * 300 + ")" * 300, "(?x)a b", "[z-a]", "*"])
def test_what_is_no_pattern_is_an_error(pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"pattern|verbose"):
        NamePatterns([f"{pattern}.*"])


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<=a)b+.*",  # looks back
        r"(?i)(ab|cd)+",
        r"a(?=b+c|d+e)f*",
        r"([a-z]{90}){90}.*",  # repeats multiply what is to be matched
    ],
)
def test_what_could_take_forever_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="take forever"):
        NamePatterns([pattern])


@pytest.mark.parametrize(("pattern", "name", "matches"), [(r"(?<=x)", "x", False), (r"(?<!x)ab", "ab", True)])
def test_what_no_automaton_matches_is_left_to_python_where_that_is_quick(
    pattern: str, name: str, matches: bool
) -> None:
    assert NamePatterns([pattern]).matching(name) == ((pattern,) if matches else ())


@pytest.mark.parametrize("more", [0, 1])
def test_patterns_have_so_many_characters_at_most(more: int) -> None:
    pattern = r"\w+".ljust(name_patterns.LONGEST + more, "a")
    if not more:
        assert NamePatterns([pattern]).matching(pattern.replace(r"\w+", "x")) == (pattern,)
        return
    with pytest.raises(ValueError, match="characters"):
        NamePatterns([pattern])

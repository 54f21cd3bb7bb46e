"""FQNs of experts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.experts import EXPERTS, ExpertName, expert_name, numbers_of_experts


@given(st.sampled_from(["", "layers.3.mlp.", "a."]), st.integers(0, 999), st.sampled_from(["w", "fc1.weight"]))
def test_the_parts_of_a_name_make_the_name(layer: str, number: int, rest: str) -> None:
    parts = ExpertName(layer, number, rest)
    assert expert_name(str(parts)) == parts


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_number_their_experts_one_after_the_other(ep: int, local: int) -> None:
    names = [ExpertName("", number, "w").on(rank, local).number for rank in range(ep) for number in range(local)]
    assert names == list(range(ep * local))


def test_other_names_are_of_no_expert() -> None:
    for name in (f"a.{EXPERTS}", f"{EXPERTS}x.weight", f"a{EXPERTS}0.weight", "mlp.experts.0.weight", f"{EXPERTS}0"):
        assert expert_name(name) is None, name


def test_the_experts_of_each_layer_are_counted() -> None:
    names = [f"a.{EXPERTS}0.w", f"a.{EXPERTS}0.b", f"a.{EXPERTS}2.w", f"b.{EXPERTS}1.w", "head"]
    assert numbers_of_experts(names) == {"a.": {0, 2}, "b.": {1}}

"""Fitting names to saved tensors that have only shapes: the one way there is, or none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.live_names import align
from tests.formats.zero0_states import NAMES, adamw, with_masters
from tests.unpartitioned import Model, catalog_of, contents, indexed, trained

Shape = tuple[int, ...]
some_shapes = st.sampled_from([(1,), (2,), (3, 1), ()])


def all_ways(held: Sequence[Shape | None], names: Sequence[Shape]) -> list[list[int | None]]:
    """Every way to fit names to tensors in order, as many as there can be; per tensor, the position of its name."""
    count = min(len(held), len(names))
    found = []
    for tensors in combinations(range(len(held)), count):
        for some in combinations(range(len(names)), count):
            if all(held[i] in (None, names[j]) for i, j in zip(tensors, some, strict=True)):
                placed = dict(zip(tensors, some, strict=True))
                found.append([placed.get(position) for position in range(len(held))])
    return found


@given(st.lists(st.none() | some_shapes, max_size=6), st.lists(some_shapes, max_size=6))
def test_names_are_fitted_in_the_only_way_or_not_at_all(held: list[Shape | None], shapes: list[Shape]) -> None:
    names = [f"p{number}" for number in range(len(shapes))]
    ways = all_ways(held, shapes)
    expected = None if len(ways) != 1 else [None if place is None else names[place] for place in ways[0]]
    assert align(held, names, dict(zip(names, shapes, strict=True))) == expected


def test_a_long_list_is_fitted_quickly() -> None:
    """Trying all ways would not end."""
    names = [f"p{number}" for number in range(2000)]
    shapes = {name: (number,) for number, name in enumerate(names)}
    held = [(number,) for number in range(0, 2000, 2)]
    assert align(held, names, shapes) == names[::2]
    assert align([(0,)] * 1000, names, dict.fromkeys(names, (0,))) is None


# --- as a whole -------------------------------------------------------------------------------------------------


def test_a_parameter_that_was_frozen_and_trains_now_is_passed_over(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model, "a c", "scale")
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    metadata = catalog_of(tmp_path, shard, [["a", "b", "c"], ["scale"]])
    assert set(metadata.parameters) == {"a", "scale", "c"}
    assert torch.equal(contents(metadata, "c", "exp_avg"), optimizer.state[model.c]["exp_avg"])
    assert len(metadata.notes) == 1


def test_a_parameter_that_trained_and_is_frozen_now_has_its_states_skipped_with_a_note(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model, "a b c", "scale")
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    metadata = catalog_of(tmp_path, shard, [["a", "c"], ["scale"]])
    assert set(metadata.parameters) == {"a", "scale", "c"}
    assert metadata.names("frozen") == ["b"]
    assert metadata.states.opaque == {}
    assert torch.equal(contents(metadata, "c", "exp_avg"), optimizer.state[model.c]["exp_avg"])
    assert "1 saved parameters are skipped" in metadata.notes[1]


def test_a_new_parameter_of_the_live_model_does_not_confuse_the_order(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model, "c b", "scale a")
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    metadata = catalog_of(tmp_path, shard, [["c", "new", "b"], ["scale", "a", "newer"]])
    assert set(metadata.parameters) == set(NAMES)


def test_live_names_are_taken_back_behind_the_users_renames(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model, "c b", "scale a")
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    live = [["net.c", "net.b"], ["net.scale", "net.a"]]
    metadata = catalog_of(tmp_path, shard, live, rename=[("^", "net.")])
    assert set(metadata.parameters) == set(NAMES), "saved names stay; the planner renames them"
    assert torch.equal(contents(metadata, "c", "exp_avg"), optimizer.state[model.c]["exp_avg"])


@pytest.mark.parametrize("masters", [True, False])
def test_a_parameter_that_moved_to_another_group_is_not_taken_for_a_frozen_one(tmp_path: Path, masters: bool) -> None:
    """Its states are in the file, and it trains in the live run: to leave them out would be a loss."""
    model = Model()
    groups = [["c", "b"], ["scale", "a"]]
    entry = with_masters(model, "unfused", groups)[0] if masters else trained(model, adamw(model, "c b", "scale a"))
    shard = indexed(tmp_path, model.state_dict(), entry)
    try:
        metadata = catalog_of(tmp_path, shard, [["c", "b", "scale"], ["a"]])
    except MismatchError:
        return
    assert metadata.parameters["scale"].scalars, "the states of this parameter were dropped"

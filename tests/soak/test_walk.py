"""Walks are drawn within what DeepSpeed can do, written down and read again, and shortened to what fails."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.soak.walk import FAMILIES, OPTIONS, Stop, Walk, random_walk, shortened, walk_of

WALKS = [random_walk(random.Random(seed), 12, ("", "/old")) for seed in range(200)]


def test_walks_visit_what_their_family_has() -> None:
    assert {walk.family for walk in WALKS} == set(FAMILIES)
    for walk in WALKS:
        family = FAMILIES[walk.family]
        assert walk.hops == 12
        for last, stop in zip(walk.stops, walk.stops[1:], strict=False):
            assert stop.ranks % (stop.tp * stop.pp) == 0 and stop.stage in family.stages
            assert all(stop.stage in OPTIONS[option][0] for option in stop.options)
            assert not stop.universal or (last.stage > 0 and family.is_convertible)
            assert last.stage > 0 or stop.groups == last.groups
    stops = [stop for walk in WALKS for stop in walk.stops]
    assert {stop.ranks for stop in stops} == {1, 2, 3, 4} and {stop.stage for stop in stops} == {0, 1, 2, 3}
    assert any(stop.universal for stop in stops) and any(stop.deepspeed for stop in stops)


@pytest.mark.parametrize("walk", WALKS[:5])
def test_a_walk_is_read_as_it_was_written(walk: Walk) -> None:
    assert walk_of(walk.as_json()) == walk


@pytest.mark.parametrize("walk", WALKS[:20])
def test_the_processes_of_a_leg_stay(walk: Walk) -> None:
    legs = list(walk.legs())
    assert [number for leg in legs for number, _ in leg] == list(range(len(walk.stops)))
    for leg in legs:
        assert len({(stop.ranks, stop.deepspeed) for _, stop in leg}) == 1
        assert not any(stop.universal for _, stop in leg[1:])


@pytest.mark.parametrize("needed", [{9}, {0, 9}, {3, 4, 9}, {8, 9}, set(range(10))])
def test_a_failing_walk_is_shortened_to_what_it_needs(needed: set[int]) -> None:
    walk = Walk("3d", tuple(replace(Stop(), steps=number) for number in range(10)))
    shortest = shortened(walk, lambda other: needed <= {stop.steps for stop in other.stops})
    expected = needed if len(needed) > 1 else {8, 9}
    assert {stop.steps for stop in shortest.stops} == expected

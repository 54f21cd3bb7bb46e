"""Which saves are older: counters first, then numbers in names of one form, then times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.formats.save_order import (
    BY_COUNTERS,
    BY_NUMBERS,
    BY_TIMES,
    Save,
    oldest_first,
    steps_between,
    told_by,
)

SAVES = st.builds(
    Save,
    st.sampled_from(["after9", "after10", "epoch1-step3", "best", "last", "after"]),
    st.none() | st.integers(0, 2),
    st.none() | st.integers(0, 20),
    st.floats(0, 10),
)


@given(st.lists(SAVES, max_size=6))
def test_the_order_is_total_and_of_counters_first(saves: list[Save]) -> None:
    order = oldest_first(saves)
    assert sorted(order) == list(range(len(saves)))
    steps = [saves[index].step for index in order if saves[index].step is not None]
    assert steps == sorted(steps)
    assert all(saves[index].step is None for index in order[len(steps) :]), "it may be the newest"


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 10)), unique_by=lambda each: each[0]))
def test_numbers_tell_where_counters_stand_still(facts: list[tuple[int, float]]) -> None:
    saves = [Save(f"after{number}", 0, None, written) for number, written in facts]
    numbers = [facts[index][0] for index in oldest_first(saves)]
    assert numbers == sorted(numbers)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=5))
def test_times_tell_where_names_have_several_forms(times: list[float]) -> None:
    saves = [Save(f"{'xyzuv'[number]}{9 - number}", 7, None, written) for number, written in enumerate(times)]
    written = [times[index] for index in oldest_first(saves)]
    assert written == sorted(written)


def test_what_tells_is_said() -> None:
    first, second, third = Save("after1", 5), Save("after2", 5, None, 3.0), Save("best", 5, None, 9.0)
    assert told_by(Save("after2", 6), first) == BY_COUNTERS
    assert told_by(second, first) == BY_NUMBERS and told_by(third, second) == BY_TIMES


def test_how_many_steps_are_between() -> None:
    assert steps_between(Save("a", 9), Save("b", 4)) == 5
    assert steps_between(Save("a", 0), Save("b", 0)) is None
    assert steps_between(Save("global_step9", 0, 9), Save("global_step4", 0, 4)) == 5
    assert steps_between(Save("global_step9", None, 9), Save("b", 4)) == 5
    assert steps_between(Save("global_step9", None, 9), Save("global_step4", 0, 4)) == 5, "the counters stand still"
    assert steps_between(Save("global_step4", 0, 4), Save("global_step9", 0, 9)) is None

"""The harness of what is drawn at random: counts, ends, reduces and repeats."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests import drawn
from tests.drawn import Outcome, draw, plainest_with_outcome, report_of, table_of


class Numbers:
    """Five at a time, until forty were good; those of 90 and above are wrong, as they are from 70."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def drawn(self, rng: random.Random, counted: Counter[str]) -> list[int]:
        return [rng.randrange(100) for _ in range(5)] if counted["good"] < 40 else []

    def run(self, cases: Sequence[int], _extensions_dir: str) -> list[Outcome]:
        self.seen += cases
        return [Outcome(Counter(), f"{each} is wrong") if each >= 70 else Outcome(Counter(good=1)) for each in cases]

    def reduced(self, case: int, outcome: Outcome, run: Callable[[int], Outcome]) -> tuple[int, Outcome]:
        return plainest_with_outcome(case, outcome, lambda other: [other - 10, other - 1], run)

    def written(self, case: int) -> str:
        return str(case)

    def read(self, text: str) -> int:
        return int(text)


def test_cases_are_drawn_until_it_is_enough_and_the_same_by_the_same_seed() -> None:
    one, same, other = Numbers(), Numbers(), Numbers()
    counted, failures = draw(one, "numbers", 1e9, 3, "")
    assert counted["good"] in range(40, 45) and counted["wrong"] == len(failures) > 3
    assert counted.total() % 5 == 0
    assert draw(same, "numbers", 1e9, 3, "") == (counted, failures) and same.seen == one.seen
    draw(other, "numbers", 1e9, 4, "")
    assert other.seen != one.seen
    assert set(failures) == {"FAILED: 70 is wrong\npython -m tests.drawn numbers --again '70'"}


def test_no_case_is_drawn_when_the_time_is_over() -> None:
    assert draw(Numbers(), "numbers", 0, 3, "") == (Counter(), [])


def test_a_report_is_of_the_plainest_case_and_its_words() -> None:
    assert report_of(Numbers(), "numbers", 73, Outcome(Counter(), "73 is wrong"), "").startswith("FAILED: 70 is wrong")
    assert report_of(Numbers(), "numbers", 70, Outcome(Counter(), "as it was"), "").startswith("FAILED: as it was")


def test_the_command_repeats_a_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = Numbers()
    monkeypatch.setattr(drawn, "table_of", lambda name, **options: numbers)
    assert drawn.main(["flows", "--again", "71"]) == 1 and "71 is wrong" in capsys.readouterr().out
    assert drawn.main(["walks", "--again", "12"]) == 0 and "good" in capsys.readouterr().out
    assert drawn.main(["walks", "--seed", "3"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("seed 3\n") and shown.endswith("failed\n")


@pytest.mark.parametrize("name", drawn.TABLES)
def test_a_table_reads_what_it_wrote(name: str) -> None:
    table = table_of(name)
    for case in table.drawn(random.Random(3), Counter()):
        assert table.read(table.written(case)) == case


def test_walks_end_with_as_many_hops_as_are_enough() -> None:
    table = table_of("walks", hops=20)
    assert table.drawn(random.Random(3), Counter(hops=20)) == []
    assert [walk.hops for walk in table.drawn(random.Random(3), Counter(hops=19))] == [1]

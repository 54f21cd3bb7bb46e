"""What of a module is changed, what is drawn of it, and how tests are named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import Place, drawn, verdict
from tests.mutants.places import Mutant, mutants_of
from tests.mutants.reached import raises_of
from tests.mutants.recording import REPO, all_tests, copy_of_repository, node_of, room_of

CHANGES = {
    "a < b": ["(a <= b)"],
    "a < b == c": ["(a < b != c)"],
    "x is None": ["(x is not None)"],
    "a + b * 2": ["(a - b * 2)", "(b // 2)", "3"],
    "a and not b": ["(a or (not b))", "(b)"],
    "f(True, 1.5, 'text')": ["False", "2.5"],
    "'a' + b": [],
    "f'{a + 1}'": [],
    "[each for each in some if each]": [],
}


@pytest.mark.parametrize("expression", CHANGES)
def test_each_operator_comparison_and_constant_is_changed_alone(expression: str) -> None:
    code = f'class A:\n    def f(self) -> "int | 5":\n        """A - 1."""\n        größe = {expression}\n'
    found = mutants_of("m.py", code)
    assert [mutant.after for mutant in found] == [after.replace("(not b)", "not b") for after in CHANGES[expression]]
    for mutant in found:
        changed = mutant.applied_to(code)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))
        head, tail = changed.split(mutant.after, 1)
        assert code.startswith(head) and code.endswith(tail)


def test_results_are_changed_in_functions_alone() -> None:
    code = "LIMIT = 5\n\n\n@cached(3)\ndef f(x: int = 4):\n    for each in x:\n        return each\n    return None\n"
    assert [(mutant.line, mutant.after) for mutant in mutants_of("m.py", code)] == [(7, "return None")]


def mutants(room: str, count: int) -> list[Mutant]:
    return [Mutant(f"elastic_ckpt/{room}/m.py", line, 0, line, 1, "a", "b") for line in range(count)]


def test_a_seed_draws_places_of_all_rooms_at_different_lines() -> None:
    every = [*mutants("core", 300), *mutants("io", 100), *mutants("data", 4), *mutants("nodes", 2)]
    found = drawn(every * 2, 40, 1)
    rooms = [room_of(mutant.module) for mutant in found]
    counts = {room: rooms.count(room) for room in rooms}
    assert counts == {"core": 30, "data": 3, "io": 10, "nodes": 2}
    assert len(set(found)) == len(found)
    assert found == drawn(every * 2, 40, 1) != drawn(every * 2, 40, 2)


def test_tests_of_the_module_come_first_and_then_those_of_its_room() -> None:
    mutant = Mutant("elastic_ckpt/io/reader.py", 1, 0, 1, 1, "a", "b")
    tests = (
        "tests/core/test_b.py::t",
        "tests/distributed/test_a.py",
        "tests/io/test_a.py::t",
        "tests/io/test_reader.py::t",
    )
    place = Place(mutant, tests)
    assert place.units == ["tests/io/test_reader.py::t", "tests/io/test_a.py::t", "tests/core/test_b.py::t"]
    assert place.files == ["tests/distributed/test_a.py"]


def test_a_context_of_coverage_names_a_test() -> None:
    assert node_of("tests.core.test_fqn.TestTies.test_one") == "tests/core/test_fqn.py::TestTies::test_one"
    assert node_of("tests.test_run.test_one") == "tests/test_run.py::test_one"
    assert node_of("tests/distributed/test_tied.py") == "tests/distributed/test_tied.py"
    assert node_of("") == ""


def test_statements_that_raise_are_found() -> None:
    assert raises_of(
        "def f(x):\n    if x:\n        raise ValueError(\n            x)\n    try:\n        g()\n    except A:\n        raise\n"
    ) == [3, 8]


def test_all_tests_are_those_that_start_jobs_and_the_rest() -> None:
    units, jobs = all_tests(REPO)
    assert {"tests/core", "tests/formats", "tests/test_run.py"} < set(units)
    assert "tests/distributed/test_matrix.py" in jobs
    assert not any(each.startswith(("tests/distributed", "tests/integration")) for each in units)


def test_a_change_is_killed_by_a_test_that_fails_and_taken_back(tmp_path: Path) -> None:
    repository = copy_of_repository(tmp_path, "")
    code = (repository / "elastic_ckpt" / "core" / "flat_ranges.py").read_text()
    tests = ("tests/core/test_flat_ranges.py",)
    places = [
        mutant for mutant in mutants_of("elastic_ckpt/core/flat_ranges.py", code) if mutant.after == "return None"
    ]
    assert verdict(Place(places[0], tests), repository) == "killed by units"
    nothing = Mutant("elastic_ckpt/core/flat_ranges.py", 1, 0, 1, 0, "", "")
    assert verdict(Place(nothing, tests), repository) == "SURVIVED"
    assert (repository / "elastic_ckpt" / "core" / "flat_ranges.py").read_text() == code

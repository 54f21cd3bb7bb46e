"""``python -m tests.mutants record FOLDER``, then ``python -m tests.mutants run FOLDER``; see the package."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.places import Mutant, mutants_of
from tests.mutants.reached import print_reached
from tests.mutants.recording import (
    JOBS,
    REPO,
    Recorded,
    all_tests,
    copy_of_repository,
    environment,
    record_jobs,
    record_units,
    room_of,
)

#: Least places of a room, if it has so many.
_LEAST = 3
#: Seconds that the tests of one place may take: what runs longer hangs.
_SECONDS = 900
#: Files of jobs that are tried where no unit fails.
_MOST_FILES = 3
SURVIVED = "SURVIVED"


@dataclass(frozen=True)
class Place:
    """A mutant, and the tests that reach its line."""

    mutant: Mutant
    tests: tuple[str, ...]

    @property
    def units(self) -> list[str]:
        """Test functions that start no jobs; those of the module's own tests, and then of its room, are the first."""
        _, *rooms, name = Path(self.mutant.module).parts
        own, room = "/".join(["tests", *rooms, f"test_{name}"]), "/".join(["tests", *rooms, ""])
        units = [test for test in self.tests if not test.startswith(JOBS)]
        return sorted(units, key=lambda test: (not test.startswith(own), not test.startswith(room), test))

    @property
    def files(self) -> list[str]:
        """Files of tests that start jobs."""
        return [test for test in self.tests if test.startswith(JOBS)]


def drawn(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many at different lines; each room has its share, and at least :data:`_LEAST` where it has them."""
    rng = random.Random(seed)
    rooms: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=str):
        rooms.setdefault(room_of(mutant.module), []).append(mutant)
    found = []
    for room in sorted(rooms):
        share = max(_LEAST, round(count * len(rooms[room]) / len(mutants)))
        rng.shuffle(rooms[room])
        lines: dict[tuple[str, int], Mutant] = {}
        for mutant in rooms[room]:
            lines.setdefault((mutant.module, mutant.line), mutant)
        found += list(lines.values())[:share]
    return found


def mutants_in(recorded: Recorded) -> list[Mutant]:
    """All whose line a test reaches."""
    found = []
    for module in recorded.modules():
        lines = recorded.lines(module)
        found += [each for each in mutants_of(module, (REPO / module).read_text()) if each.line in lines]
    return found


def places_of(file: Path, recorded: Recorded, count: int, seed: int) -> list[Place]:
    """Those that a file names, with the tests that reach them here; or what is drawn, which is written there."""
    if file.exists():
        mutants = [Mutant(**each) for each in json.loads(file.read_text())]
    else:
        mutants = drawn(mutants_in(recorded), count, seed)
        file.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))
    return [Place(mutant, tuple(recorded.tests(mutant.module).get(mutant.line, ()))) for mutant in mutants]


def verdict(place: Place, repository: Path) -> str:
    """Which tests noticed the change, or that none did."""
    path = repository / place.mutant.module
    code = path.read_text()
    path.write_text(place.mutant.applied_to(code))
    try:
        if place.units and not pass_in(repository, place.units):
            return "killed by units"
        for file in place.files[:_MOST_FILES]:
            if not pass_in(repository, [file]):
                return f"killed by {file}"
    finally:
        path.write_text(code)
    return SURVIVED


def pass_in(repository: Path, tests: Sequence[str]) -> bool:
    """Whether tests pass in a copy of the repository; none that is gone is asked for."""
    there = [test for test in tests if (repository / test.partition("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not nightly", *there]
    try:
        ended = subprocess.run(
            command,
            check=False,
            cwd=repository,
            env=environment(repository),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    if "ERROR collecting" in ended.stdout:  # a test module that uses the change where it is imported
        return False
    if ended.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a mutant survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("what", choices=["record", "run", "reached"])
    parser.add_argument("folder", type=Path, help="where what is recorded lies")
    parser.add_argument(
        "--tests", default="", metavar="COMMIT", help="the tests of another commit, of the code as it is"
    )
    parser.add_argument("--units", nargs="*", default=None, help="record: tests that start no jobs, if not all")
    parser.add_argument("--jobs", nargs="*", default=None, help="record: files of tests that start jobs, if not all")
    parser.add_argument("--count", type=int, default=80, help="run: places")
    parser.add_argument("--seed", type=int, default=0, help="run: what is drawn")
    parser.add_argument("--places", type=Path, help="run: a file that names them; written if there is none")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if options.what == "reached":
        print_reached(folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        repository = copy_of_repository(Path(name), options.tests)
        if options.what == "run":
            file = options.places or folder / f"places-{options.seed}.json"
            return judged(places_of(file, Recorded(folder), options.count, options.seed), repository)
        is_all = options.units is None and options.jobs is None
        units, files = all_tests(repository) if is_all else (options.units or [], options.jobs or [])
        if units:
            record_units(folder, units, repository)
        record_jobs(folder, files, repository)
    return 0


def judged(places: Sequence[Place], repository: Path) -> int:
    """Print what became of each; 1 if one survived."""
    survived = 0
    for place in places:
        found = verdict(place, repository)
        survived += found == SURVIVED
        print(f"{found}: {place.mutant} ({len(place.units)} units, {len(place.files)} files)", flush=True)
    print(f"{len(places)} mutants, {survived} survived")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())

"""Jobs that are drawn at random for minutes or hours: one harness for all tables of what is drawn.

``python -m tests.drawn TABLE --minutes M --seed S`` draws cases of a table, runs and counts them. One that fails is
reduced to what it needs to fail, and the command that repeats it is printed.

======= =============================================================================================================
changes what one script saved is loaded by another: right by names, or refused
flows   what plain DeepSpeed completes at an unchanged topology: with elastic_ckpt it completes, and leaves the same bits
walks   training that is saved and resumed at one topology after another, each hop compared bit by bit
======= =============================================================================================================
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tests.distributed.launch import close_zygotes

#: Name of a table -> module that has its class, ``Table``.
TABLES = {"changes": "tests.changes.table", "flows": "tests.flows.table", "walks": "tests.soak.table"}
Case = TypeVar("Case")


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        counted: what is added up of all cases.
        wrong: what is wrong; empty if nothing is.
        more: words for whoever looks closer.
    """

    counted: Counter[str]
    wrong: str = ""
    more: str = ""


class Table(Protocol[Case]):
    """What is drawn. It is made with the options of the command."""

    def drawn(self, rng: random.Random, counted: Counter[str]) -> list[Case]:
        """Cases that are run next, behind those that were counted; none: it is enough."""

    def run(self, cases: Sequence[Case], extensions_dir: str) -> list[Outcome]:
        """What became of each; ``extensions_dir`` is where DeepSpeed builds its ops."""

    def reduced(self, case: Case, outcome: Outcome, run: Callable[[Case], Outcome]) -> tuple[Case, Outcome]:
        """The plainest case that fails as this one did, and how that failed."""

    def written(self, case: Case) -> str:
        """One line that :meth:`read` reads."""

    def read(self, text: str) -> Case:
        """A case as it was written."""


def plainest(case: Case, simpler: Callable[[Case], Iterable[Case]], fails: Callable[[Case], bool]) -> Case:
    """The case without all that it can lose, one thing after another, and still fail."""
    while (found := next(filter(fails, simpler(case)), None)) is not None:
        case = found
    return case


def plainest_with_outcome(
    case: Case, outcome: Outcome, simpler: Callable[[Case], Iterable[Case]], run: Callable[[Case], Outcome]
) -> tuple[Case, Outcome]:
    """The plainest case that fails, and how it failed; ``outcome`` is that of the given one."""
    last = outcome

    def fails(other: Case) -> bool:
        nonlocal last
        now = run(other)
        if now.wrong:
            last = now
        return bool(now.wrong)

    return plainest(case, simpler, fails), last


def table_of(name: str, **options: Any) -> Table[Any]:
    """The table of a name."""
    found: Table[Any] = importlib.import_module(TABLES[name]).Table(**options)
    return found


def draw(
    table: Table[Case], name: str, seconds: float, seed: int, extensions_dir: str, is_verbose: bool = False
) -> tuple[Counter[str], list[str]]:
    """Cases for so many seconds, or until it is enough: what was counted, and a report of each that failed."""
    limit, number = time.monotonic() + seconds, 0
    counted: Counter[str] = Counter()
    failures: list[str] = []
    while time.monotonic() < limit and (cases := table.drawn(random.Random(f"{seed} {number}"), counted)):
        number += 1
        for case, outcome in zip(cases, table.run(cases, extensions_dir), strict=True):
            counted += outcome.counted
            if outcome.wrong:
                counted["wrong"] += 1
                failures.append(report_of(table, name, case, outcome, extensions_dir))
                print(failures[-1], flush=True)
            elif is_verbose:
                print(table.written(case), outcome.more[:300], flush=True)
        print(dict(counted), flush=True)
    return counted, failures


def report_of(table: Table[Case], name: str, case: Case, outcome: Outcome, extensions_dir: str) -> str:
    """What goes wrong in the plainest case that fails as this one did, and its command."""

    def again(other: Case) -> Outcome:
        (found,) = table.run([other], extensions_dir)
        return found

    plainest, last = table.reduced(case, outcome, again)
    return f"FAILED: {last.wrong}\npython -m tests.drawn {name} --again '{table.written(plainest)}'"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.drawn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--again", help="repeat this case, as a failure printed it")
    parser.add_argument("--common", action="store_true", help="flows: without the hundred rarest optimizers")
    parser.add_argument("--hops", type=int, default=sys.maxsize, help="walks: end after so many, if that is earlier")
    parser.add_argument("--deepspeed", action="append", default=[], help="walks: folder with another version")
    parser.add_argument("-v", dest="is_verbose", action="store_true", help="print each case")
    options = parser.parse_args(arguments)
    if options.table == "flows":
        table = table_of("flows", every=not options.common)
    elif options.table == "changes":
        table = table_of("changes")
    else:
        table = table_of("walks", hops=options.hops, versions=[os.path.abspath(each) for each in options.deepspeed])
    with tempfile.TemporaryDirectory() as own:
        extensions_dir = os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS") or own
        try:
            if options.again:
                (found,) = table.run([table.read(options.again)], extensions_dir)
                print(f"{dict(found.counted)}\n{found.wrong or found.more}")
                return int(bool(found.wrong))
            print(f"seed {options.seed}", flush=True)
            seconds = 60 * options.minutes
            counted, failures = draw(table, options.table, seconds, options.seed, extensions_dir, options.is_verbose)
        finally:
            close_zygotes()
    print(f"{dict(counted)}, {len(failures)} failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

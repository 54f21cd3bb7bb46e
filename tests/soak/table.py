"""Walks for :mod:`tests.drawn`: training that is saved, resumed at another topology, trained on, and so on."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed.launch import run_ranks
from tests.drawn import Outcome
from tests.soak.walk import Walk, random_walk, shortened, walk_of

#: Hops of one walk, and seconds that one set of processes gets for each.
_LEAST_HOPS, _MOST_HOPS, _HOP_SECONDS = 4, 10, 90
#: What is counted.
HOPS = "hops"


class Table:
    """Of walks.

    Args:
        hops: that are enough.
        versions: folders with DeepSpeed, which stops choose from beside the one that is installed.
    """

    def __init__(self, hops: int = sys.maxsize, versions: Sequence[str] = ()) -> None:
        self._hops, self._versions = hops, versions
        self._built: set[str] = set()

    def drawn(self, rng: random.Random, counted: Counter[str]) -> list[Walk]:
        """One walk."""
        left = self._hops - counted[HOPS]
        hops = min(rng.randint(_LEAST_HOPS, _MOST_HOPS), left)
        return [random_walk(rng, hops, ("", *self._versions))] if left > 0 else []

    def run(self, cases: Sequence[Walk], extensions_dir: str) -> list[Outcome]:
        """The hops of each that went well, and what went wrong at the next one, if anything did."""
        for version in {stop.deepspeed for walk in cases for stop in walk.stops} - {"", *self._built}:
            run_ranks(1, "soak_jobs.start", None, extensions_of(version, extensions_dir), 900, version)
            self._built.add(version)
        return [_walked(walk, extensions_dir) for walk in cases]

    def reduced(self, case: Walk, outcome: Outcome, run: Callable[[Walk], Outcome]) -> tuple[Walk, Outcome]:
        """The shortest walk that fails at its last stop."""
        last = [outcome]

        def fails(other: Walk) -> bool:
            now = run(other)
            if now.wrong and now.counted[HOPS] == other.hops - 1:
                last.append(now)
                return True
            return False

        to_the_failure = Walk(case.family, case.stops[: outcome.counted[HOPS] + 2])
        return shortened(to_the_failure, fails), last[-1]

    def written(self, case: Walk) -> str:
        """As JSON."""
        return case.as_json()

    def read(self, text: str) -> Walk:
        """Of JSON."""
        return walk_of(text)


def _walked(walk: Walk, extensions_dir: str) -> Outcome:
    """Visit all stops of a walk."""
    done = 0
    with tempfile.TemporaryDirectory(prefix="soak") as name:
        folder = Path(name)
        for leg in walk.legs():
            first, stop = leg[0]
            extensions = extensions_of(stop.deepspeed, extensions_dir)
            arguments = {"family": walk.family, "stops": leg, "folder": name}
            seconds = 60 + _HOP_SECONDS * len(leg)
            try:
                if stop.universal:
                    convert = {"folder": name, "number": first - 1}
                    run_ranks(1, "soak_jobs.to_universal", convert, extensions_dir, 120)
                found = run_ranks(stop.ranks, "soak_jobs.visit", arguments, extensions, seconds, stop.deepspeed)
            except AssertionError as error:  # a rank ended, or all hang
                done += sum((folder / str(number)).is_dir() for number, _ in leg if number > 0)
                return Outcome(Counter({HOPS: done}), str(error))
            wrong = next((wrong for _, wrong in found if wrong), None)
            done += len({number for number, wrong in found if number > 0 and not wrong})
            if wrong is not None:
                return Outcome(Counter({HOPS: done}), "\n".join(f"{what}: {how}" for what, how in wrong.items()))
            for old in folder.glob("*"):
                if not old.name.startswith(f"{leg[-1][0]}"):
                    shutil.rmtree(old)
    return Outcome(Counter({HOPS: done}), more=walk.family)


def extensions_of(deepspeed: str, extensions_dir: str) -> str:
    """Where the DeepSpeed of a folder builds its extensions: each version elsewhere."""
    folder = Path(extensions_dir, os.path.basename(deepspeed))
    folder.mkdir(exist_ok=True)
    return str(folder)

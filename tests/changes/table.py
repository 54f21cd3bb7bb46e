"""Changes for :mod:`tests.drawn`: each is saved by one set of processes, and loaded by another."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.changes.draw import RANKS, Change, as_json, change_of, is_possible, random_change, simpler
from tests.distributed.change_jobs import REFUSED, REMEDIED, RIGHT, VOID
from tests.distributed.launch import run_ranks
from tests.drawn import Outcome, plainest_with_outcome

#: Changes of one set of processes, and seconds that it gets for each.
_CHANGES, _SECONDS = 16, 12


class Table:
    """Of changes.

    Args:
        spoils: whether each load is compared with what was not saved, so that it must be wrong.
    """

    def __init__(self, spoils: bool = False) -> None:
        self._spoils = spoils

    def drawn(self, rng: random.Random, _counted: Counter[str]) -> list[Change]:
        """Changes of the same numbers of ranks."""
        saved_ranks = rng.choice(RANKS)
        ranks = saved_ranks if rng.random() < 0.6 else rng.choice(RANKS)
        return [random_change(rng, saved_ranks, ranks) for _ in range(_CHANGES)]

    def run(self, cases: Sequence[Change], extensions_dir: str, asks_deepspeed: bool = True) -> list[Outcome]:
        """What became of each; where processes end or hang, each is run alone, and then without DeepSpeed's own loader."""
        with tempfile.TemporaryDirectory(prefix="changes") as folder:
            work = [(case, os.path.join(folder, str(number))) for number, case in enumerate(cases)]
            seconds = 60 + _SECONDS * len(work)
            step = "save"
            try:
                errors = self._of_first_rank(cases[0].saved_ranks, "save_each", work, extensions_dir, seconds)
                step = "load"
                loaded = [each for each, error in zip(work, errors, strict=True) if not error]
                found: list[Any] = []
                if loaded:
                    found = self._of_first_rank(
                        cases[0].ranks, "load_each", loaded, extensions_dir, seconds, asks_deepspeed
                    )
            except AssertionError as error:
                if len(cases) > 1:
                    return [outcome for case in cases for outcome in self.run([case], extensions_dir)]
                if asks_deepspeed and step == "load":  # which may hang where one rank has raised
                    return self.run(cases, extensions_dir, asks_deepspeed=False)
                return [_outcome(cases[0], VOID if step == "save" else f"ranks end or hang: {error}", "")]
        results = iter(found)
        outcomes = []
        for case, error in zip(cases, errors, strict=True):
            what, more = (VOID, f"save: {error}") if error else next(results)
            outcomes.append(_outcome(case, what, more))
        return outcomes

    def _of_first_rank(
        self,
        ranks: int,
        job: str,
        work: list[tuple[Change, str]],
        extensions_dir: str,
        seconds: int,
        asks_deepspeed: bool = True,
    ) -> list[Any]:
        arguments = {"changes": work, "spoils": self._spoils, "asks_deepspeed": asks_deepspeed}
        return run_ranks(ranks, f"change_jobs.{job}", arguments, extensions_dir, seconds)[: len(work)]

    def reduced(self, case: Change, outcome: Outcome, run: Callable[[Change], Outcome]) -> tuple[Change, Outcome]:
        """The change with as little to it as it needs to fail."""
        return plainest_with_outcome(case, outcome, lambda other: filter(is_possible, simpler(other)), run)

    def written(self, case: Change) -> str:
        """As JSON."""
        return as_json(case)

    def read(self, text: str) -> Change:
        """Of JSON."""
        return change_of(text)


def _outcome(case: Change, what: str, more: str) -> Outcome:
    """Counted by what became of it and by what was changed."""
    if what not in (VOID, RIGHT, REFUSED, REMEDIED):
        return Outcome(Counter(), wrong=what, more=more)
    kinds = Counter({f"{kind}: {what}": 1 for kind in case.kinds})
    return Outcome(Counter({what: 1}) + kinds, more=f"{what}: {more}")

"""Flows for :mod:`tests.drawn`: each is run with DeepSpeed alone and with elastic_ckpt."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed.flow_jobs import REFUSED, RIGHT, VOID
from tests.distributed.launch import run_ranks
from tests.drawn import Outcome, plainest_with_outcome
from tests.flows.draw import EngineFlow, Flow, TrainerFlow, flow_of, random_flow, simpler
from tests.flows.parts import choices, is_possible

#: Flows of one set of processes by their kind, and seconds that it gets for each.
_FLOWS, _SECONDS = {EngineFlow: 24, TrainerFlow: 8}, 20


class Table:
    """Of flows.

    Args:
        every: see ``parts.choices``.
    """

    def __init__(self, every: bool = True) -> None:
        self._every = every

    def drawn(self, rng: random.Random, _counted: Counter[str]) -> list[Flow]:
        """Flows of as many ranks, for one set of processes."""
        kind = rng.choices((EngineFlow, TrainerFlow), (3, 1))[0]
        some = dict(choices(kind, self._every))
        some["ranks"] = (rng.choice(some["ranks"]),)
        return [random_flow(rng, kind, some, is_possible) for _ in range(_FLOWS[kind])]

    def run(self, cases: Sequence[Flow], extensions_dir: str) -> list[Outcome]:
        """What happened to each of some flows that have as many ranks; see ``flow_jobs.run``."""
        found: list[Outcome] = []
        while len(found) < len(cases):
            rest = cases[len(found) :]
            with tempfile.TemporaryDirectory(prefix="flows") as folder:
                log, words = Path(folder, "log"), ""
                log.touch()
                arguments = {"flows": list(rest), "folder": folder, "log": str(log)}
                try:
                    run_ranks(rest[0].ranks, "flow_jobs.all_of", arguments, extensions_dir, 30 + _SECONDS * len(rest))
                except AssertionError as error:  # a rank ended, or all hang
                    words = str(error)
                lines = [json.loads(line) for line in log.read_text().splitlines()]
            found += [_outcome(what, more) for _, kind, what, *rest_of in lines if kind == "done" for more in rest_of]
            if words and lines and lines[-1][1] == "begin":
                is_ours = lines[-1][2] == "elastic_ckpt"
                found.append(_outcome(f"ranks end or hang: {words}", "") if is_ours else _outcome(VOID, words))
            elif words:
                found.append(_outcome(f"no flow ran: {words}", ""))
        return found

    def reduced(self, case: Flow, outcome: Outcome, run: Callable[[Flow], Outcome]) -> tuple[Flow, Outcome]:
        """The flow with as few choices as it needs to fail."""
        return plainest_with_outcome(case, outcome, lambda other: filter(is_possible, simpler(other)), run)

    def written(self, case: Flow) -> str:
        """As JSON."""
        return case.as_json()

    def read(self, text: str) -> Flow:
        """Of JSON."""
        return flow_of(text)


def _outcome(what: str, more: str) -> Outcome:
    """Of what ``flow_jobs.run`` answers."""
    if what in (VOID, RIGHT, REFUSED):
        return Outcome(Counter({what: 1}), more=more)
    return Outcome(Counter(), wrong=what, more=more)

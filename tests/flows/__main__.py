"""``python -m tests.flows --minutes M --seed S``: random flows, each with DeepSpeed alone and with elastic_ckpt.

One that fails is reduced to the choices that it needs, and the command that repeats it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.distributed.flow_jobs import REFUSED, RIGHT, VOID
from tests.distributed.launch import close_zygotes, run_ranks
from tests.flows.draw import EngineFlow, Flow, TrainerFlow, flow_of, random_flow, reduced
from tests.flows.parts import choices, is_possible

#: Flows of one set of processes by their kind, and seconds that it gets for each.
_FLOWS, _SECONDS = {EngineFlow: 24, TrainerFlow: 8}, 20


def run_flows(flows: Sequence[Flow], extensions_dir: str) -> list[tuple[str, str]]:
    """What happened to each of some flows that have as many ranks; see ``flow_jobs.run``."""
    found: list[tuple[str, str]] = []
    while len(found) < len(flows):
        rest = flows[len(found) :]
        with tempfile.TemporaryDirectory(prefix="flows") as folder:
            log, words = Path(folder, "log"), ""
            log.touch()
            arguments = {"flows": list(rest), "folder": folder, "log": str(log)}
            try:
                run_ranks(rest[0].ranks, "flow_jobs.all_of", arguments, extensions_dir, 30 + _SECONDS * len(rest))
            except AssertionError as error:  # a rank ended, or all hang
                words = str(error)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
        found += [(what, more) for _, kind, what, *rest_of in lines if kind == "done" for more in rest_of]
        if words and lines and lines[-1][1] == "begin":
            is_ours = lines[-1][2] == "elastic_ckpt"
            found.append((f"ranks end or hang: {words}", "") if is_ours else (VOID, words))
        elif words:
            found.append((f"no flow ran: {words}", ""))
    return found


def is_wrong(what: str) -> bool:
    """Whether elastic_ckpt failed."""
    return what not in (VOID, RIGHT, REFUSED)


def report_of(flow: Flow, what: str, extensions_dir: str) -> str:
    """What goes wrong in the plainest flow that fails as this one did, and its command."""
    last = [what]

    def fails(other: Flow) -> bool:
        if not is_possible(other):
            return False
        ((now, _),) = run_flows([other], extensions_dir)
        if is_wrong(now):
            last.append(now)
        return is_wrong(now)

    plainest = reduced(flow, fails)
    return f"FAILED: {last[-1]}\npython -m tests.flows --flow '{plainest.as_json()}'"


def draw(seconds: float, seed: int, extensions_dir: str, every: bool = True) -> tuple[Counter[str], list[str]]:
    """Flows for so many seconds: how many ended how, and a report of each failure; ``every``: see ``parts.choices``."""
    limit, rng = time.monotonic() + seconds, random.Random(seed)
    counted: Counter[str] = Counter()
    failures: list[str] = []
    while time.monotonic() < limit:
        kind = rng.choices((EngineFlow, TrainerFlow), (3, 1))[0]
        some = dict(choices(kind, every))
        some["ranks"] = (rng.choice(some["ranks"]),)
        flows = [random_flow(rng, kind, some, is_possible) for _ in range(_FLOWS[kind])]
        for flow, (what, more) in zip(flows, run_flows(flows, extensions_dir), strict=True):
            counted["wrong" if is_wrong(what) else what] += 1
            if is_wrong(what):
                failures.append(report_of(flow, what, extensions_dir))
                print(failures[-1], flush=True)
            elif what == VOID and "-v" in sys.argv:
                print(flow.as_json(), more[:300], flush=True)
        print(dict(counted), flush=True)
    return counted, failures


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a flow failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.flows", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--flow", help="repeat this one, as a failure printed it")
    parser.add_argument("--common", action="store_true", help="without the hundred rarest optimizers")
    parser.add_argument("-v", action="store_true", help="print what DeepSpeed alone does not complete")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as own:
        extensions_dir = os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS") or own
        try:
            if options.flow:
                ((what, more),) = run_flows([flow_of(options.flow)], extensions_dir)
                print(f"{what}\n{more}")
                return int(is_wrong(what))
            print(f"seed {options.seed}", flush=True)
            counted, failures = draw(60 * options.minutes, options.seed, extensions_dir, not options.common)
        finally:
            close_zygotes()
    print(f"{counted.total()} flows, {dict(counted)}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

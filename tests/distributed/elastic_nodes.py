"""Nodes of a torchrun job that are killed and join, and what became of every sample.

``python -m tests.distributed.elastic_nodes --minutes 10 --png docs/images/nodes.png`` does so at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ckpt.data import ElasticSampler
from tests.distributed.launch import end, environment, free_port, start
from tests.distributed.nodes_script import BATCH, LENGTH, PACE, SEED

#: What torchrun waits for a lost node, and for others once it has the least number.
_RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


class Nodes:
    """torchrun agents of one rank each; the first has the rendezvous, and is not to be lost."""

    def __init__(self, folder: Path, steps: int, most: int, extensions_dir: str, **variables: str) -> None:
        self.folder, self._steps, self._most, self.agents = folder, steps, most, list[subprocess.Popen[bytes]]()
        # else torch 2.13 has a node that joins wait for an address that the first rank has written once, for others
        self._env = environment(extensions_dir) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LOGLEVEL": "INFO"}
        self._env |= variables
        self._endpoint, self.logs = f"localhost:{free_port()}", list[Path]()

    def begin(self, others: int, **more: str) -> None:
        """Start some, with more of an environment, that wait for the first one; and that."""
        for _ in range(others):
            self.join(**more)
            self.wait(lambda: "Starting elastic_operator" in self.logs[-1].read_text(), 60)
        self.join(is_host=True)
        self.agents.insert(0, self.agents.pop())

    def join(self, is_host: bool = False, **more: str) -> None:
        """Start one more."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{self._most}", "--nproc-per-node=1"]
        command += [
            "--max-restarts=99",
            "--rdzv-backend=c10d",
            "--rdzv-id=elastic",
            f"--rdzv-endpoint={self._endpoint}",
        ]
        command += [f"--rdzv-conf=is_host={int(is_host)},{_RENDEZVOUS}"]
        command += ["-m", "tests.distributed.nodes_script", str(self.folder), str(self._steps)]
        self.logs.append(self.folder / f"agent{len(self.logs)}.log")
        self.agents.append(start(command, self._env | more, self.logs[-1]))

    def lose(self, number: int) -> None:
        """Kill one; its rank goes with it."""
        end(self.agents.pop(number))

    def wait(self, has_come: Callable[[], bool], seconds: float) -> None:
        """Wait for something; an error with what was printed if it does not come."""
        limit = time.monotonic() + seconds
        while not has_come():
            if self.agents[0].poll() not in (None, 0) or time.monotonic() > limit:
                raise AssertionError("\n".join(f"--- {log}\n{log.read_text()[-4000:]}" for log in self.logs))
            time.sleep(0.05)

    @property
    def has_ended(self) -> bool:
        """Whether the first one has come to the end."""
        return self.agents[0].poll() == 0

    def close(self) -> None:
        """End them all."""
        while self.agents:
            end(self.agents.pop())


@dataclass(frozen=True)
class Outcome:
    """What became of a job: by step, ranks and loss; of all samples, in the order of steps; and how often it began."""

    worlds: dict[int, int]
    losses: dict[int, float]
    samples: list[int]
    starts: int

    @property
    def lost_or_twice(self) -> int:
        """How many of the samples are not those of an uninterrupted run, each once."""
        order = ElasticSampler(LENGTH, seed=SEED, num_replicas=1, rank=0).order(0)[: len(self.worlds) * BATCH].tolist()
        return len(set(order) ^ set(self.samples)) + len(self.samples) - len(set(self.samples))


def outcome_of(folder: Path) -> Outcome:
    """Of each step, what the last start that trained it noted; an earlier one was not saved."""
    noted: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            note = json.loads(line)
            noted.setdefault(note["step"], {}).setdefault(note["start"], []).append(note)
    last = {step: by_start[max(by_start)] for step, by_start in sorted(noted.items())}
    samples = [number for notes in last.values() for note in notes for of in note["samples"] for number in of]
    losses, worlds = ({step: notes[0][key] for step, notes in last.items()} for key in ("loss", "world"))
    return Outcome(worlds, losses, samples, len({start for by_start in noted.values() for start in by_start}))


def at_random(nodes: Nodes, minutes: float, seed: int) -> list[str]:
    """Kill and add nodes until the job ends; what was done."""
    chance, began, done = random.Random(seed), time.monotonic(), list[str]()
    nodes.begin(0)
    while not nodes.has_ended:
        pause = time.monotonic() + chance.uniform(30, 70)
        nodes.wait(lambda pause=pause: nodes.has_ended or time.monotonic() > pause, 60 * minutes + 600)
        joins = len(nodes.agents) == 1 or (len(nodes.agents) < 3 and chance.random() < 0.5)
        if not nodes.has_ended and time.monotonic() - began < 60 * minutes:
            nodes.join() if joins else nodes.lose(chance.randrange(1, len(nodes.agents)))
            done.append(f"{time.monotonic() - began:.0f} s: a node {'joins' if joins else 'is lost'}")
    return done


def draw(outcome: Outcome, uninterrupted: Outcome, png: Path) -> None:
    """Losses over each other, their difference, and the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, middle, below) = pyplot.subplots(
        3, 1, sharex=True, figsize=(10, 6.4), height_ratios=(3, 1, 1), layout="constrained"
    )
    steps = list(outcome.losses)
    figure.suptitle(
        f"{outcome.starts} starts of one job, {len(outcome.samples):,} samples, each once", x=0.01, ha="left"
    )
    above.plot(steps, list(uninterrupted.losses.values()), color="#9fb8d6", linewidth=5, label="uninterrupted, 1 rank")
    above.plot(steps, list(outcome.losses.values()), color="#d1495b", linewidth=1, label="nodes killed and joined")
    above.legend(frameon=False)
    above.set_ylabel("loss")
    apart = [abs(loss - uninterrupted.losses[step]) for step, loss in outcome.losses.items()]
    middle.semilogy(steps, [max(each, 1e-9) for each in apart], color="#d1495b", linewidth=0.6)
    middle.set_ylabel("difference")
    below.step(steps, list(outcome.worlds.values()), color="#1f2933", where="mid")
    below.set_ylabel("ranks")
    below.set_yticks(sorted(set(outcome.worlds.values())))
    below.set_xlabel("step")
    for axes in (above, middle, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, dpi=110)


def main() -> None:
    """Kill and add nodes at random, then run uninterrupted; compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--pace", type=float, default=0.2, help="seconds of a step, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    steps = int(60 * arguments.minutes / arguments.pace / 4)
    folder, alone = (Path(tempfile.mkdtemp(prefix="elastic_nodes_")) for _ in range(2))
    extensions = os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS") or tempfile.mkdtemp()
    nodes = Nodes(folder, steps, 3, extensions, **{PACE: str(arguments.pace)})
    try:
        print(*at_random(nodes, arguments.minutes, arguments.seed), sep="\n")
    finally:
        nodes.close()
    reference = Nodes(alone, steps, 1, extensions)
    try:
        reference.begin(0)
        reference.wait(lambda: reference.has_ended, 3600)
    finally:
        reference.close()
    outcome, uninterrupted = outcome_of(folder), outcome_of(alone)
    worst = max(abs(loss - uninterrupted.losses[step]) for step, loss in outcome.losses.items())
    print(f"{outcome.starts} starts, {len(outcome.losses)} steps, {len(outcome.samples)} samples")
    print(f"lost or twice: {outcome.lost_or_twice}; largest difference of a loss: {worst:.2e}")
    if arguments.png:
        draw(outcome, uninterrupted, arguments.png)
    sys.exit(bool(outcome.lost_or_twice or list(outcome.losses) != list(range(1, steps + 1))))


if __name__ == "__main__":
    main()

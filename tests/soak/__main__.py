"""``python -m tests.soak --minutes M --seed S``: random walks over topologies, each hop compared bit by bit.

A walk trains a few steps, saves, loads that on another topology, and so on. One that fails is shortened, and the command
that repeats it is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.distributed.launch import close_zygotes, run_ranks
from tests.soak.walk import Walk, random_walk, shortened, walk_of

#: Hops of one walk, and seconds that one set of processes gets for each.
_LEAST_HOPS, _MOST_HOPS, _HOP_SECONDS = 4, 10, 90


def run_walk(walk: Walk, extensions_dir: str) -> tuple[int, str]:
    """Visit all stops of a walk: the hops that went well, and what went wrong at the next one, if anything did."""
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
                return done, str(error)
            wrong = next((wrong for _, wrong in found if wrong), None)
            done += len({number for number, wrong in found if number > 0 and not wrong})
            if wrong is not None:
                return done, "\n".join(f"{what}: {how}" for what, how in wrong.items())
            for old in folder.glob("*"):
                if not old.name.startswith(f"{leg[-1][0]}"):
                    shutil.rmtree(old)
    return done, ""


def extensions_of(deepspeed: str, extensions_dir: str) -> str:
    """Where the DeepSpeed of a folder builds its extensions: each version elsewhere."""
    folder = Path(extensions_dir, os.path.basename(deepspeed))
    folder.mkdir(exist_ok=True)
    return str(folder)


def soak(
    hops: int, seconds: float, seed: int, extensions_dir: str, versions: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """Walk until so many hops are done or so many seconds are over: hops that went well, and a report of each failure."""
    for version in versions:
        run_ranks(1, "soak_jobs.start", None, extensions_of(version, extensions_dir), 900, version)
    limit, done, number = time.monotonic() + seconds, 0, 0
    failures = []
    while done < hops and time.monotonic() < limit:
        rng = random.Random(f"{seed} {number}")
        walk = random_walk(rng, min(rng.randint(_LEAST_HOPS, _MOST_HOPS), hops - done), ("", *versions))
        well, wrong = run_walk(walk, extensions_dir)
        done, number = done + well, number + 1
        print(f"walk {number}, {walk.family}: {well} of {walk.hops} hops, {done} in all", flush=True)
        if wrong:
            failures.append(report_of(walk, well, wrong, extensions_dir))
            print(failures[-1], flush=True)
    return done, failures


def report_of(walk: Walk, well: int, wrong: str, extensions_dir: str) -> str:
    """The shortest walk that fails as this one did after so many hops, what goes wrong there, and its command."""
    last_words = [wrong]

    def fails(other: Walk) -> bool:
        hops, words = run_walk(other, extensions_dir)
        if words and hops == other.hops - 1:
            last_words.append(words)
            return True
        return False

    shortest = shortened(Walk(walk.family, walk.stops[: well + 2]), fails)
    return f"FAILED: {last_words[-1]}\npython -m tests.soak --walk '{shortest.as_json()}'"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a walk failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--hops", type=int, default=sys.maxsize, help="end after so many, if that is earlier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--deepspeed", action="append", default=[], help="folder with another version, .matrix/deepspeed-*"
    )
    parser.add_argument("--walk", help="repeat this one, as a failure printed it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as own:
        extensions_dir = os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS") or own
        try:
            if options.walk:
                hops, wrong = run_walk(walk_of(options.walk), extensions_dir)
                print(f"{hops} hops went well\n{wrong}")
                return int(bool(wrong))
            folders = [os.path.abspath(folder) for folder in options.deepspeed]
            hops, failures = soak(options.hops, 60 * options.minutes, options.seed, extensions_dir, folders)
        finally:
            close_zygotes()
    print(f"{hops} hops went well, {len(failures)} failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

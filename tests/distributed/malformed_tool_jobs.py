"""The commands and ``elastic_ckpt.open`` on checkpoints whose files were changed: a job of one rank, for :mod:`jobs`."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.export import export
from elastic_ckpt.tools.latest import find_latest
from elastic_ckpt.tools.verification import verify
from tests.distributed import jobs
from tests.distributed import truth as oracle
from tests.distributed.malformed import broken, broken_tools, outcome
from tests.distributed.malformed_files import TENSORS, Runs, drawn


def judge_each(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What commands make of changed copies of ``folder``: how many were ``refused``, and ``problems`` in words.

    ``seed`` and ``count`` of what is drawn; ``<folder>-other`` is another save.
    """
    folder, problems, refused = Path(case["folder"]), list[str](), 0
    other = folder.with_name(f"{folder.name}-other")
    whole = values_of(str(folder))
    problems += [f"unchanged: {problem}" for problem in (*broken(folder), *broken_tools(folder, folder))]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        changes = drawn(folder, other if other.exists() else None, case["seed"], case["count"])
        for change in [*changes][slice(*case.get("some", (None,)))]:
            print(change, flush=True)
            copy = Path(shutil.copytree(folder, Path(scratch) / "c", copy_function=os.link))
            if not jobs.SPOILS:
                change.apply(copy)
            found = [*broken(copy), *broken_tools(copy, folder)]
            what, values = outcome(lambda copy=copy: values_of(str(copy)))
            refused += what == "refused"
            found += [f"open: {values}"] if what == "broke" else []
            if what == "ok" and TENSORS[0] in change.exact and values != whole:
                found.append(f"open reads other values of {sorted(map(str, values.items() ^ whole.items()))}")
            if os.path.exists(Runs.MARK):
                os.rmdir(Runs.MARK)
                found.append("code ran")
            problems += [f"{change}: {problem}" for problem in found]
            for problem in found:
                print(f"-- {case.get('name')} {change}: {problem}", flush=True)
            shutil.rmtree(copy)
        os.chdir("/")
    return [SimpleNamespace(refused=refused, problems=problems)]


def on_one_rank(case: dict[str, Any]) -> list[bool]:
    """On the last rank alone, between collectives of all: whether what ``elastic_ckpt.open`` reads is what all ranks read.

    The other commands open a checkpoint in the same way.
    """
    found, everybody = {}, values_of(case["folder"])
    if dist.get_rank() == dist.get_world_size() - 1 and not jobs.SPOILS:
        found = values_of(case["folder"])
        assert verify(case["folder"], None, ElasticConfig(), full=True).ok
        assert find_latest(case["folder"])
        export(case["folder"], case["scratch"], progress=False)
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, dist.get_rank())
    assert numbers == [*range(len(numbers))]
    return [found == everybody] if found or jobs.SPOILS else []


def values_of(folder: str) -> dict[tuple[str, str], str]:
    """Hashes of all that ``elastic_ckpt.open`` reads, by name and key."""
    checkpoint = elastic_ckpt.open(folder)
    found = {(name, ""): oracle._digest([value]) for name, value in checkpoint.items()}
    for name in checkpoint:
        try:
            states = checkpoint.optimizer_state(name)
        except KeyError:  # a buffer, or a parameter that no optimizer has
            continue
        found |= {(name, key): oracle._digest([value]) for key, value in states.items()}
    return found

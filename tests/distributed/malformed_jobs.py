"""Real loads of checkpoints in which one entry has another value: ``malformed_jobs.<function>`` of :mod:`jobs`."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError, PartialLoadError, UnforeseenError
from elastic_ckpt.tools.latest import find_latest
from tests.distributed import jobs
from tests.distributed.malformed import Path_, cells, changed, outcome, saved_files, with_change
from tests.distributed.model import Setup, TinyLM, build_engine, close
from tests.distributed.truth import fingerprint


def load_each(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load changed copies of a checkpoint on one rank: how many were ``refused``, and ``problems`` in words.

    ``case``: ``setup`` of the save, which this job makes, and ``live`` of the engine; ``left``: whether the files are
    such that elastic_ckpt leaves them to DeepSpeed's own loader; ``arguments`` of the loads; ``changes``: (file, place, way) of each, or ``seed``,
    ``count`` and ``depth`` of those to draw.
    """
    elastic_ckpt.install()
    setup, problems, tried, refused = case["setup"], list[str](), 0, 0
    engine = build_engine(case["live"], TinyLM(seed=8))
    with tempfile.TemporaryDirectory() as folder:
        jobs.save({"folder": folder, "setups": [setup], "truth": False})
        source = Path(folder) / f"{setup.name}-dp{dist.get_world_size()}"
        if case.get("left"):
            _leave_to_deepspeed(source)
        for name, place, way, tree in _changes_of(case, source):
            tried += 1
            with contextlib.nullcontext(source) if jobs.SPOILS else with_change(source, name, tree) as target:
                problem, is_spent = loaded(engine, str(target), case.get("arguments", {}))
            refused += not is_spent
            if is_spent:
                close(engine)
                engine = build_engine(case["live"], TinyLM(seed=8))
            if problem:
                problems.append(f"{name} {place} <- {way}: {problem}")
                print(f"-- {setup.name} {problems[-1]}", flush=True)
    close(engine)
    print(f"{tried} loads, {refused} refused, {len(problems)} broke", flush=True)
    return [SimpleNamespace(refused=refused, problems=problems)]


def _leave_to_deepspeed(folder: Path) -> None:
    """Take an entry out of the model-states files without which elastic_ckpt does not understand them."""
    for name, tree in saved_files(folder).items():
        if "model_states" in name:
            del tree["buffer_names"]
            (folder / name).unlink()
            torch.save(tree, folder / name)


def _changes_of(case: dict[str, Any], source: Path) -> Iterator[tuple[str, Path_, str, Any]]:
    if "changes" not in case:
        yield from cells(source, case["seed"], case["count"], of_user=True, depth=case.get("depth"))
        return
    trees = saved_files(source)
    for name, place, way in case["changes"]:
        yield name, place, way, changed(trees[name], place, way)


def loaded(engine: Any, folder: str, arguments: dict[str, bool]) -> tuple[str, bool]:
    """What is wrong with how a folder is loaded, and whether the engine may be as no engine is."""
    before = fingerprint(engine)
    what, found = outcome(lambda: engine.load_checkpoint(folder, **arguments))
    if what == "broke" or isinstance(found, (PartialLoadError, UnforeseenError)):
        return f"load: {found}", True
    if what == "refused" and before != (after := fingerprint(engine)):
        return f"refused, but changed {[key for key in before if before[key] != after[key]]}: {found}", True
    if arguments:  # `latest` judges for a load of everything
        return f"refused: {found}" if what == "refused" else "", what == "ok"
    try:
        newest = find_latest(folder)
    except ElasticCkptError as error:
        return (f"loaded, but latest: {error}", True) if what == "ok" else ("", False)
    if what == "refused" and found.proves_damage:
        return f"latest takes {os.path.basename(newest)}, but a load: {found}", False
    return "", what == "ok"


def main() -> None:
    """``python -m tests.distributed.malformed_jobs``: loads, in this process."""
    options = argparse.ArgumentParser()
    options.add_argument("--stage", type=int, default=1)
    options.add_argument("--precision", default="fp32")
    options.add_argument("--live", type=int, help="ZeRO stage of the engine; of the save, if not given")
    options.add_argument("--left", action="store_true", help="files that are left to DeepSpeed's own loader")
    options.add_argument("--depth", type=int, help="of entries below a file's top; any, if not given")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--count", type=int, default=300)
    given = options.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    live = given.stage if given.live is None else given.live
    setups = {"setup": Setup(given.stage, given.precision), "live": Setup(live, given.precision)}
    jobs.run("malformed_jobs.load_each", {**vars(given), **setups})


if __name__ == "__main__":
    main()

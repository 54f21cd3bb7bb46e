"""Checkpoints in which one entry of DeepSpeed's own has another value: every command says so, in words, or is right.

``python -m tests.distributed.malformed FOLDER ...`` tries every change of every file of some checkpoints, and prints
what broke (``--tools``: also of what ``convert``, ``export`` and ``diff`` make of them); tests draw a few hundred. Real
loads: ``python -m tests.distributed.malformed_jobs``. The user's client state is left alone: it may be anything.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ElasticCkptError, UnforeseenError
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.tools.comparison import compare, open_both
from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.conversion.dcp import convert_to_dcp
from elastic_ckpt.tools.export import export
from elastic_ckpt.tools.inspection import inspect_folder
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.verification import verify
from elastic_ckpt.tools.virtual import Topology, VirtualJob

Path_ = tuple[Any, ...]
#: What DeepSpeed saves of the user's, of a schedule, and of the run's config, in which options are free.
NOT_DEEPSPEEDS = frozenset({"note", "epoch", "rng", "tensor", "sampler", "client"})
#: Takes the place of any entry. None is what DeepSpeed writes there, but where it is an entry's default.
VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "7": 7,
    "2 ** 70": 1 << 70,
    "-(2 ** 70)": -(1 << 70),
    "beyond a double": 1 << 8000,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "no text": "",
    "text": "x",
    "bytes": b"x",
    "[]": [],
    "{}": {},
    "()": (),
    "[None]": [None],
    "[[]]": [[]],
    "{'x': None}": {"x": None},
    "{1: 2}": {1: 2},
    "range": range(3),
    "complex": 1 + 2j,
    "a set": {1},
    "a namespace": argparse.Namespace(x=1),
    "a size": torch.Size((8, 8)),
    "a dtype": torch.float32,
    "a number's tensor": torch.tensor(3.0),
    "a tensor": torch.arange(3.0),
    "2 x 2": torch.zeros(2, 2),
    "no elements": torch.zeros(0),
    "integers": torch.zeros(3, dtype=torch.int64),
    "complex numbers": torch.zeros(3, dtype=torch.complex64),
    "booleans": torch.zeros(3, dtype=torch.bool),
}
#: Arrays of numpy's, whose dtypes its own code trusts.
ARRAYS: dict[str, Any] = {
    "an array": np.arange(3),
    "text in an array": np.array(["ab", "c"]),
    "no code points": np.array([0x7FFFFFFF, 0x110000], dtype="<u4").view("<U2"),
    "bytes in an array": np.array([b"a", b"bc"]),
    "times": np.array([3, 4], dtype="datetime64[s]"),
    "times of no unit": np.zeros(2, dtype="datetime64"),
    "no time of no unit": np.array(["NaT"], dtype="timedelta64"),
    "of two fields": np.zeros(2, dtype=[("a", "<f4"), ("b", "<i8")]),
    "of opaque items": np.zeros(2, dtype="V4"),
    "a scalar array": np.array(7),
    "a scalar": np.float32(1.5),
    "text of numpy's": np.str_("x"),
    "half": np.zeros(3, dtype=np.float16),
    "of no items": np.zeros((0, 3)),
    "big-endian": np.zeros(3, dtype=">f4"),
    "long": np.zeros(2, dtype=np.longdouble),
}
VALUES |= ARRAYS
REMOVED = "removed"
#: A file of a pipeline layer.
LAYER = re.compile(r"/layer_\d+-model_[^/]*states\.pt$")
#: What is whole, and can be resumed, but not at any topology or precision.
AT_ITS_OWN = re.compile(
    "differs between ranks: each computed it|would lose precision|one value for all|only a load, which knows"
    "|no such job with MoE layers"
)
#: What an entry that is there becomes, if it is of the kind.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "twice as long": lambda old: type(old)([*old, *old]) if type(old) in (list, tuple) and old else ...,
    "one item less": lambda old: type(old)(old[:-1]) if type(old) in (list, tuple) and old else ...,
    "a dictionary": lambda old: dict(enumerate(old)) if type(old) in (list, tuple) else ...,
    "a list": lambda old: [*old.items()] if isinstance(old, dict) else ...,
    "a key of another type": lambda old: {**old, (1, 2): 3} if isinstance(old, dict) else ...,
    "an integer as a key": lambda old: {**old, 77: 3} if isinstance(old, dict) else ...,
    "one entry less": lambda old: dict([*old.items()][:-1]) if isinstance(old, dict) and old else ...,
    "another dtype": lambda old: old.to(torch.float64) if isinstance(old, torch.Tensor) else ...,
    "as integers": lambda old: old.to(torch.int32) if isinstance(old, torch.Tensor) else ...,
    "a dimension more": lambda old: old.clone()[None] if isinstance(old, torch.Tensor) else ...,
    "an element less": lambda old: old.clone().reshape(-1)[:-1].clone() if isinstance(old, torch.Tensor) else ...,
    "as text": lambda old: str(old) if type(old) in (int, float) else ...,
    "as a tensor": lambda old: torch.tensor(old) if type(old) in (int, float) else ...,
    "negative": lambda old: -old - 1 if type(old) in (int, float) else ...,
}
WAYS = (*VALUES, *CHANGES, REMOVED)


def places(node: Any, above: Path_ = (), most_items: int = 2, of_user: bool = False) -> Iterator[Path_]:
    """Paths to the entries of a tree: keys, positions and, as ``"@name"``, attributes; of long lists the first ones.

    ``of_user``: the user's client state, too.
    """
    yield above
    for key, value in _parts(node)[: 64 if isinstance(node, dict) else most_items]:
        if above or of_user or key not in NOT_DEEPSPEEDS:
            yield from places(value, (*above, key), most_items)


def _parts(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return [*node.items()]
    if isinstance(node, (list, tuple)):
        return [*enumerate(node)]
    if hasattr(node, "__dict__") and not isinstance(node, (Enum, torch.Tensor, type)) and not callable(node):
        return [(f"@{name}", value) for name, value in vars(node).items()]
    return []


def changed(tree: Any, place: Path_, way: str, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A tree with another value at a place; ``...``: there is no such change. ``more``: values beside those above."""
    if not place:
        return CHANGES[way](tree) if way in CHANGES else ... if way == REMOVED else {**VALUES, **more}[way]
    key, *rest = place
    is_attribute = isinstance(key, str) and key.startswith("@") and not isinstance(tree, dict)
    old = vars(tree)[key[1:]] if is_attribute else tree[key]
    if not rest and way == REMOVED:
        if is_attribute or not isinstance(tree, dict):
            return ...
        return type(tree)((each, value) for each, value in tree.items() if each != key)
    new = changed(old, tuple(rest), way, more)
    if new is ...:
        return ...
    if isinstance(tree, tuple):
        items = [*tree[:key], new, *tree[key + 1 :]]
        return tuple(items)
    made = copy.copy(tree)
    if is_attribute:
        vars(made)[key[1:]] = new
    else:
        made[key] = new
    return made


def saved_files(folder: Path) -> dict[str, Any]:
    """The trees of a checkpoint's files by their paths in the folder; of many parameters' files, those of one."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    pickled = [name for name in names if name.endswith(".pt") and not name.endswith("truth.pt")]
    first = {os.path.dirname(name): None for name in pickled if "/zero/" in f"/{name}"}
    first = [each for each in first if not each.endswith("zero")][:2]  # type: ignore[assignment]
    kept = [name for name in pickled if os.path.dirname(name) in first or "/zero/" not in f"/{os.path.dirname(name)}/x"]
    kept += [name for name in pickled if name.endswith("zero/optimizer_state.pt") and name not in kept]
    trees = {name: torch.load(folder / name, weights_only=False) for name in kept}
    for name in names:
        if name.endswith(".metadata"):
            trees[name] = pickle.loads((folder / name).read_bytes())
    return trees


@contextlib.contextmanager
def with_change(folder: Path, name: str, tree: Any) -> Iterator[Path]:
    """A copy of the checkpoint in which one file has another tree."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(shutil.copytree(folder, Path(scratch) / "c", copy_function=os.link))
        path = target / name
        path.unlink()
        if name.endswith(".metadata"):
            path.write_bytes(pickle.dumps(tree))
        else:
            torch.save(tree, path)
        yield target


def outcome(doing: Callable[[], Any]) -> tuple[str, Any]:
    """``ok`` and a result, ``refused`` and the error, or ``broke`` and what happened."""
    try:
        return "ok", doing()
    except UnforeseenError as error:
        return "broke", f"{error.problem}, {error.found}"
    except ElasticCkptError as error:
        str(error)
        return "refused", error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{os.path.basename(each.filename)}:{each.lineno}" for each in reversed(frames))
        return "broke", f"{type(error).__name__}: {error} at {where}"


def planned(folder: str, zero_stage: int) -> None:
    """The plans of all ranks of a job of three."""
    opened, config = open_folder(folder, None, ElasticConfig()), ElasticConfig()
    job = VirtualJob(
        opened.metadata, Topology(dp=3, zero_stage=zero_stage), LoadOptions(config, ShardingRules.of(config))
    )
    for rank in range(3):
        job.planned(rank)


def shown(folder: str, *words: str) -> None:
    """What a command prints; raises what it lets through."""
    result = CliRunner().invoke(app, [words[0], folder, *words[1:]])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def broken(folder: Path) -> list[str]:
    """What is wrong with how the commands judge a folder."""
    text = str(folder)
    doings = {
        "inspect": lambda: inspect_folder(text, None, ElasticConfig()),
        "plan z1": lambda: planned(text, 1),
        "plan z3": lambda: planned(text, 3),
        "inspect shown": lambda: shown(text, "inspect", "--params"),
        "plan shown": lambda: shown(text, "plan", "--dp", "2"),
        "verify": lambda: verify(text, None, ElasticConfig(), full=True),
    }
    found = {name: outcome(doing) for name, doing in doings.items()}
    problems = [f"{name}: {found[name][1]}" for name in found if found[name][0] == "broke"]
    is_whole = found["verify"][0] == "ok" and found["verify"][1].ok
    for name in ("inspect", "plan z1", "plan z3"):
        if is_whole and found[name][0] == "refused" and not AT_ITS_OWN.search(str(found[name][1])):
            problems.append(f"verify says ok, but {name}: {type(found[name][1]).__name__}: {found[name][1]}")
    return problems


def broken_tools(folder: Path, original: Path) -> list[str]:
    """What is wrong with what is made of a folder: by ``convert``, ``export``, and ``diff`` from the original."""
    text, config = str(folder), ElasticConfig()
    with tempfile.TemporaryDirectory() as scratch:
        universal, dcp, exported = (os.path.join(scratch, name) for name in ("universal", "dcp", "exported"))
        doings = {
            "convert": lambda: convert(open_folder(text, None, config), Path(universal)),
            "convert to dcp": lambda: convert_to_dcp(open_folder(text, None, config), Path(dcp), False),
            "export": lambda: export(text, exported, optimizer=True, config=config, progress=False),
            "diff": lambda: compare(*open_both(str(original), text, config)[:2], 1, False),
            "diff shown": lambda: shown(text, "diff", str(original)),
            "diff as JSON": lambda: shown(text, "diff", str(original), "--json"),
            "explain shown": lambda: shown(text, "explain", str(original)),
        }
        found = {name: outcome(doing) for name, doing in doings.items()}
        problems = [f"{name}: {found[name][1]}" for name in found if found[name][0] == "broke"]
        found_wrong, of_source = outcome(lambda: verify(text, None, config, full=True))
        of_written = dict[str, Any]()
        for name, path in (("convert", universal), ("convert to dcp", dcp)):
            if found[name][0] == "ok":
                of_written[name] = outcome(lambda path=path: verify(path, None, config, full=True))
    if found_wrong == "broke":
        problems.append(f"verify: {of_source}")
    findings = of_source.findings if found_wrong == "ok" else ()  # refused: there is none to verify
    # what is converted are masters, by which the weights in files of layers can be made again
    proven = [each for each in findings if not each.suspected and not LAYER.search(each.file or "")]
    for name, (what, result) in of_written.items():
        if what != "ok" or not result.ok:
            problems.append(f"{name} writes what verify refuses: {result if what != 'ok' else result.problems}")
        elif proven:
            problems.append(f"{name} makes a whole checkpoint of what verify refuses: {proven[0].message}")
    return problems


def cells(
    folder: Path, seed: int | None = None, count: int = 0, of_user: bool = False, depth: int | None = None
) -> Iterator[tuple[str, Path_, str, Any]]:
    """Each change of a checkpoint, or ``count`` of them: the file, the place, the way, and the new tree.

    ``of_user``: changes of the user's client state, too; ``depth``: of places, if not any.
    """
    trees = saved_files(folder)
    found = [(name, place) for name in trees for place in places(trees[name], of_user=of_user)]
    every = [(name, place, way) for name, place in found if depth in (None, len(place)) for way in WAYS]
    if seed is not None:
        every = random.Random(seed).sample(every, min(count, len(every)))
    for name, place, way in every:
        new = changed(trees[name], place, way)
        if new is not ...:
            yield name, place, way, new


def main(folders: list[str], seed: int | None = None, count: int = 0, tools: bool = False) -> int:
    """Print what broke in each folder; how much. ``tools``: of what writes and compares, too."""
    broke, tried, known = 0, 0, set[str]()
    for folder in map(Path, folders):
        for name, place, way, tree in cells(folder, seed, count):
            tried += 1
            with with_change(folder, name, tree) as target:
                for problem in [*broken(target), *(broken_tools(target, folder) if tools else ())]:
                    broke += 1
                    if (what := problem.partition(": ")[2].partition("\n")[0]) not in known:
                        known.add(what)
                        print(f"-- {folder.name} {name} {place} <- {way}\n   {problem}", flush=True)
    print(f"{tried} changes, {broke} broke, in {len(known)} ways")
    return broke


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("folders", nargs="+")
    options.add_argument("--seed", type=int)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--tools", action="store_true", help="convert, export and diff, too")
    given = options.parse_args()
    sys.exit(bool(main(given.folders, given.seed, given.count, given.tools)))

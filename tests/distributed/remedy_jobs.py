"""Jobs that follow the remedies of a refusal, word by word, and find out whether they hold what they promise."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import Remedy
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Refused, attempt
from tests.distributed.jobs import SAVE_AT, truth_of
from tests.distributed.model import Setup, build_engine, close, train


@dataclass(frozen=True)
class Cell:
    """A load that is refused.

    Attributes:
        folder: of the checkpoint; ``inside``: what is loaded is in it.
        setup, model: of the live engine.
        config: ``"elastic_checkpoint"``.
        arguments: of the load.
        holds: conditions of remedies that are true here; those of others are not followed.
        exact: what a load that completes restores bit by bit, unless the remedy says that it leaves it out.
    """

    folder: str
    setup: Setup
    model: str = "TinyLM"
    inside: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    exact: tuple[str, ...] = ("masters", "weights", "states")


@dataclass(frozen=True)
class Followed:
    """What following one remedy did on a rank: an error, or what is not as saved."""

    remedy: Remedy
    error: str
    differences: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """The refusal of a cell, and what each of its remedies did."""

    name: str
    refused: Refused
    followed: tuple[Followed, ...]


def follow(cells: dict[str, Cell]) -> list[Outcome]:
    """Try the load of each cell, and then what each remedy says that a program can follow."""
    elastic_ckpt.install()
    found = []
    for name, cell in cells.items():
        engine = _engine(cell, cell.config)
        train(engine, 60, 61)
        refused = attempt(
            name, engine, partial(engine.load_checkpoint, os.path.join(cell.folder, cell.inside), **cell.arguments)
        )
        close(engine)
        ways = [each for each in refused.remedies if (each.config or each.arguments) and each.when in ("", *cell.holds)]
        found.append(Outcome(name, refused, tuple(_follow(cell, way) for way in ways)))
    return found


def at_saved_topology(cells: dict[str, Cell]) -> list[Outcome]:
    """The same loads at the topology of the save, which another refusal named as the way out; and nothing is followed."""
    elastic_ckpt.install()
    found = []
    for name, cell in cells.items():
        engine = _engine(cell, cell.config)
        refused = attempt(
            name, engine, partial(engine.load_checkpoint, os.path.join(cell.folder, cell.inside), **cell.arguments)
        )
        train(engine, SAVE_AT, SAVE_AT + 1)
        close(engine)
        found.append(Outcome(name, refused, ()))
    return found


def _engine(cell: Cell, config: dict[str, Any]) -> Any:
    engine = build_engine(cell.setup, models.BUILDERS[cell.model](seed=8))
    engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = config
    return engine


def _follow(cell: Cell, remedy: Remedy) -> Followed:
    engine = _engine(cell, merged(cell.config, remedy.config))
    train(engine, 60, 61)
    try:
        engine.load_checkpoint(
            **{"load_dir": os.path.join(cell.folder, cell.inside), **cell.arguments, **remedy.arguments}
        )
        differences = _differences(cell, remedy, engine)
        train(engine, SAVE_AT, SAVE_AT + 1)
        error = ""
    except Exception as raised:
        error, differences = f"{type(raised).__name__}: {raised}", {}
    close(engine)
    dist.barrier()
    return Followed(remedy, error, differences)


def _differences(cell: Cell, remedy: Remedy, engine: Any) -> dict[str, str]:
    """What of both sides is not as saved."""
    without = {"load_optimizer_states": False, "load_module_only": True}
    has_states = not any(remedy.arguments.get(key) == value for key, value in without.items())
    kinds = [kind for kind in cell.exact if kind != "states" or has_states]
    left_out = {key for key, word in remedy.config.get("states", {}).items() if word == "fresh"}
    truth = truth_of(cell.folder)
    truth["states"] = {at: value for at, value in truth["states"].items() if at[1] not in left_out}
    keys = sorted({key for _, key in truth["states"]}) if "states" in kinds else []
    if keys:
        oracle.relink(engine)
    now = oracle.gather(engine, keys)
    pairs = {kind: truth[kind].keys() & now[kind].keys() for kind in kinds}
    both = [{kind: {name: side[kind][name] for name in pairs[kind]} for kind in kinds} for side in (now, truth)]
    wrong = oracle.compare(*both)
    return wrong | {kind: "nothing to compare" for kind in kinds if not pairs[kind] and truth[kind]}


def merged(config: dict[str, Any], more: Any) -> dict[str, Any]:
    """``config`` with the entries of ``more``, as a user writes them in."""
    found = copy.deepcopy(config)
    for key, value in more.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found

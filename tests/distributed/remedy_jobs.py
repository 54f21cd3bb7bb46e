"""Jobs that follow the remedies of a refusal, word by word, and find out whether they hold what they promise."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from elastic_ckpt.errors import Remedy
from elastic_ckpt.load import hook
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Refused, attempt, on_all_ranks
from tests.distributed.jobs import SAVE_AT, truth_of
from tests.distributed.model import Setup, TinyLM, build_engine, close, train
from tests.distributed.remedy_sites import Site, noted

EXACT = ("masters", "weights", "states")


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
        names: saved name -> live name, after a remedy that renames.
        scheduler: a class of torch's that the engine has instead, and its arguments.
        replaced: a file of the folder that a save replaces in the middle of each load, once it has been planned.
    """

    folder: str
    setup: Setup
    model: str = "TinyLM"
    inside: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    exact: tuple[str, ...] = EXACT
    names: dict[str, str] = field(default_factory=dict)
    scheduler: tuple[Any, ...] = ()
    replaced: str = ""


@dataclass(frozen=True)
class Followed:
    """What following one remedy did on a rank: an error, or what is not as saved."""

    remedy: Remedy
    error: str
    differences: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """The refusal of a cell, what each of its remedies did, and where in the source, on any rank, they were made."""

    name: str
    refused: Refused
    followed: tuple[Followed, ...]
    sites: frozenset[Site] = frozenset()


class WrappedLM(TinyLM):
    """The model inside another module, and so under other names."""

    inner_kind: type[TinyLM] = TinyLM

    def __init__(self, seed: int = 7) -> None:
        nn.Module.__init__(self)
        self.wrapped = self.inner_kind(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wrapped(tokens)


class WrappedLoraLM(WrappedLM):
    """Its base does not train."""

    inner_kind = models.LoraLM


class LongerLM(TinyLM):
    """More rows of the embedding, to which the head is tied."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.embedding = nn.Embedding(models.VOCABULARY + 3, 13)
        self.head = nn.Linear(13, models.VOCABULARY + 3, bias=False)
        self.head.weight = self.embedding.weight


class HookedMoreLM(TinyLM):
    """Its state dict has an entry that is neither parameter nor buffer."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.back.register_state_dict_post_hook(_add_entry)
        self.back.register_load_state_dict_pre_hook(_take_entry)


def _add_entry(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}extra"] = torch.ones(2)


def _take_entry(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.pop(f"{prefix}extra", None)


class Picky(torch.optim.lr_scheduler.StepLR):
    """A scheduler that does not load what it saves."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("a key that this scheduler wants")


BUILDERS = models.BUILDERS | {kind.__name__: kind for kind in (WrappedLM, WrappedLoraLM, LongerLM, HookedMoreLM)}


def follow(cells: dict[str, Cell]) -> list[Outcome]:
    """Try the load of each cell, and then what each remedy says that a program can follow."""
    elastic_ckpt.install()
    found = []
    for name, cell in cells.items():
        engine = _engine(cell, cell.config)
        train(engine, 60, 61)
        with noted() as ran, _saved_over(cell):
            refused = attempt(
                name, engine, partial(engine.load_checkpoint, os.path.join(cell.folder, cell.inside), **cell.arguments)
            )
        close(engine)
        made = frozenset().union(*on_all_ranks(ran))
        ways = [each for each in refused.remedies if (each.config or each.arguments) and each.when in ("", *cell.holds)]
        found.append(Outcome(name, refused, tuple(_follow(cell, way) for way in ways), made))
    return found


@contextmanager
def _saved_over(cell: Cell) -> Iterator[None]:
    """Have the file be replaced once by another with the same bytes, if the cell names one."""
    prepare, left = hook._prepare_unless_left, [cell.replaced] if cell.replaced else []

    def prepare_and_replace(*given: Any) -> Any:
        ready = prepare(*given)
        if left:
            path = os.path.join(cell.folder, left.pop())
            if dist.get_rank() == 0:
                shutil.copy(path, f"{path}.new")
                os.replace(f"{path}.new", path)
            dist.barrier()
        return ready

    hook._prepare_unless_left = prepare_and_replace
    try:
        yield
    finally:
        hook._prepare_unless_left = prepare


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
    engine = build_engine(cell.setup, BUILDERS[cell.model](seed=8))
    if cell.scheduler:
        kind, *arguments = cell.scheduler
        kinds = {"Picky": Picky, "CosineAnnealingLR": torch.optim.lr_scheduler.CosineAnnealingLR}
        engine.lr_scheduler = kinds[kind](engine.lr_scheduler.optimizer, *arguments)
    engine.config["elastic_checkpoint"] = engine._config._param_dict["elastic_checkpoint"] = config
    return engine


def _follow(cell: Cell, remedy: Remedy) -> Followed:
    engine = _engine(cell, merged(cell.config, remedy.config))
    train(engine, 60, 61)
    try:
        given = {"load_dir": os.path.join(cell.folder, cell.inside), **cell.arguments, **remedy.arguments}
        with _saved_over(cell):
            engine.load_checkpoint(**given)
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
    names = cell.names if "rename" in remedy.config else {}  # else those are not restored
    expected = {kind: {_renamed(at, names): value for at, value in truth[kind].items()} for kind in kinds}
    pairs = {kind: expected[kind].keys() & now[kind].keys() for kind in kinds}
    found = {kind: {at: _rows(now[kind][at], expected[kind][at]) for at in pairs[kind]} for kind in kinds}
    wrong = oracle.compare(found, {kind: {at: expected[kind][at] for at in pairs[kind]} for kind in kinds})
    return wrong | {kind: "nothing to compare" for kind in kinds if not pairs[kind] and truth[kind]}


def _renamed(at: Any, names: dict[str, str]) -> Any:
    """The live name of a parameter, or of a parameter's state."""
    return (names.get(at[0], at[0]), *at[1:]) if isinstance(at, tuple) else names.get(at, at)


def _rows(now: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """As many rows as were saved."""
    has_more = now.dim() == saved.dim() and now.dim() > 0 and len(now) > len(saved)
    return now[: len(saved)] if has_more else now


def merged(config: dict[str, Any], more: Any) -> dict[str, Any]:
    """``config`` with the entries of ``more``, as a user writes them in."""
    found = copy.deepcopy(config)
    for key, value in more.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found

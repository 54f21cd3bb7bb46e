"""Jobs of collectives alone: what ranks send each other, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from elastic_ckpt import distributed
from elastic_ckpt.errors import DamagedError, ElasticCkptError


def only(rank: int, failing: Callable[[], Any]) -> Callable[[], Any]:
    """Work that fails on one rank."""
    return lambda: failing() if dist.get_rank() == rank else "fine"


def damaged() -> None:
    raise DamagedError("torn", file="a.pt", expected="whole", found="half")


def unforeseen() -> None:
    raise KeyError("nobody thought of it")


def messages(sizes: list[int]) -> list[SimpleNamespace]:
    """For each size, what arrives: from every rank in its own bytes, where one rank alone sends much, and from one rank."""
    me, world = dist.get_rank(), dist.get_world_size()
    facts = []
    for size in sizes:
        mixed = b"x" * (size * (me == 1))  # long on one rank alone
        found = SimpleNamespace(
            size=size,
            own=distributed.all_gather("talk", lambda size=size: (me, bytes([me]) * size)),
            mixed=distributed.all_gather("talk", lambda mixed=mixed: mixed),
        )
        # as where a collective costs less than padding
        distributed._COLLECTIVE_NBYTES, before = 0, distributed._COLLECTIVE_NBYTES
        found.unpadded = distributed.all_gather("talk", lambda size=size: b"y" * (size * me * me))
        distributed._COLLECTIVE_NBYTES = before
        # as in a job of thousands of ranks
        distributed._INLINE_TOTAL_NBYTES, before = 0, distributed._INLINE_TOTAL_NBYTES
        found.long = distributed.all_gather("talk", lambda size=size: bytes([me]) * (size * (1 + me)))
        distributed._INLINE_TOTAL_NBYTES = before
        mine = bytes([me]) * size
        found.broadcast = [distributed.broadcast("talk", lambda mine=mine: mine, src) for src in range(world)]
        facts.append(found)
    return facts


def failures(arguments: None) -> list[SimpleNamespace]:
    """What each rank catches where rank 2 alone fails at its work, and what arrives afterwards."""
    facts = []
    for verb, work in (
        ("gather", lambda failing: distributed.all_gather("talk", only(2, failing))),
        ("broadcast", lambda failing: distributed.broadcast("talk", failing, 2)),
    ):
        for failing in (damaged, unforeseen, lambda: lambda: "what cannot be pickled"):
            facts.append(SimpleNamespace(verb=verb, error=caught(lambda: work(failing))))  # noqa: B023
    me = dist.get_rank()
    several = caught(lambda: distributed.all_gather("talk", lambda: damaged() if me else "fine"))
    facts.append(SimpleNamespace(verb="several", error=several, next_round=distributed.all_gather("talk", lambda: me)))
    return facts


def caught(work: Callable[[], Any]) -> ElasticCkptError | None:
    """The error that work raises."""
    try:
        work()
    except ElasticCkptError as error:
        return error
    return None

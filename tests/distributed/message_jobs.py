"""Jobs of collectives alone: what ranks send each other, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from elastic_ckpt import distributed
from elastic_ckpt.errors import DamagedError, ElasticCkptError
from tests.distributed.jobs import SPOILS


def damaged() -> None:
    raise DamagedError("torn", file="a.pt", expected="whole", found="half")


def unforeseen() -> None:
    raise KeyError("nobody thought of it")


def unpicklable() -> Callable[[], str]:
    return lambda: "what cannot be pickled"


FAILURES: dict[str, Callable[[], Any]] = {"damaged": damaged, "unforeseen": unforeseen, "unpicklable": unpicklable}


def messages(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What arrives: from every rank in its own bytes, where one rank alone sends much, and from one rank. ``size``: of all."""
    me, world, size = dist.get_rank(), dist.get_world_size(), case["size"]
    own = bytes([me]) * size + b"!" * SPOILS
    mixed = b"x" * (size * (me == 1))  # long on one rank alone
    found = SimpleNamespace(
        own=distributed.all_gather("talk", lambda: (me, own)),
        mixed=distributed.all_gather("talk", lambda: mixed),
    )
    # as where a collective costs less than padding
    distributed._COLLECTIVE_NBYTES, before = 0, distributed._COLLECTIVE_NBYTES
    found.unpadded = distributed.all_gather("talk", lambda: b"y" * (size * me * me))
    distributed._COLLECTIVE_NBYTES = before
    # as in a job of thousands of ranks
    distributed._INLINE_TOTAL_NBYTES, before = 0, distributed._INLINE_TOTAL_NBYTES
    found.long = distributed.all_gather("talk", lambda: own * (1 + me))
    distributed._INLINE_TOTAL_NBYTES = before
    found.broadcast = [distributed.broadcast("talk", lambda: own, src) for src in range(world)]
    return [found]


def fail(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What each rank catches where some ``ranks`` alone fail at their work, and what arrives afterwards.

    ``verb``: what they do, ``gather`` or ``broadcast`` from the first of them; ``how``: the failure.
    """
    me, ranks = dist.get_rank(), case["ranks"]
    fails = me in ranks and not SPOILS

    def work() -> Any:
        return FAILURES[case["how"]]() if fails else "fine"

    def talk() -> Any:
        is_gather = case["verb"] == "gather"
        return distributed.all_gather("talk", work) if is_gather else distributed.broadcast("talk", work, ranks[0])

    return [SimpleNamespace(error=caught(talk), next_round=distributed.all_gather("talk", lambda: me))]


def caught(work: Callable[[], Any]) -> ElasticCkptError | None:
    """The error that work raises."""
    try:
        work()
    except ElasticCkptError as error:
        return error
    return None

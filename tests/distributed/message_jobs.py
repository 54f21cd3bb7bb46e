"""Jobs that only talk: what ranks send each other, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ckpt import distributed
from elastic_ckpt.errors import DamagedError, ElasticCkptError

#: Around the length up to which a message goes with its head.
SIZES = [0, 1, 4000, 4080, 4090, 4096, 4097, 5000, 100_000]


def only(rank: int, failing: Callable[[], Any]) -> Callable[[], Any]:
    """Work that fails on one rank."""
    return lambda: failing() if dist.get_rank() == rank else "fine"


def damaged() -> None:
    raise DamagedError("torn", file="a.pt", expected="whole", found="half")


def unforeseen() -> None:
    raise KeyError("nobody thought of it")


def messages(arguments: dict[str, Any]) -> None:
    """Everything that goes round arrives, whatever its length; failures arrive everywhere, and the next round is whole."""
    me, world = dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        mixed = b"x" * (size * (me == 1))  # long on one rank alone
        for mine in (bytes([me]) * size, mixed):
            everybody = distributed.all_gather("talk", lambda mine=mine: (me, mine))
            assert [rank for rank, _ in everybody] == list(range(world))
            assert everybody[me] == (me, mine)
        assert distributed.all_gather("talk", lambda mixed=mixed: mixed)[1] == b"x" * size
        # as where padding all to the longest would send too much
        distributed._PADDED_NBYTES, before = 0, distributed._PADDED_NBYTES
        assert distributed.all_gather("talk", lambda size=size: (me, b"y" * (size * me * me))) == [
            (src, b"y" * (size * src * src)) for src in range(world)
        ]
        distributed._PADDED_NBYTES = before
        for src in range(world):
            assert distributed.broadcast("talk", lambda: bytes([me]) * size, src) == bytes([src]) * size  # noqa: B023
    for work in (
        lambda failing: distributed.all_gather("talk", only(2, failing)),
        lambda failing: distributed.broadcast("talk", failing, 2),
    ):
        with pytest.raises(DamagedError) as caught:
            work(damaged)
        assert (caught.value.rank, caught.value.file, caught.value.found) == (2, "a.pt", "half")
        with pytest.raises(ElasticCkptError, match=r"failed to talk: KeyError: 'nobody thought of it'") as caught:
            work(unforeseen)
        assert caught.value.rank == 2
        with pytest.raises(ElasticCkptError, match="failed to talk") as caught:
            work(lambda: lambda: "what cannot be pickled")
        assert caught.value.rank == 2
    with pytest.raises(ElasticCkptError) as caught:  # of several, the lowest rank's
        distributed.all_gather("talk", lambda: damaged() if me else "fine")
    assert caught.value.rank == 1
    assert distributed.all_gather("talk", lambda: me) == list(range(world))

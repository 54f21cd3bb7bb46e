"""Reads what modules keep beside parameters and buffers (``get_extra_state``), and gives it to live modules.

Of each file, one of the ranks that see it makes the values, and sends them to the others that want them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.core.extra_states import SavedExtraState
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.extra_states import made_extra_states
from elastic_ckpt.formats.pickled import open_file
from elastic_ckpt.storage import readers_of

_READING = "read what modules keep beside parameters and buffers"


def files_of(wanted: Mapping[str, SavedExtraState]) -> tuple[str, ...]:
    """The files that have these values."""
    return tuple(sorted({saved.path for saved in wanted.values() if not saved.is_none}))


def read_extra_states(
    wanted: Mapping[str, SavedExtraState], files: Sequence[Sequence[str]], trust_pickle: bool
) -> dict[str, Any]:
    """The values by live name. Collective: all ranks raise the same :class:`ElasticCkptError`.

    Args:
        wanted: what this rank's modules take.
        files: those that each rank wants values of, by rank.
    """
    readers: dict[str, list[int]] = {}
    for rank, paths in enumerate(files):
        for path in paths:
            readers.setdefault(path, []).append(rank)
    made: dict[str, dict[str, Any]] = {}

    def read_mine() -> dict[str, bytes]:
        """What others want of the files that this rank reads."""
        mine = [path for path, ranks in readers.items() if _reader_of(path, ranks) == distributed.rank()]
        made.update({path: made_extra_states(open_file(path, trust_pickle), trust_pickle) for path in mine})
        return {path: distributed.pack(made[path]) for path in mine if readers[path] != [distributed.rank()]}

    if readers:  # the same on all ranks
        for sent in distributed.all_gather(_READING, read_mine):
            for path, packed in sent.items():
                if path not in made and distributed.rank() in readers[path]:
                    made[path] = distributed.unpack(packed)
    with distributed.agree(_READING):
        return {name: None if saved.is_none else _value_of(saved, made) for name, saved in wanted.items()}


def _reader_of(path: str, wanting: Sequence[int]) -> int:
    """The rank that reads a file for those that want values of it: the first of them that sees it, or another one."""
    seeing = readers_of(path)
    if seeing is None:
        return wanting[0]
    return next((rank for rank in wanting if rank in seeing), seeing[0])


def _value_of(saved: SavedExtraState, made: Mapping[str, Mapping[str, Any]]) -> Any:
    value = made[saved.path][saved.entry]
    if isinstance(value, ElasticCkptError):
        raise value
    return value

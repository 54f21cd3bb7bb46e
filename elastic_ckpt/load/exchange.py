"""Gives to all ranks what each has read.

Most of what the files of a thousand ranks hold is the same in all: names, shapes, param groups, the config. The fields
in which files differ (``OWN_FIELDS`` of their dataclasses) travel from every file. What files have in common travels
once, from the first rank that has read it, and only if others have not.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from elastic_ckpt import distributed
from elastic_ckpt.formats.base import OWN_FIELDS, MetadataOptions, OpenFile, refuse_swapped
from elastic_ckpt.formats.pickled import PickledFile, open_file, refuse_unmade
from elastic_ckpt.formats.torch_archive.archive import Trees

T = TypeVar("T")
_DOING = "read the checkpoint's metadata"
_DIGEST_NBYTES = 16


def opener_of(position: int) -> int:
    """The rank that opens the file at ``position`` in the list of all."""
    return position % distributed.world_size()


def read_my_share(count: int, read: Callable[[int], T]) -> list[T]:
    """Run ``read`` for each position below ``count``, each on one rank, and return all results. Collective."""
    me = distributed.rank()
    everything = all_gather_items(lambda: {each: read(each) for each in range(count) if opener_of(each) == me})
    return [everything[position] for position in range(count)]


def file_opener(options: MetadataOptions, opened: dict[str, PickledFile]) -> OpenFile:
    """What opens files of a checkpoint, and adds them to ``opened``; those with the same pickle share their tree."""
    trees = Trees()

    def open_one(path: str) -> PickledFile:
        file = opened[path] = open_file(path, options.trust_pickle, trees)
        if not options.with_unmade:
            refuse_unmade(file)
        if options.check_shards:
            refuse_swapped(file)
        return file

    return open_one


#: By position, the digest of what an item has in common with others, and the rest; no digest: the whole item.
_Message = dict[int, tuple[bytes, Any]]


def all_gather_items(read: Callable[[], dict[int, T]]) -> dict[int, T]:
    """Run ``read`` on every rank, and return the items of all by position. Collective."""
    if distributed.world_size() == 1:
        return distributed.all_gather(_DOING, read)[0]
    mine: dict[int, T] = {}
    commons: dict[bytes, Any] = {}

    def split_mine() -> _Message:
        mine.update(read())
        digests: dict[tuple[int, ...], bytes] = {}
        kept: list[Any] = []
        message: _Message = {}
        for position, item in mine.items():
            if not hasattr(item, OWN_FIELDS):
                message[position] = b"", item
                continue
            common, own = split(item)
            # of files with one tree, the same objects
            parts = (id(type(common)), *(id(value) for value in vars(common).values()))
            if parts not in digests:
                kept.append(common)  # an id stays unique as long as its object lives
                digests[parts] = hashlib.blake2b(pickle.dumps(common), digest_size=_DIGEST_NBYTES).digest()
                commons.setdefault(digests[parts], common)
            message[position] = digests[parts], own
        return message

    messages = distributed.all_gather(_DOING, split_mine)
    _complete(commons, messages)
    joiners = {digest: joiner(common) for digest, common in commons.items()}
    for message in messages:
        for position, (digest, own) in message.items():
            if position not in mine:
                mine[position] = joiners[digest](own) if digest else own
    return mine


def _complete(commons: dict[bytes, Any], messages: Sequence[_Message]) -> None:
    """Get what other ranks have read and this one has not. Collective if any rank lacks anything."""
    readers: dict[bytes, list[int]] = {}
    for rank, message in enumerate(messages):
        for digest in {digest for digest, _ in message.values() if digest}:
            readers.setdefault(digest, []).append(rank)
    lacking = {digest: ranks[0] for digest, ranks in readers.items() if len(ranks) < len(messages)}
    if not lacking:  # the same on all ranks
        return

    def send() -> dict[bytes, Any]:
        return {digest: commons[digest] for digest, src in lacking.items() if src == distributed.rank()}

    for part in distributed.all_gather(_DOING, send):
        for digest, common in part.items():
            commons.setdefault(digest, common)


def split(item: T) -> tuple[T, list[Any]]:
    """A dataclass with ``...`` for the values of its own fields, nested ones included, and these values.

    What is empty stays, as in most files: they then share the part around it.
    """
    own: list[Any] = []
    return _without_own(item, own), own


def _without_own(item: T, own: list[Any]) -> T:
    changes: dict[str, Any] = {}
    names = getattr(item, OWN_FIELDS)
    for name, value in vars(item).items():
        if name in names:
            if value != {}:
                own.append(value)
                changes[name] = ...
        elif _is_nested(value):
            changes[name] = tuple(_without_own(each, own) for each in value)
        elif hasattr(value, OWN_FIELDS):
            changes[name] = _without_own(value, own)
    return _replaced(item, changes)


def joiner(common: T) -> Callable[[Iterable[Any]], T]:
    """What undoes :func:`split`, given the values of an item's own fields. What is common is not copied."""
    make = _maker(common)
    return lambda own: common if make is None else make(iter(own))


def _maker(item: T) -> Callable[[Iterator[Any]], T] | None:
    """What takes own values, and returns the item with them; ``None`` if it has none."""
    makers: dict[str, Callable[[Iterator[Any]], Any]] = {}
    for name, value in vars(item).items():
        if value is ...:
            makers[name] = next
        elif _is_nested(value):
            parts = [(each, _maker(each)) for each in value]
            if any(make for _, make in parts):
                makers[name] = partial(_made, parts)
        elif hasattr(value, OWN_FIELDS) and (make := _maker(value)) is not None:
            makers[name] = make
    if not makers:
        return None
    return lambda own: _replaced(item, {name: make(own) for name, make in makers.items()})


def _made(parts: Sequence[tuple[Any, Callable[[Iterator[Any]], Any] | None]], own: Iterator[Any]) -> tuple[Any, ...]:
    return tuple(part if make is None else make(own) for part, make in parts)


def _is_nested(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and hasattr(value[0], OWN_FIELDS)


def _replaced(item: T, changes: Mapping[str, Any]) -> T:
    """What :func:`dataclasses.replace` returns, in a tenth of its time, which a job of thousands of files notices."""
    new = object.__new__(type(item))
    vars(new).update(vars(item))
    vars(new).update(changes)
    return new

"""Reads a checkpoint's metadata: who opens which file, and how ranks share what they have read, for all formats.

Most of what the files of a thousand ranks hold is the same in all: names, shapes, param groups, the config. The fields
in which files differ (``OWN_FIELDS`` of their dataclasses) travel from every file. What files have in common travels
once, from the first rank that has read it, and only if others have not.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import is_
from typing import Any, TypeVar

from elastic_ckpt import distributed
from elastic_ckpt.core.fqn import RenameRules
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.values import TrainingState
from elastic_ckpt.errors import DamagedError, ElasticCkptError
from elastic_ckpt.formats import READERS, Checkpoint, CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.base import OWN_FIELDS, Fitted, OpenFile, refuse_swapped, refuse_unsupported_folder
from elastic_ckpt.formats.pickled import PickledFile, open_file, refuse_unmade
from elastic_ckpt.formats.torch_archive.archive import Trees
from elastic_ckpt.planning.stage_names import StateNames
from elastic_ckpt.storage import readers_of

T = TypeVar("T")
_DOING = "read the checkpoint's metadata"


def read_checkpoint(
    found: CheckpointInfo, options: MetadataOptions, live: LocalState | None = None, rename: RenameRules = ()
) -> Checkpoint:
    """Read a checkpoint's metadata. Collective: all ranks raise the same :class:`ElasticCkptError`.

    ``live``, under names as the user renames them, settles those of numbered optimizer states.
    """
    looking = "look at the checkpoint's files"
    with distributed.deterministic(looking):  # at their names, as rank 0 has found them
        refuse_unsupported_folder(found)
        reading = READERS[found.format](found, options, partial(distributed.broadcast, looking))
    if isinstance(reading, Checkpoint):
        return reading
    opened: dict[str, PickledFile] = {}
    open_one = file_opener(options, opened)

    def read(position: int) -> Any:
        if isinstance(item := reading.read(position, open_one), ElasticCkptError):
            item.rank = distributed.rank()
        return item

    owners = [owner_of(position, reading.path(position)) for position in range(reading.count)]
    records = read_my_share(owners, read)
    names = StateNames(live, rename, options.with_states)
    fitted, state = fit_together(lambda: reading.fit(records, opened, names), owners)
    return Checkpoint(fitted.metadata, state, fitted.model_path, len(opened) or owners.count(distributed.rank()))


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


def owner_of(position: int, path: str) -> int:
    """The rank that opens the file at a position in the list of all: one that sees it. The same on all ranks."""
    readers: Sequence[int] | None = None
    with suppress(DamagedError):  # of a file that is missing, or in two versions, which its owner will find, too
        readers = readers_of(path)
    return position % distributed.world_size() if readers is None else readers[position % len(readers)]


def fit_together(fit: Callable[[], Fitted], owners: Sequence[int]) -> tuple[Fitted, TrainingState]:
    """What ``fit`` returns, and the training state that this rank wants, whichever rank has read it. Collective.

    ``owners``: the rank that opened the file at each position.
    """
    fitted_here: list[Fitted] = []

    @cache
    def state_at(position: int) -> TrainingState:
        assert fitted_here[0].read_state is not None
        return fitted_here[0].read_state(position)

    def is_mine(position: int) -> bool:
        return owners[position] == distributed.rank()

    def fit_mine() -> tuple[int, bytes | None]:
        """The position that this rank wants the state of; and that state, if it is read here and all want it."""
        fitted_here[:] = [fit()]
        fitted = fitted_here[0]
        own = state_at(fitted.position) if fitted.state is None and is_mine(fitted.position) else None
        sends = own is not None and fitted.for_all and distributed.world_size() > 1
        return fitted.position, distributed.pack(own) if sends else None

    everybody = distributed.all_gather("fit the checkpoint's files together", fit_mine)
    fitted = fitted_here[0]
    if fitted.state is not None:
        return fitted, fitted.state
    sent = {position: state for position, state in everybody if state is not None}
    # the same on all ranks: what is wanted elsewhere than where it was read
    lacking = {position for rank, (position, _) in enumerate(everybody) if owners[position] != rank} - sent.keys()
    if lacking:

        def send() -> dict[int, bytes]:
            return {at: distributed.pack(state_at(at)) for at in sorted(lacking) if is_mine(at)}

        for part in distributed.all_gather("read counters, scheduler and client state", send):
            sent |= part
    own = fitted.position
    return fitted, state_at(own) if is_mine(own) else distributed.unpack(sent[own])


def read_my_share(owners: Sequence[int], read: Callable[[int], T]) -> list[T]:
    """Run ``read`` for each position, on the rank that is its owner, and return all results. Collective."""
    positions = range(len(owners))
    if distributed.world_size() == 1:
        return distributed.all_gather(_DOING, lambda: [read(each) for each in positions])[0]
    mine: dict[int, T] = {}
    commons: dict[bytes, Any] = {}

    def split_mine() -> dict[int, tuple[bytes, Any]]:
        """By position, the digest of what an item has in common with others, and the rest; or none, and the item."""
        for position in positions:
            if owners[position] == distributed.rank() and position not in mine:  # where this work runs again
                mine[position] = read(position)
        digests: dict[tuple[int, ...], bytes] = {}
        kept: list[Any] = []
        message: dict[int, tuple[bytes, Any]] = {}
        for position, item in mine.items():
            if not hasattr(item, OWN_FIELDS):
                message[position] = b"", item
                continue
            common, own = split(item)
            # of files with one tree, the same objects
            parts = (id(type(common)), *map(id, vars(common).values()))
            if parts not in digests:
                kept.append(common)  # an id stays unique as long as its object lives
                digests[parts] = hashlib.blake2b(pickle.dumps(common), digest_size=16).digest()
                commons.setdefault(digests[parts], common)
            message[position] = digests[parts], own
        return message

    messages = distributed.all_gather(_DOING, split_mine)
    readers: dict[bytes, list[int]] = {}
    for rank, message in enumerate(messages):
        for digest in {digest for digest, _ in message.values() if digest}:
            readers.setdefault(digest, []).append(rank)
    lacking = {digest: ranks[0] for digest, ranks in readers.items() if len(ranks) < len(messages)}
    if lacking:  # on any rank: the same on all

        def send() -> dict[bytes, Any]:
            return {digest: commons[digest] for digest, src in lacking.items() if src == distributed.rank()}

        for part in distributed.all_gather(_DOING, send):
            commons = part | commons
    same: set[int] = set()
    for message in messages:
        for position, (digest, own) in message.items():
            if position not in mine:
                mine[position] = join(commons[digest], own, same) if digest else own
    return [mine[position] for position in positions]


def split(item: T) -> tuple[T, list[Any]]:
    """A dataclass with ``...`` for the values of its own fields, nested ones included, and these values.

    What is empty stays, as in most files: they then share the part around it.
    """
    own: list[Any] = []

    def take(value: Any) -> Any:
        if value == {}:
            return value
        own.append(value)
        return ...

    return _mapped(item, take, set()), own


def join(common: T, own: Iterable[Any], same: set[int]) -> T:
    """Undo :func:`split`; ``same`` collects ids of nested parts without own values, which are not copied."""
    values = iter(own)
    return _mapped(common, lambda value: next(values) if value is ... else value, same)


def _mapped(item: T, change: Callable[[Any], Any], same: set[int]) -> T:
    """A dataclass with what ``change`` makes of its own fields, nested ones included; itself if that changes nothing.

    Ten times as fast as :func:`dataclasses.replace`, which a job of thousands of files notices.
    """
    names = getattr(item, OWN_FIELDS)
    changed = {}
    for name, value in vars(item).items():
        new = value
        if name in names:
            new = change(value)
        elif id(value) in same:
            continue
        elif isinstance(value, tuple) and value and hasattr(value[0], OWN_FIELDS):
            parts = tuple([_mapped(each, change, same) for each in value])
            new = value if all(map(is_, parts, value)) else parts
        elif hasattr(value, OWN_FIELDS):
            new = _mapped(value, change, same)
        if new is not value:
            changed[name] = new
        elif name not in names:
            same.add(id(value))
    if not changed:
        return item
    copy = object.__new__(type(item))
    vars(copy).update(vars(item))
    vars(copy).update(changed)
    return copy

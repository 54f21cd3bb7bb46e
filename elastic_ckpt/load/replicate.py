"""Copies of node-local files on other nodes, from which a job resumes although nodes were lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch.distributed as dist

from elastic_ckpt import distributed
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.text import counted, one_line
from elastic_ckpt.errors import ConfigError, DamagedError, ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, list_checkpoints
from elastic_ckpt.load.copies import Copying, Original
from elastic_ckpt.load.nodes import Node, identity_of, inside, words_of
from elastic_ckpt.storage import file_names, modified
from elastic_ckpt.storage.local import is_link
from elastic_ckpt.storage.opened_folders import OpenedFolder, is_folder_in, opened_below, opened_root, remove_in
from elastic_ckpt.storage.view import REPLICAS, NodeListing, list_folders

logger = logger_of(__name__)
_DOING = "replicate a checkpoint"


class Replication:
    """Copies that are being made in the background; see :func:`replicate`."""

    def __init__(self, copying: Copying | None, prune: Callable[[], None]) -> None:
        self._copying = copying  # on the first rank of a node
        self._prune = prune
        self._is_over = False

    def done(self) -> bool:
        """Whether this rank's node has made its copies, or failed to. Local."""
        return self._copying is None or self._copying.has_made_its_own.is_set()

    def wait(self) -> None:
        """Wait until the copies of all nodes are whole, then remove older tags, if asked to. Collective.

        Raises the same error on every rank if a copy could not be made; no tag is removed then. Once it is over, it
        returns at once.
        """
        if self._is_over:
            return
        self._is_over = True
        with distributed.agree(_DOING):
            if self._copying is not None:
                self._copying.join()
                if self._copying.error is not None:
                    raise self._copying.error
        with distributed.agree("remove older tags"):
            if self._copying is not None:
                self._prune()


#: The last one of this process, whose files the next one may replace.
_last: list[Replication] = []
#: The job's process group, the ranks that copy, and the group in which they do, which is made once.
_made: list[tuple[Any, list[int], Any]] = []


def replicate(folder: str | os.PathLike[str], tag: str, copies: int = 1, keep: int | None = None) -> Replication:
    """Copy each node's files of a tag to the next ``copies`` nodes, while training continues.

    Call it on every rank after ``engine.save_checkpoint(folder, tag)`` to node-local storage, such as ``/dev/shm``.
    ``engine.load_checkpoint(folder)`` then finds all files, in a job of any size, unless ``copies + 1`` neighbouring
    nodes are lost. Copies are in ``.replicas`` in ``folder``. What this node saved is never written to. A copy gets its
    name once it is complete and has the checksum of the original. Originals must not change before
    :meth:`Replication.wait` returns. The next call waits for that, too.

    Args:
        folder: the folder that ``save_checkpoint`` was given. Each node has its own.
        tag: the tag that was saved.
        copies: the number of other nodes that get a copy of each file.
        keep: the number of tags, with their copies, that stay in ``folder`` on each node. ``None``: all.

    Collective, with only small messages; the first call makes a process group of gloo, with one rank of each node.
    These copy in it, in a thread beside the training, with at most 16 MiB in memory at a time. Raises the same
    :class:`ElasticCkptError` on every rank if arguments differ, or if a node has nothing to copy.
    """
    if _last:
        _last.pop().wait()
    meant = (os.path.normpath(str(tag)), copies, keep)

    def begin() -> tuple[Node, tuple[str, int, int | None]]:
        if not isinstance(folder, (str, os.PathLike)) or "\0" in os.fsdecode(folder):
            raise ConfigError("this is no folder", None, "the folder that save_checkpoint was given", repr(folder))
        place = os.path.abspath(folder)
        name = meant[0]
        numbers = [copies] if keep is None else [copies, keep]
        if not all(type(number) is int and number >= 1 for number in numbers):
            raise ConfigError("copies and keep are numbers from 1 on", None, "replicate(folder, tag, copies=1)", meant)
        if not inside({name}):
            raise ConfigError("the tag is not a folder below the given one", place, "a tag such as step100", name)
        for path in (os.path.join(place, name), os.path.join(place, REPLICAS)):
            if is_link(path):
                problem = "replicate does not follow links"
                remedy = "give the folder that the link names, or remove it"
                raise ConfigError(problem, path, "a folder", "a link", remedy=remedy)
        return identity_of([place]), meant

    everybody = distributed.all_gather(_DOING, begin)
    nodes: dict[Node, int] = {}  # the first rank of each
    for rank, (node, other) in enumerate(everybody):
        nodes.setdefault(node, rank)
        if other != everybody[0][1]:
            both = f"{everybody[0][1]}, as on rank 0", f"{other} on rank {rank}"
            raise ConfigError("ranks call replicate with different arguments", None, *both, rank=rank)
    node, _ = everybody[distributed.rank()]
    _last.append(_start(os.path.abspath(folder), *meant, list(nodes.values()), list(nodes).index(node)))
    return _last[0]


def _start(folder: str, tag: str, copies: int, keep: int | None, copiers: list[int], mine: int) -> Replication:
    """Begin to copy the files of other nodes. Collective.

    Args:
        copiers: the rank of each node that copies.
        mine: the number of this rank's node.
    """
    is_copier = copiers[mine] == distributed.rank()

    def list_mine() -> NodeListing | None:
        if not is_copier:
            return None
        listing = list_folders(words_of(identity_of([folder])), [folder], [tag])
        if not any(os.path.dirname(entry.name) for entry in listing.entries[0]):
            problem = "this node has no files of the tag to copy"
            remedy = "call replicate after save_checkpoint"
            raise DamagedError(problem, os.path.join(folder, tag), "files that save_checkpoint wrote", remedy=remedy)
        return listing

    listings = [each for each in distributed.all_gather(_DOING, list_mine) if each is not None]
    group = _group_of(copiers)
    prune = partial(_prune, folder, tag, keep)
    if not is_copier:
        return Replication(None, prune)
    others = len(copiers) - 1
    if copies > others and distributed.rank() == 0:
        text = "elastic_ckpt replicates to %s, not %d: the job has no more nodes; files of lost ones may be lost"
        logger.warning(text, counted(others, "other node"), copies)
    sources = [(mine + 1 + step) % len(copiers) for step in range(min(copies, others))]
    wanted: dict[str, Original] = {}  # of what several nodes have, the newest
    for source in sources:
        for number, entry in enumerate(listings[source].entries[0]):
            if entry.name == LATEST or entry.name.startswith(f"{tag}{os.sep}"):
                known = wanted.get(entry.name)
                if known is None or known.entry.mtime_ns < entry.mtime_ns:
                    wanted[entry.name] = Original(source, number, entry)
    copying = Copying(folder, tag, wanted, listings[mine], group)
    copying.start()
    return Replication(copying, prune)


def _group_of(copiers: list[int]) -> Any:
    """The process group in which nodes copy; ``None`` for one node. Collective."""
    if len(copiers) == 1:
        return None
    if not _made or _made[0][0] is not dist.group.WORLD or _made[0][1] != copiers:
        with distributed.together(_DOING, agrees=False):
            try:
                group = dist.new_group(copiers, backend="gloo")
            except RuntimeError as error:
                problem = "the nodes of this job cannot connect to copy files"
                found = one_line(str(error))
                remedy = "set GLOO_SOCKET_IFNAME on each node to the network interface by which nodes reach each other"
                raise ElasticCkptError(problem, None, "connections of gloo", found, remedy=remedy) from error
        _made[:] = [(dist.group.WORLD, copiers, group)]
        with distributed.agree(_DOING):
            pass  # none goes on, and may end, while others still connect to it
    return _made[0][2]


def _prune(folder: str, tag: str, keep: int | None) -> None:
    """Remove tags of a folder, and copies of tags, that are older than this one and not to be kept."""
    if keep is None:
        return
    places = folder, os.path.join(folder, REPLICAS)
    newest: dict[str, float] = {}  # by tag, when it was written
    for place in places:
        for found in list_checkpoints(place):
            written = max(modified(found.path(name)) for name in file_names(found.folder))
            newest[found.tag] = max(written, newest.get(found.tag, 0.0))
    older = [each for each, written in newest.items() if written < newest.get(tag, 0.0)]
    older = sorted(older, key=lambda each: -newest[each])[keep - 1 :]
    if not older:
        return
    path = folder
    try:
        with opened_root(folder) as root:
            for each, place in product(older, ("", REPLICAS)):
                path = os.path.join(folder, place, each)
                if is_folder_in(root.descriptor, place or os.curdir):
                    _remove_tag(root, place, each)
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        raise ElasticCkptError("an older tag could not be removed", path, found=why, remedy="remove it") from error


def _remove_tag(root: OpenedFolder, place: str, tag: str) -> None:
    """Remove the folder of a tag below an opened folder; a link stays, and what it leads to."""
    with opened_below(root, place) as folder:
        if is_folder_in(folder, tag):
            hidden = f".{tag}.removed"
            remove_in(folder, hidden)  # which a process left that was killed
            os.rename(tag, hidden, src_dir_fd=folder, dst_dir_fd=folder)  # half of it is no checkpoint
            remove_in(folder, hidden)

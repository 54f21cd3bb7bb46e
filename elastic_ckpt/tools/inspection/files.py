"""Which file is of whom and holds what, and which files are missing. Pure, apart from :func:`list_folder`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL, list_tags, read_latest
from elastic_ckpt.formats.naming import SWAPPED_FOLDER, UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER, FolderFiles, sort_names
from elastic_ckpt.formats.peek import Peeked
from elastic_ckpt.tools.inspection.facts import FileEntry

#: Files of more ranks than this are not enumerated: how many there are is only what a file claims.
_MOST_EXPECTED = 1 << 17
_LAYER = re.compile(r"^(\d{1,6})\.")
_LAYER_OF_TP = re.compile(r"-model_\d+-model_states")


@dataclass(frozen=True)
class Listing:
    """What lies in a tag's folder, and beside it.

    Attributes:
        sizes: path below the folder, with ``/`` -> bytes.
        tags: names of all checkpoints beside it, itself included, newest first.
        latest: name of a ``latest`` file -> the tag in it.
    """

    sizes: Mapping[str, int]
    tags: tuple[str, ...] = ()
    latest: Mapping[str, str] = field(default_factory=dict)


def list_folder(found: Found) -> Listing:
    """Look at names and sizes; no file of the checkpoint is opened."""
    sizes: dict[str, int] = {}
    for folder, inside, names in os.walk(found.folder):
        inside.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                sizes[os.path.relpath(path, found.folder).replace(os.sep, "/")] = os.path.getsize(path)
            except OSError:  # a dangling link
                sizes[os.path.relpath(path, found.folder).replace(os.sep, "/")] = 0
    base = found.folder
    for _ in os.path.normpath(found.tag).split(os.sep):
        base = os.path.dirname(base)
    latest = {}
    for name in (LATEST, LATEST_UNIVERSAL):
        try:
            tag = read_latest(base, name)
        except (OSError, ElasticCkptError):
            continue
        if tag is not None:
            latest[name] = tag
    return Listing(sizes, tuple(list_tags(base)), latest)


def entries_of(listing: Listing, tp: int | None, metadata: CheckpointMetadata | None) -> tuple[FileEntry, ...]:
    """The files of the folder, by name.

    Args:
        listing: names and sizes.
        tp: tensor-parallel degree; ``None``: not known.
        metadata: what the checkpoint holds; ``None``: it could not be read.
    """
    held = {} if metadata is None else _held(metadata)
    entries = []
    for name, nbytes in sorted(listing.sizes.items()):
        entry = _placed(_entry(name, nbytes), tp)
        entries.append(replace(entry, tensors=held.get(name, {})))
    return tuple(entries)


def _entry(name: str, nbytes: int) -> FileEntry:
    folder, _, rest = name.partition("/")
    if folder == UNIVERSAL_FOLDER and rest:
        return FileEntry(name, "optimizer" if rest == UNIVERSAL_OPTIMIZER else "parameter", nbytes)
    if folder == SWAPPED_FOLDER and rest:
        return FileEntry(name, "swapped", nbytes)
    kinds = sort_names([name], is_universal=False)
    for kind, places in (("optimizer states", kinds.optimizer), ("model states", kinds.model_zero3)):
        for dp, mp in places:
            return FileEntry(name, kind, nbytes, dp=dp, mp=mp)
    for mp in kinds.model:
        return FileEntry(name, "model states", nbytes, mp=mp)
    for layer, tp in kinds.layers:
        return FileEntry(name, "layer", nbytes, tp=tp, layer=layer)
    return FileEntry(name, "expert" if kinds.experts else "other", nbytes)


def _placed(entry: FileEntry, tp: int | None) -> FileEntry:
    """``mp`` counts stages and tensor-parallel ranks together; see :mod:`elastic_ckpt.formats.grid`."""
    if entry.mp is None or not tp:
        return entry
    return replace(entry, pp=entry.mp // tp, tp=entry.mp % tp)


def _held(metadata: CheckpointMetadata) -> dict[str, dict[str, int]]:
    """File -> key -> number of parameters of which it holds some."""
    names = [os.path.relpath(file.path, metadata.source.folder).replace(os.sep, "/") for file in metadata.files]
    held: dict[str, dict[str, int]] = {}
    copies = [copy for replicas in metadata.replicas.values() for copy in replicas]
    for tensor in (*metadata.tensors.values(), *copies):
        for file in {chunk.file for chunk in tensor.chunks}:
            counts = held.setdefault(names[file], {})
            counts[tensor.key] = counts.get(tensor.key, 0) + 1
    return held


def missing_files(found: Found, listing: Listing, peeked: Peeked | None, named: str | None) -> tuple[str, ...]:
    """Files that should be there, by the names of the others and by what a model-states file says.

    Args:
        found: the folder.
        listing: names and sizes.
        peeked: what a model-states file says; ``None``: none can be read.
        named: path of a file that reading the checkpoint complained about.
    """
    is_clear = not found.files.clashes and not found.files.experts  # of two saves, or of experts, names tell little
    expected = [*_expected(found, peeked)] if is_clear else []
    if named is not None and os.path.dirname(named) == found.folder and "*" not in named:
        expected += [os.path.basename(named)] if not os.path.lexists(named) else []
    return tuple(name for name in dict.fromkeys(expected) if name not in listing.sizes)


def _expected(found: Found, peeked: Peeked | None) -> Iterator[str]:
    files = found.files
    dps, mps = _ranks(files, peeked)
    if len(dps) * len(mps) > _MOST_EXPECTED:
        return
    for mp in mps:
        if files.model_zero3 and mp not in files.model:
            yield from (f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in dps)
        else:
            yield f"{'' if files.model else '*'}mp_rank_{mp:02d}_model_states.pt"
    if found.format == "universal":
        yield from (f"{UNIVERSAL_FOLDER}/{name}/{MASTER}.pt" for name in (peeked.parameters if peeked else ()))
        return
    if files.optimizer or (peeked is not None and not peeked.holds_optimizer):
        prefix, joint = _style(files, peeked)
        yield from (f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{joint}optim_states.pt" for mp in mps for dp in dps)
    yield from _expected_layers(files, peeked)


def _ranks(files: FolderFiles, peeked: Peeked | None) -> tuple[range, range]:
    """Data-parallel and model-parallel ranks, of which there are at least those that have files."""
    said_dp = 0 if peeked is None else peeked.training_state.counters.get("dp_world_size")
    said_mp = 0 if peeked is None else peeked.degrees.model_parallel
    dps = max((dp for dp, _ in (*files.optimizer, *files.model_zero3)), default=0) + 1
    dps = max(dps, said_dp) if isinstance(said_dp, int) else dps
    return range(dps), range(max(max(files.mp_ranks, default=0) + 1, said_mp))


def _style(files: FolderFiles, peeked: Peeked | None) -> tuple[str, str]:
    """What stands before ``zero_pp_rank`` and before ``optim_states`` in this save."""
    sample = next(iter(files.optimizer.values()), None)
    if sample is not None:
        return sample.partition("zero_pp_rank")[0], "_" if "_optim_states" in sample else ""
    is_bf16 = peeked is not None and peeked.weight_dtypes[:1] == ("bfloat16",)
    return "bf16_" if is_bf16 else "", "_"


def _expected_layers(files: FolderFiles, peeked: Peeked | None) -> Iterator[str]:
    """Layers that have a file of some rank, or parameters, have one of every tensor-parallel rank."""
    if not files.layers:
        return
    named = (_LAYER.match(name) for name in (peeked.parameters if peeked else ()))
    layers = {layer for layer, _ in files.layers} | {int(match[1]) for match in named if match}
    said = 0 if peeked is None else peeked.degrees.tp or 0
    tp = max(said, max(rank for _, rank in files.layers) + 1)
    with_rank = any(_LAYER_OF_TP.search(name) for name in files.layers.values())
    if len(layers) * tp > _MOST_EXPECTED:
        return
    for layer in sorted(layers):
        for rank in range(tp):
            yield f"layer_{layer:02d}-{f'model_{rank:02d}-' if with_rank else ''}model_states.pt"


def sizes_by_kind(entries: Iterable[FileEntry]) -> dict[str, tuple[int, int]]:
    """Kind -> number of files, and their bytes."""
    found: dict[str, tuple[int, int]] = {}
    for entry in entries:
        count, nbytes = found.get(entry.kind, (0, 0))
        found[entry.kind] = count + 1, nbytes + entry.nbytes
    return found

"""Ranks and contents of each file. Pure, apart from :func:`list_folder`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import accumulate, chain
from typing import Any

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL, list_tags
from elastic_ckpt.formats.naming import (
    SWAPPED_FOLDER,
    UNIVERSAL_FOLDER,
    UNIVERSAL_OPTIMIZER,
    plain_name,
    sort_names,
)
from elastic_ckpt.tools.inspection.facts import Evidence, FileEntry
from elastic_ckpt.tools.missing_files import expected_files
from elastic_ckpt.tools.opened import tag_named_by


def list_folder(found: Found) -> tuple[dict[str, int], tuple[str, ...], dict[str, str]]:
    """``sizes``, ``tags`` and ``latest`` of :class:`Evidence`. Opens no file of the checkpoint itself."""
    sizes: dict[str, int] = {}
    for folder, inside, names in os.walk(found.folder):
        inside.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                nbytes = os.path.getsize(path)
            except OSError:  # a dangling link
                nbytes = 0
            sizes[_below(found.folder, path)] = nbytes
    base = found.folder
    for _ in os.path.normpath(found.tag).split(os.sep):
        base = os.path.dirname(base)
    named = ((name, tag_named_by(base, name)) for name in (LATEST, LATEST_UNIVERSAL))
    return sizes, tuple(list_tags(base)), {name: tag for name, tag in named if tag is not None}


def _below(folder: str, path: str) -> str:
    return os.path.relpath(path, folder).replace(os.sep, "/")


def entries_of(sizes: Mapping[str, int], tp: int | None, metadata: CheckpointMetadata | None) -> tuple[FileEntry, ...]:
    """The files of the folder, by name, with ``pp`` and ``tp`` ranks if the tensor-parallel degree is known."""
    tensors = {} if metadata is None else _tensors_in_files(metadata)
    return tuple(
        FileEntry(name, nbytes=nbytes, tensors=tensors.get(name, {}), **_kind_and_ranks(name, tp))
        for name, nbytes in sorted(sizes.items())
    )


def _tensors_in_files(metadata: CheckpointMetadata) -> dict[str, dict[str, int]]:
    """By name of a file, the number of tensors with chunks in it, by key."""
    # ranges of files are counted by where they begin and end: parameters times ranks would be many
    changes: dict[str, list[int]] = {}
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        of_key = changes.setdefault(tensor.key, [0] * (len(metadata.files) + 1))
        for files in (source.files for source in tensor.sources):
            for run in [files] if isinstance(files, range) else [range(file, file + 1) for file in files]:
                of_key[run.start] += 1
                of_key[run.stop] -= 1
    counts: dict[str, dict[str, int]] = {}
    names = [_below(metadata.source.folder, file.path) for file in metadata.files]
    for key, of_key in changes.items():
        for name, count in zip(names, accumulate(of_key), strict=False):
            if count:
                counts.setdefault(name, {})[key] = count
    return counts


def _kind_and_ranks(name: str, tp: int | None) -> dict[str, Any]:
    folder, _, rest = name.partition("/")
    if folder == UNIVERSAL_FOLDER and rest:
        return {"kind": "optimizer" if rest == UNIVERSAL_OPTIMIZER else "parameter"}
    if folder == SWAPPED_FOLDER and rest:
        return {"kind": "swapped"}
    files = sort_names([name], is_universal=False)
    for layer, rank in files.layers:
        return {"kind": "layer", "tp": rank, "layer": layer}
    if not files.mp_ranks:
        return {"kind": "expert" if files.experts else "other"}
    (mp,) = files.mp_ranks
    dp = next((dp for dp, _ in (*files.optimizer, *files.model_zero3)), None)
    # ``mp`` counts stages and tensor-parallel ranks together: elastic_ckpt.formats.grid
    grid = {"pp": mp // tp, "tp": mp % tp} if tp else {}
    return {"kind": "optimizer states" if files.optimizer else "model states", "dp": dp, "mp": mp, **grid}


def missing_files(evidence: Evidence) -> tuple[str, ...]:
    """Missing files, inferred from the names of the others and from a model-states file."""
    found, peeked = evidence.found, evidence.peeked
    dp = 0 if peeked is None else peeked.training_state.counters.get("dp_world_size")
    ranks = 0 if peeked is None else peeked.degrees.model_parallel
    expected = list(expected_files(found, dp if isinstance(dp, int) else 0, ranks, peeked))
    named = None if evidence.refusal is None else evidence.refusal.file
    if named is not None and os.path.dirname(named) == found.folder and "*" not in named:
        expected += [os.path.basename(named)] if not os.path.lexists(named) else []
    present = {plain_name(name) for name in evidence.sizes}
    return tuple(name for name in dict.fromkeys(map(plain_name, expected)) if name not in present)

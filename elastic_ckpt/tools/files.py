"""The files of a checkpoint: their kinds, ranks and contents, and those that are missing by the names of the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.naming import (
    DCP_METADATA,
    DCP_SUFFIX,
    SWAPPED_FOLDER,
    UNIVERSAL_FOLDER,
    UNIVERSAL_OPTIMIZER,
    FolderFiles,
    sort_names,
)
from elastic_ckpt.formats.peek import Peeked
from elastic_ckpt.formats.safetensors import SUFFIX

#: Formats of whole tensors, whose files are not by rank.
WHOLE_FORMATS = ("dcp", "safetensors")
#: Files of more ranks than this are not enumerated, since the number is only a file's claim.
_MOST_EXPECTED = 1 << 17
_LAYER = re.compile(r"^(\d{1,6})\.")
_LAYER_OF_TP = re.compile(r"-model_\d+-model_states")


@dataclass(frozen=True)
class FileEntry:
    """A file of the tag's folder; ``name`` is its path relative to that.

    Attributes:
        kind: ``"model states"``, ``"optimizer states"``, ``"layer"``, ``"parameter"`` (of a universal checkpoint),
            ``"optimizer"`` (of one), ``"expert"``, ``"swapped"`` (from NVMe), ``"chunks"`` and ``"metadata"`` (of
            ``torch.distributed.checkpoint``), ``"safetensors"`` or ``"other"``.
        dp, tp, pp, mp: its ranks; ``mp`` counts stages and tensor-parallel ranks together.
        tensors: key -> number of parameters with chunks in it.
    """

    name: str
    kind: str
    nbytes: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    mp: int | None = None
    layer: int | None = None
    tensors: Mapping[str, int] = field(default_factory=dict)


def file_sizes(found: Found) -> dict[str, int]:
    """Path relative to the tag's folder, with ``/`` -> size in bytes, of every file in it. Opens none."""
    sizes: dict[str, int] = {}
    walked: set[str] = set()
    for folder, inside, names in os.walk(found.folder, followlinks=True):
        if (itself := os.path.realpath(folder)) in walked:  # links may form a circle
            inside.clear()
            continue
        walked.add(itself)
        inside.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            sizes[_below(found.folder, path)] = size_of(path)
    return sizes


def size_of(path: str) -> int:
    """The size of a file in bytes; 0 of a link to nothing, say, which nobody can open."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _below(folder: str, path: str) -> str:
    return os.path.relpath(path, folder).replace(os.sep, "/")


def entries_of(sizes: Mapping[str, int], tp: int | None, metadata: CheckpointMetadata | None) -> tuple[FileEntry, ...]:
    """The files of the folder, by name, with ``pp`` and ``tp`` ranks if the tensor-parallel degree is known."""
    tensors = {} if metadata is None else _tensors_in_files(metadata)
    return tuple(
        FileEntry(name, nbytes=nbytes, tensors=tensors.get(name, {}), **kind_and_ranks(name, tp))
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


def kind_and_ranks(name: str, tp: int | None) -> dict[str, Any]:
    folder, _, rest = name.partition("/")
    if folder == UNIVERSAL_FOLDER and rest:
        return {"kind": "optimizer" if rest == UNIVERSAL_OPTIMIZER else "parameter"}
    if folder == SWAPPED_FOLDER and rest:
        return {"kind": "swapped"}
    whole = {DCP_METADATA: "metadata", DCP_SUFFIX: "chunks", SUFFIX: "safetensors"}
    for ending, kind in whole.items():
        if name.endswith(ending):
            return {"kind": kind}
    files = sort_names([name], is_universal=False)
    for layer, rank in files.layers:
        return {"kind": "layer", "tp": rank, "layer": layer}
    if not files.mp_ranks:
        return {"kind": "expert" if files.of_experts else "other"}
    (mp,) = files.mp_ranks
    dp = next((dp for dp, _ in (*files.optimizer, *files.model_zero3)), None)
    # ``mp`` counts stages and tensor-parallel ranks together: elastic_ckpt.formats.grid
    grid = {"pp": mp // tp, "tp": mp % tp} if tp else {}
    return {"kind": "optimizer states" if files.optimizer else "model states", "dp": dp, "mp": mp, **grid}


def expected_files(
    found: Found, dp: int, model_parallel: int, experts: Sequence[int] = (), peeked: Peeked | None = None
) -> Iterator[str]:
    """Plain names of the files that should be there, with ``*`` for what is unknown of a name. Pure.

    Args:
        found: the folder; nothing is expected of one with files of two saves, whose names show little.
        dp, model_parallel: how many ranks are claimed; there are at least those that have files.
        experts: number of experts, by layer.
        peeked: a model-states file, for what names do not show.
    """
    files = found.files
    if files.clashes or found.format in WHOLE_FORMATS:
        return
    ranks = max([dp, *(rank + 1 for rank, _ in (*files.optimizer, *files.model_zero3))], default=0) or 1
    mp_ranks = max([model_parallel, *(rank + 1 for rank in files.mp_ranks)], default=0) or 1
    if ranks * mp_ranks + sum(experts) > _MOST_EXPECTED:
        return
    dps, mps = range(ranks), range(mp_ranks)
    for mp in mps:
        if files.model_zero3 and mp not in files.model:
            yield from (f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in dps)
        else:
            yield f"{'' if files.model else '*'}mp_rank_{mp:02d}_model_states.pt"
    if found.format == "universal":
        yield from (f"{UNIVERSAL_FOLDER}/{name}/{MASTER}.pt" for name in (peeked.parameters if peeked else ()))
        return
    if files.experts:  # AutoEP with ZeRO-3 writes none
        where = "00" if len(mps) == 1 else "*"  # tensor-parallel ranks slice experts, or have different ones
        here = {(layer, n): name for (layer, n, _), name in files.experts.items()}
        for at in ((layer, n) for layer, count in enumerate(experts) for n in range(count)):
            yield here.get(at, f"layer_{at[0]}_expert_{at[1]}_mp_rank_{where}_model_states.pt")
        optimizers = {rank: name for (rank, _), name in files.expert_optimizers.items()}
        for ep_rank in range(1 + max(optimizers, default=-1)):
            yield optimizers.get(ep_rank, f"expp_rank_{ep_rank}_mp_rank_{where}_optim_states.pt")
    elsewhere = files.experts or peeked is None or peeked.holds_optimizer or peeked.without_states
    if files.optimizer or not elsewhere:
        prefix, joint = _style(files, peeked)
        yield from (f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{joint}optim_states.pt" for mp in mps for dp in dps)
    yield from _expected_layers(files, peeked)


def _style(files: FolderFiles, peeked: Peeked | None) -> tuple[str, str]:
    """The text before ``zero_pp_rank`` and before ``optim_states`` in file names of this save."""
    sample = next(iter(files.optimizer.values()), None)
    if sample is not None:
        return sample.partition("zero_pp_rank")[0], "_" if "_optim_states" in sample else ""
    is_bf16 = peeked is not None and peeked.weight_dtypes[:1] == ("bfloat16",)
    return "bf16_" if is_bf16 else "", "_"


def _expected_layers(files: FolderFiles, peeked: Peeked | None) -> Iterator[str]:
    """A layer with parameters, or with a file of some rank, has one of every tensor-parallel rank."""
    if not files.layers:
        return
    named = (_LAYER.match(name) for name in (peeked.parameters if peeked else ()))
    layers = {layer for layer, _ in files.layers} | {int(match[1]) for match in named if match}
    tp = max((peeked.degrees.tp if peeked else 0) or 0, max(rank for _, rank in files.layers) + 1)
    with_rank = any(_LAYER_OF_TP.search(name) for name in files.layers.values())
    if len(layers) * tp > _MOST_EXPECTED:
        return
    for layer in sorted(layers):
        for rank in range(tp):
            yield f"layer_{layer:02d}-{f'model_{rank:02d}-' if with_rank else ''}model_states.pt"

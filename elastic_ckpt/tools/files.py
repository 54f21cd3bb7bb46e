"""The files of a checkpoint: their kinds, and those that are missing by the names of the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.naming import (
    DCP_METADATA,
    DCP_SUFFIX,
    SWAPPED_FOLDER,
    UNIVERSAL_FOLDER,
    UNIVERSAL_OPTIMIZER,
    FolderFiles,
    sort_names,
)
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.safetensors import SUFFIX

#: Files of more ranks than this are not enumerated, since the number is only a file's claim.
_MOST_EXPECTED = 1 << 17
_LAYER_OF_TP = re.compile(r"-model_\d+-model_states")


def file_sizes(found: CheckpointInfo) -> dict[str, int]:
    """Path relative to the tag's folder, with ``/`` -> size in bytes, of every file in it. Opens none."""
    sizes: dict[str, int] = {}
    walked: set[str] = set()
    for folder, inside, names in os.walk(found.folder, followlinks=True):
        if (itself := os.path.realpath(folder)) in walked:  # links may form a circle
            inside.clear()
            continue
        walked.add(itself)
        inside.sort()
        for path in (os.path.join(folder, name) for name in sorted(names)):
            sizes[os.path.relpath(path, found.folder).replace(os.sep, "/")] = size_of(path)
    return sizes


def size_of(path: str) -> int:
    """The size of a file in bytes; 0 of a link to nothing, say, which nobody can open."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def kind_of_file(name: str) -> str:
    """What a file is: ``parameter`` or ``optimizer`` of a universal checkpoint, ``swapped`` from NVMe, ``rank``'s
    states, ``chunks`` or ``metadata`` of ``torch.distributed.checkpoint``, ``safetensors``, or ``other``.
    """
    folder, _, rest = name.partition("/")
    if folder == UNIVERSAL_FOLDER and rest:
        return "optimizer" if rest == UNIVERSAL_OPTIMIZER else "parameter"
    if folder == SWAPPED_FOLDER and rest:
        return "swapped"
    for ending, kind in {DCP_METADATA: "metadata", DCP_SUFFIX: "chunks", SUFFIX: "safetensors"}.items():
        if name.endswith(ending):
            return kind
    files = sort_names([name], is_universal=False)
    return "rank" if files.layers or files.mp_ranks or files.of_experts else "other"


def expected_files(found: CheckpointInfo, trust_pickle: bool = False) -> Iterator[str]:
    """Plain names of the files that should be there, by the names of the others and a model-states file."""
    files = found.files
    if files.clashes or found.foreign:
        return
    model = _model_states(found, trust_pickle)
    dp = 0 if model is None or files.is_universal else model.counters["dp_world_size"]
    model_parallel = 0 if model is None else model.stated.borne_out(len(files.mp_ranks)).model_parallel
    claims = () if model is None else model.features.experts
    experts = [count for count in claims if isinstance(count, int) and count > 0]
    ranks = max([dp, *(rank + 1 for rank, _ in (*files.optimizer, *files.model_zero3))], default=0) or 1
    mp_ranks = max([model_parallel, *(rank + 1 for rank in files.mp_ranks)], default=0) or 1
    if ranks * mp_ranks + sum(experts) > _MOST_EXPECTED:
        return
    dps, mps = range(ranks), range(mp_ranks)
    for mp in mps:
        if files.model_zero3 and mp not in files.model:
            yield from (f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in dps)
        else:
            yield from [f"mp_rank_{mp:02d}_model_states.pt"] if files.model else []
    if found.files.is_universal:
        return
    if files.experts and mp_ranks == 1:  # tensor-parallel ranks slice experts, or have different ones
        here = {(layer, n): name for (layer, n, _), name in files.experts.items()}
        for at in ((layer, n) for layer, count in enumerate(experts) for n in range(count)):
            yield here.get(at, f"layer_{at[0]}_expert_{at[1]}_mp_rank_00_model_states.pt")
        ep_ranks = [rank for rank, _ in files.expert_optimizers]
        yield from (f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(1 + max(ep_ranks, default=-1)))
    if sample := next(iter(files.optimizer.values()), None):
        prefix, joint = sample.partition("zero_pp_rank")[0], "_" if "_optim_states" in sample else ""
        yield from (f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{joint}optim_states.pt" for mp in mps for dp in dps)
    yield from _expected_layers(files)


def _model_states(found: CheckpointInfo, trust_pickle: bool) -> ModelShard | None:
    """The first model-states file that can be read, whatever else is wrong with the checkpoint."""
    for name in (*found.files.model.values(), *found.files.model_zero3.values()):
        try:
            return index_model_states(open_pickled(found.path(name), trust_pickle), 0, StateOptions())
        except (ElasticCkptError, TypeError, ValueError, AttributeError, LookupError):
            continue  # reading the whole checkpoint reports what is wrong with it
    return None


def _expected_layers(files: FolderFiles) -> Iterator[str]:
    """A layer with a file of some rank has one of every tensor-parallel rank."""
    layers = {layer for layer, _ in files.layers}
    tp = max((rank + 1 for _, rank in files.layers), default=0)
    with_rank = any(_LAYER_OF_TP.search(name) for name in files.layers.values())
    for layer in sorted(layers) if len(layers) * tp <= _MOST_EXPECTED else ():
        for rank in range(tp):
            yield f"layer_{layer:02d}-{f'model_{rank:02d}-' if with_rank else ''}model_states.pt"

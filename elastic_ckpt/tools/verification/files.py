"""The files that a checkpoint has and should have, and what is wrong with them where its metadata cannot be read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from itertools import chain

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsupportedError
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.base import refuse_swapped
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.naming import (
    DCP_METADATA,
    DCP_SUFFIX,
    SWAPPED_FOLDER,
    UNIVERSAL_FOLDER,
    plain_name,
    sort_names,
)
from elastic_ckpt.formats.pickled import open_file, open_pickled, refuse_unmade
from elastic_ckpt.formats.safetensors import SUFFIX
from elastic_ckpt.storage.local import file_names
from elastic_ckpt.tools.inspection import ERROR, NOTE, Finding, kind_of, of_error
from elastic_ckpt.tools.opened import open_checkpoint

#: How the files of formats that are not DeepSpeed's end.
_ENDINGS = {"dcp": (DCP_METADATA, DCP_SUFFIX), "safetensors": (SUFFIX,)}
OWN, SWAPPED, OTHER = "own", "swapped", "other"
#: Files of more ranks than this are not enumerated, since the number is only a file's claim.
_MOST_EXPECTED = 1 << 17
_LAYER_OF_TP = re.compile(r"-model_\d+-model_states")


def files_by_kind(found: CheckpointInfo) -> dict[str, dict[str, int]]:
    """By :data:`OWN`, :data:`SWAPPED` (from NVMe) and :data:`OTHER` (none of DeepSpeed's): path -> size in bytes.

    Of every file in the tag's folder and below it, links followed; opens none.
    """
    files: dict[str, dict[str, int]] = {OWN: {}, SWAPPED: {}, OTHER: {}}
    walked = set[str]()
    for folder, inside, names in os.walk(found.folder, followlinks=True):
        if (itself := os.path.realpath(folder)) in walked:  # links may form a circle
            inside.clear()
            continue
        walked.add(itself)
        inside.sort()
        for path in (os.path.join(folder, name) for name in sorted(names)):
            files[_kind_of_file(found, os.path.relpath(path, found.folder))][path] = size_of(path)
    return files


def size_of(path: str) -> int:
    """The size of a file in bytes; 0 of a link to nothing, say, which nobody can open."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _kind_of_file(found: CheckpointInfo, name: str) -> str:
    top, _, inside = name.partition(os.sep)
    if top == SWAPPED_FOLDER and inside:
        return SWAPPED
    if found.foreign or name.endswith(tuple(chain.from_iterable(_ENDINGS.values()))):
        is_own = name.endswith(_ENDINGS.get(found.format, ()))
    elif top == UNIVERSAL_FOLDER and inside:
        is_own = found.files.is_universal and name.endswith(".pt")
    else:
        files = sort_names([name], is_universal=False)
        is_own = bool(files.layers or files.mp_ranks or files.of_experts)
    return OWN if is_own else OTHER


def read_metadata(found: CheckpointInfo, config: ElasticConfig) -> tuple[CheckpointMetadata | None, list[Finding]]:
    """The metadata, as a load would read it; else what is wrong with each file."""
    try:
        return open_checkpoint(found, config, with_unmade=False).checkpoint.metadata, []
    except ElasticCkptError as raised:
        error = raised
    if found.foreign:
        return None, [of_error(error), Finding(NOTE, "not-checked", "anything else")]
    findings, present = list[Finding](), set(map(plain_name, file_names(found.folder)))
    for name in expected_files(found, config.trust_pickle):
        if name not in present:
            text = "no such file; restore it, or take another tag"
            findings.append(Finding(ERROR, "missing", text, file=found.path(name)))
    for path in files_by_kind(found)[OWN]:
        try:
            file = open_file(path, config.trust_pickle)
            refuse_unmade(file)
            refuse_swapped(file)
        except ElasticCkptError as refused:
            findings.append(of_unreadable(refused))
    if isinstance(error, UnsupportedError):
        return None, [*findings, of_error(error, "not-checked", NOTE)]
    if not findings and isinstance(error, MismatchError) and not found.files.is_universal:
        # without ZeRO, states that only a live model can name are no damage
        return None, [of_error(error, "not-checked", NOTE)]
    if error.file not in {finding.file for finding in findings}:
        findings.append(of_error(error))
    try:  # where values alone contradict each other
        return open_checkpoint(found, config.model_copy(update={"verify": "bytes"})).checkpoint.metadata, findings
    except ElasticCkptError:
        note = Finding(NOTE, "not-checked", "the tensors, since not all files can be read together")
        return None, [*findings, note]


def of_unreadable(error: ElasticCkptError) -> Finding:
    """The finding for a file that the reader refuses."""
    kind = "unreadable" if kind_of(error) == "damaged" else kind_of(error)
    return of_error(error, kind, NOTE if kind == "not-checked" else ERROR)


def expected_files(found: CheckpointInfo, trust_pickle: bool = False) -> Iterator[str]:
    """Plain names of the files that should be there, by the names of the others and a model-states file."""
    files = found.files
    if files.clashes or found.foreign:
        return
    model = _model_states(found, trust_pickle)
    dp = 0 if model is None or files.is_universal else model.counters["dp_world_size"]
    model_parallel = 0 if model is None else math.prod(model.stated.borne_out(len(files.mp_ranks))[:2])
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
    layers = {layer for layer, _ in files.layers}
    tp = max((rank + 1 for _, rank in files.layers), default=0)
    with_rank = any(_LAYER_OF_TP.search(name) for name in files.layers.values())
    for layer in sorted(layers) if len(layers) * tp <= _MOST_EXPECTED else ():  # a layer is of every rank or of none
        yield from (f"layer_{layer:02d}-{f'model_{rank:02d}-' * with_rank}model_states.pt" for rank in range(tp))


def _model_states(found: CheckpointInfo, trust_pickle: bool) -> ModelShard | None:
    """The first model-states file that can be read, whatever else is wrong with the checkpoint."""
    for name in (*found.files.model.values(), *found.files.model_zero3.values()):
        try:
            return index_model_states(open_pickled(found.path(name), trust_pickle))
        except (ElasticCkptError, TypeError, ValueError, AttributeError, LookupError):
            continue  # reading the whole checkpoint reports what is wrong with it
    return None

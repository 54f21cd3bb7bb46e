"""Weights alone: of a checkpoint without optimizer states, or with states that cannot be named.

Below ZeRO-3 the model-states file has every weight as the module had it, usually in low precision; that of a pipeline
has none, but the files of its layers do. Under ZeRO-3 the weights are in the optimizer-states files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from elastic_ckpt.core.counts import MOST_DIGITS, gaps
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata
from elastic_ckpt.errors import WEIGHTS_ALONE, LayoutError, MissingFilesError, Remedy, listed, shortened
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.merging import LayerShard
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, module_tensors, refuse_view
from elastic_ckpt.formats.model_states import ModelShard

RESTORE = Remedy("restore the missing files, or use another tag")
#: Where the model-states files have all weights, too.
RESTORE_OR_ALONE = RESTORE, WEIGHTS_ALONE
_MOST_SHOWN = 8  # layers without files


def weights_alone(found: CheckpointInfo, model: ModelShard, zero_stage: int = 0) -> CheckpointMetadata:
    """The metadata of the weights in one model-states file; those of a pipeline are in the files of its layers."""
    builder = MetadataBuilder(found, [model])
    builder.tensors.add(module_tensors([model], None, ())[0])
    return builder.build(model, zero_stage, (), frozen_recorded=False)


def of_model_files(found: CheckpointInfo, mp: int, model: ModelShard, with_states: bool) -> CheckpointMetadata:
    """The metadata of a model-parallel rank of whose optimizer there is no file.

    Raises :class:`LayoutError` if states are wanted, if only this rank lacks its files, or under ZeRO-3.
    """
    zero3 = mp in {rank for _, rank in found.files.model_zero3}
    if found.files.of_weights_alone and not with_states:
        return weights_alone(found, model, int(model.zero.get("stage") or 0))
    name = f"*zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt"
    problem = "a file of the checkpoint is missing"
    remedy = [RESTORE]
    if zero3:
        problem = "optimizer-states files are missing, which under ZeRO-3 hold the weights too"
    elif with_states and not found.files.optimizer:
        problem = "the checkpoint has no optimizer-states files"
        remedy.append(WEIGHTS_ALONE)
    # a run without an optimizer writes no file of it; one with it lists the parameters that ZeRO has partitioned
    was_written = bool(found.files.optimizer or (model.param_shapes and model.zero.get("stage")))
    error = MissingFilesError if was_written else LayoutError
    raise error(problem, found.path(name), name, "none", remedy=remedy)


def with_weights_checked(
    metadata: CheckpointMetadata,
    models: Mapping[int, ModelShard],
    layers: Sequence[LayerShard],
    lacking: Sequence[str] = (),
) -> CheckpointMetadata:
    """Metadata of weights alone, with a note that says so. Raises :class:`LayoutError` if some weights are missing.

    ``models`` are by model-parallel rank; ``lacking``: optimizer-states files that are missing between others.
    """
    first = models[0]
    names = frozenset(name for name, _ in metadata.tensors)
    _refuse_missing_ranks(metadata, models)
    _refuse_missing_layers(metadata, layers, names)
    trained = dict.fromkeys(name for model in models.values() for name, _ in chain.from_iterable(model.param_shapes))
    known = {*names, *metadata.aliases, *metadata.stacked}
    lost = [name for name in trained if name not in known and not expert_name(name)]  # which have other numbers here
    if lost:
        number = lost[0].partition(".")[0]
        name = f"layer_{number:0>2}-*model_states.pt" if layers else ""
        problem = "weights of parameters are missing that were trained"
        both = f"their weights, since {first.path} lists them", "none"
        is_number = number.isdecimal() and len(number) <= MOST_DIGITS
        has_no_file = is_number and int(number) not in {layer.layer for layer in layers}
        error = MissingFilesError if layers and has_no_file else LayoutError
        raise error(problem, f"{metadata.source.folder}/{name}", *both, parameter=lost, remedy=RESTORE)
    why = "the checkpoint has no optimizer states"
    if lacking:
        why = f"optimizer-states files are missing ({shortened(lacking)})"
    elif any(model.optimizer is not None for model in models.values()):
        why = "no master weights could be named"
    notes = [f"{why}: parameters are the module's own weights, saved in {_dtypes(metadata)}"]
    numbers = {layer.layer for layer in layers}
    last = max(numbers, default=0)
    without_files = list(islice(gaps(last, numbers), _MOST_SHOWN))
    if without_files and not trained:  # casts and such have a number, and nothing to save
        others = last + 1 - len(numbers) - len(without_files)
        shown = ", ".join(map(str, without_files)) + (f" and {others} more" if others else "")
        notes.append(f"layers without files have no weights, or their files are missing: {shown}")
    return replace(metadata, notes=(*metadata.notes, *notes))


def _dtypes(metadata: CheckpointMetadata) -> str:
    return listed(sorted({metadata.tensors[name, FROZEN].dtype for name in metadata.names(FROZEN)}))


def _refuse_missing_ranks(metadata: CheckpointMetadata, models: Mapping[int, ModelShard]) -> None:
    """Refuse fewer files than tensor-parallel ranks, whose number older files state without the pipeline's."""
    stated = models[0].stated
    if stated.dimensions is None and (stated.mp or 1) > len(models):
        problem = "files of model-parallel ranks are missing"
        expected = f"at least {stated.mp} ranks, from mp_world_size in {models[0].path}"
        raise MissingFilesError(problem, metadata.source.folder, expected, str(len(models)), remedy=RESTORE)


def _refuse_missing_layers(metadata: CheckpointMetadata, layers: Sequence[LayerShard], names: frozenset[str]) -> None:
    """Refuse a layer that some tensor-parallel ranks have no file of, or other tensors."""
    ranks: dict[int, set[int]] = {}
    for layer in layers:
        ranks.setdefault(layer.layer, set()).add(layer.tp_rank)
    every = set(range(metadata.source.tp))
    for number, present in sorted(ranks.items()):
        for rank in sorted(every - present):
            problem = "a file of the checkpoint is missing"
            name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
            both = f"a file of each of {len(every)} tensor-parallel ranks", f"those of ranks {sorted(present)}"
            raise MissingFilesError(problem, os.path.join(metadata.source.folder, name), *both, remedy=RESTORE)
    for layer in layers:
        for name, ref in layer.named(names).items():
            refuse_view(name, "this weight", ref, layer.path)
            if name not in names and name not in metadata.aliases:
                problem = "tensor-parallel ranks saved different tensors of this layer"
                expected = f"the same names in the files of all {len(every)} ranks"
                raise LayoutError(problem, layer.path, expected, shortened(layer.weights), parameter=name)

"""Reads DeepSpeed's universal checkpoints.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`` hold one whole tensor each, beside copies of the model-states
files. Source: ``ds_to_universal.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate, chain, groupby
from operator import or_
from typing import Any

from elastic_ckpt.core.chunks import ListedChunks, StorageChunk
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.fqn import NameStates, with_slices
from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, CheckpointMetadata, SavedParameter, SourceFile, TensorMetadata
from elastic_ckpt.core.shard_specs import DeclaredSpecs
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.values import TrainingState
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError, shortened
from elastic_ckpt.formats import model_states
from elastic_ckpt.formats.base import CheckpointInfo, Fitted, FolderReading, MetadataOptions, Once, OpenFile
from elastic_ckpt.formats.grid import Grid, grid_of
from elastic_ckpt.formats.merging import shard_by_shard
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, Tensors, dense_tensor, module_tensors, weights_crc32s
from elastic_ckpt.formats.model_states import ModelShard, model_indexer
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.same_save import spot_check, with_progress_compared
from elastic_ckpt.formats.saved_config import loss_scale_of, read_training_state, refuse_features
from elastic_ckpt.formats.universal_files import (
    CONVERT_AGAIN,
    OptimizerFile,
    StateFile,
    index_optimizer,
    list_parameters,
    optimizer_path,
    read_parameter,
    state_path,
)

#: Files of parameters by name and key.
States = Mapping[tuple[str, str], StateFile]
_LOAD_NATIVE = "load the native checkpoint instead"
_NO_OPTIMIZER_FILE = (
    "the universal checkpoint has no zero/optimizer_state.pt (BLOOM's have none): the optimizer's step was taken from "
    "the counters, hyperparameters of the live param groups stay, and whether Adam or AdamW saved it is not known"
)


def universal_reading(found: CheckpointInfo, options: MetadataOptions, once: Once) -> FolderReading:
    """How to read a universal checkpoint. Each rank also lists the folders of its parameters."""
    has_optimizer, names = once(lambda: list_parameters(found))
    model_files = _model_files(found)
    ranks, paths = list(model_files), [*map(found.path, model_files.values())]
    files = len(paths) + has_optimizer
    index_model = model_indexer()

    def read(position: int, open_one: OpenFile) -> Any:
        if position >= files:
            return read_parameter(found, names[position - files], open_one)
        if position == len(paths):
            return index_optimizer(open_one(optimizer_path(found)))
        return index_model(open_one(paths[position]))

    def fit(items: Sequence[Any], opened: Mapping[str, PickledFile], _: NameStates) -> Fitted:
        states = {(name, each.key): each for name, read in zip(names, items[files:], strict=True) for each in read}
        models: dict[tuple[int, int], ModelShard] = dict(zip(ranks, items, strict=False))
        optimizer: OptimizerFile | None = items[len(paths)] if has_optimizer else None
        metadata, grid = _fit_together(found, models, optimizer, states, options)
        first = models[ranks[0]]
        if options.check_shards and metadata.source.merged_from == 1:
            numbers = {number for number, file in enumerate(metadata.files) if file.path in opened}
            spot_check(metadata, first.path, first.weights, numbers)

        def read_state(_: int) -> TrainingState:
            same_ranks = len(models) == 1 and grid.has_ranks_of(options.coordinates)
            scale, overflow = (None, False) if optimizer is None else (optimizer.loss_scaler, optimizer.overflow)
            file = opened[first.path]
            state = read_training_state(file, loss_scale_of(scale), overflow, same_ranks, grid.sequence, options)
            # with several model-parallel ranks, every rank gets the state of one
            return replace(state, degrees=(0, 0)) if grid.tp * grid.pp > 1 else state

        return Fitted(metadata, first.path, read_state=read_state)

    return FolderReading(files + len(names), read, fit)


def _fit_together(
    found: CheckpointInfo,
    models: Mapping[tuple[int, int], ModelShard],
    optimizer: OptimizerFile | None,
    states: States,
    options: MetadataOptions,
) -> tuple[CheckpointMetadata, Grid]:
    """The metadata, given model-states files by model- and data-parallel rank, and the grid of those."""
    first = next(iter(models.values()))
    for _, of_one in groupby(models, key=lambda rank: rank[0]):
        model_states.check_same_save([models[rank] for rank in of_one])
    firsts = {mp: model for (mp, dp), model in models.items() if dp == 0}
    model_states.check_same_save(list(firsts.values()), one_rank=False)
    refuse_features(first.features, first.path)
    if optimizer is not None and not optimizer.in_true_order:
        _refuse_wrong_data(first, optimizer)
    grid = grid_of(firsts, found.folder, options.coordinates)
    metadata = with_slices(_build_metadata(found, list(models.values()), optimizer, states, grid))
    scalers = [None if optimizer is None else optimizer.loss_scaler]
    return with_progress_compared(metadata, first, options.check_shards, scalers), grid


def _model_files(found: CheckpointInfo) -> dict[tuple[int, int], str]:
    """(model-parallel rank, data-parallel rank) -> its model-states file."""
    files = found.files
    names = {(mp, 0): name for mp, name in files.model.items()}
    names = names or {(mp, dp): name for (dp, mp), name in files.model_zero3.items()}
    if not names:
        problem, file = "a file of the universal checkpoint is missing", found.path("mp_rank_00_model_states.pt")
        expected = "the model-states files that DeepSpeed's converter copies"
        raise DamagedError(problem, file, expected, "none", remedy=CONVERT_AGAIN)
    return dict(sorted(names.items()))


def _refuse_wrong_data(model: ModelShard, optimizer: OptimizerFile) -> None:
    """Refuse what DeepSpeed's converter gets wrong."""
    if optimizer.zero_stage < 3 and model.zero.get("round_robin_gradients") and model.counters["dp_world_size"] > 1:
        option, harm = "round_robin_gradients", "assigns the wrong data to almost every parameter of such a run"
    elif optimizer.zero_stage == 3 and model.alignment > 1:
        option, harm = "align_partitions", "takes padding for parameters there"
    else:
        return
    problem = f"this universal checkpoint was converted from a run with {option}: DeepSpeed's converter {harm}"
    expected, found = f"a universal checkpoint from a run without {option}", f"{option} in the saved config"
    raise UnsupportedError(problem, model.path, expected, found, remedy=_LOAD_NATIVE)


def _refuse_unlisted(first: ModelShard, states: States, parameters: Collection[str]) -> None:
    """Refuse optimizer states that would be left out, since no model-states file lists their parameters.

    Masters alone say nothing: the converter writes buffers and the other names of tied weights, too.
    """
    if unlisted := sorted(_stateful(states).difference(parameters)):
        problem = "the model-states files of the universal checkpoint do not list all parameters that have states"
        expected, names = "every parameter whose folder below zero has states, in param_shapes", shortened(unlisted)
        raise DamagedError(problem, first.path, expected, "none of these", parameter=names, remedy=CONVERT_AGAIN)


def _stateful(states: States) -> set[str]:
    return {name for (name, key), item in states.items() if item.tensor is not None and key != MASTER}


def _build_metadata(
    found: CheckpointInfo, models: list[ModelShard], optimizer: OptimizerFile | None, states: States, grid: Grid
) -> CheckpointMetadata:
    first = models[0]
    files = (SourceFile(state_path(found, *at), item.nbytes, records=item.records) for at, item in states.items())
    builder = MetadataBuilder(found, [*models, *files])
    builder.parameters = parameters = _parameters(models, optimizer, states, grid)
    _refuse_unlisted(first, states, parameters)
    local = _local_shapes(models, grid)
    if optimizer is not None and optimizer.in_true_order:
        local = {}
    for file, ((name, key), item) in enumerate(states.items(), start=len(models)):
        if (ref := item.tensor) is None or name not in parameters:
            continue
        shape, path = parameters[name].shape, state_path(found, name, key)
        if ref.numel != math.prod(shape) or (len(ref.shape) > 1 and ref.shape != shape):  # from stage 3, it is flat
            problem = f"{key} of this parameter does not have the shape that the model-states file lists"
            remedy = f"files of two conversions are mixed, or vocabulary padding was stripped: {CONVERT_AGAIN}"
            expected = f"{shape}, the same for {MASTER} and states"
            raise MismatchError(problem, path, expected, ref.shape, parameter=name, remedy=remedy)
        tensor = dense_tensor(name, key, ref, file, shape)
        is_divided = item.is_concatenated and name in local
        builder.tensors.add({(name, key): _divided(tensor, local[name], path) if is_divided else tensor})
    whole, notes = _module_tensors(models, parameters, grid)
    builder.tensors.add(whole)
    builder.notes += notes if optimizer is not None else [*notes, _NO_OPTIMIZER_FILE]
    declared = DeclaredSpecs(tuple(item.rule for item in states.values() if item.rule is not None))
    declared = reduce(or_, (model.declared for model in models), declared)
    most = max((saved.group for saved in parameters.values()), default=0) + 1
    stage, groups = (1, ()) if optimizer is None else (optimizer.zero_stage, optimizer.groups)
    metadata = builder.build(
        first,
        stage,
        groups or ({},) * most,
        # frozen ones of MoE layers are in the files of experts, which the converter leaves out
        frozen_recorded=first.frozen_recorded or bool(first.features.experts and not first.stacked),
        buffers_recorded=any(model.weights for model in models),
        merged_from=grid.tp,
        sequence=grid.sequence,
    )
    dp = len(models) // (grid.tp * grid.pp)
    return replace(metadata, declared=declared, crc32s=weights_crc32s([models[rank * dp] for rank in grid.stages[0]]))


def _local_shapes(models: Sequence[ModelShard], grid: Grid) -> dict[str, tuple[Shape, ...]]:
    """The shape that each tensor-parallel rank lists of a parameter without a recorded layout; empty for one rank."""
    dp = len(models) // (grid.tp * grid.pp)
    found: dict[str, tuple[Shape, ...]] = {}
    for stage in grid.stages if grid.tp > 1 else ():
        ranks = [dict(chain.from_iterable(models[rank * dp].param_shapes)) for rank in stage]
        for name in ranks[0].keys() - models[0].stacked.keys():
            if not models[stage[0] * dp].declared.is_recorded(name) and all(name in rank for rank in ranks):
                found.setdefault(name, tuple(rank[name] for rank in ranks))
    return found


def _divided(tensor: TensorMetadata, shapes: tuple[Shape, ...], path: str) -> TensorMetadata:
    """The shards that DeepSpeed's converter concatenated, whatever is fused in them; ``shapes`` by rank."""
    (chunk,) = tensor.chunks or (StorageChunk(FlatRange(0, 0), 0, 0),)
    numels = [math.prod(shape) for shape in shapes]
    if len({shape[1:] for shape in (tensor.shape, *shapes)}) > 1 or sum(numels) != chunk.range.numel:
        problem = "DeepSpeed's converter concatenated the tensor-parallel shards of this parameter, but the shapes in "
        problem += "the model-states files do not add up to its tensor"
        expected, remedy = " + ".join(map(str, shapes)), f"files of two conversions are mixed: {CONVERT_AGAIN}"
        raise MismatchError(problem, path, expected, tensor.shape, parameter=tensor.name, remedy=remedy)
    starts = accumulate(numels, initial=0)
    offsets = (chunk.byte_offset + start * ITEMSIZE[tensor.dtype] for start in starts)
    sources = tuple(
        ListedChunks((StorageChunk(FlatRange(0, numel), chunk.file, offset),) if numel else ())
        for numel, offset in zip(numels, offsets, strict=False)
    )
    return replace(tensor, shape=shapes[0], sources=sources, shards=shapes)


def _parameters(
    models: Sequence[ModelShard], optimizer: OptimizerFile | None, states: States, grid: Grid
) -> dict[str, SavedParameter]:
    """The parameters of all pipeline stages, of the shapes in their files or, if flat (from stage 3), as listed."""
    step_files: dict[str, dict[str, float]] = {}
    for (name, key), item in states.items():
        if item.scalar is not None:
            step_files.setdefault(name, {})[key] = item.scalar
    stateful = _stateful(states)
    members = () if optimizer is None else optimizer.members
    group_of = {flat: number for number, inside in enumerate(members) for flat in inside}
    parameters: dict[str, SavedParameter] = {}
    for model in models:
        steps = float(int(model.counters["global_steps"]) - int(model.counters["skipped_steps"]))
        for flat, named_shapes in enumerate(model.param_shapes):
            for name, local in named_shapes:
                counted = {"step": steps} if name in stateful else {}
                shared = counted if optimizer is None else optimizer.scalars.get(flat, {})
                scalars = {**shared, **step_files.get(name, {})}
                master = states.get((name, MASTER))
                saved = local if master is None or master.tensor is None else master.tensor.shape
                shape = saved if len(saved) > 1 or len(local) == 1 else local
                if grid.tp > 1 and len(shape) > 1 and len(saved) == 1:
                    problem = "DeepSpeed's converter does not put together the shards of a tensor-parallel ZeRO-3 run"
                    both = "tensors of the whole parameters", f"a flat tensor of {saved[0]} elements"
                    raise UnsupportedError(problem, model.path, *both, parameter=name, remedy=_LOAD_NATIVE)
                parameter = SavedParameter(shape, group_of.get(flat, flat), tuple(sorted(scalars.items())))
                parameters.setdefault(name, parameter)
    return parameters


def _module_tensors(models: Sequence[ModelShard], trained: Iterable[str], grid: Grid) -> tuple[Tensors, list[str]]:
    """Buffers and frozen parameters of the model-states files; each tensor-parallel rank has its own shard."""
    dp = len(models) // (grid.tp * grid.pp)
    tensors: Tensors = {}
    notes: list[str] = []
    for stage in grid.stages:
        ranks = []
        for rank in stage:
            mine, noted = module_tensors(models[rank * dp : (rank + 1) * dp], 0, trained, first_file=rank * dp)
            notes += noted
            ranks.append(mine)
        for key in ranks[0]:
            if all(key in mine for mine in ranks):
                tensors.setdefault(key, shard_by_shard([mine[key] for mine in ranks]))
    return tensors, list(dict.fromkeys(notes))

"""Combines what was read from each file of a native checkpoint into one metadata. Opens no file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from elastic_ckpt.core.fqn import NameStates
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFile, is_floating
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import Features
from elastic_ckpt.errors import (
    WEIGHTS_ALONE,
    WITHOUT_STATES,
    DamagedError,
    LayoutError,
    MissingFilesError,
    UnsupportedError,
)
from elastic_ckpt.formats import merging, model_states, module_weights, partitioned, shards
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.grid import Grid, grid_of
from elastic_ckpt.formats.merging import ExpertShard, LayerShard
from elastic_ckpt.formats.model_states import ModelShard, UnpartitionedState
from elastic_ckpt.formats.numbered_stages import StageFiles, with_layers
from elastic_ckpt.formats.rank_files import RankFiles, extra_states_of
from elastic_ckpt.formats.same_save import refuse_within_step, spot_check, with_progress_compared
from elastic_ckpt.formats.saved_config import refuse_features
from elastic_ckpt.formats.shards import OptimizerShard, other_save_than_model
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.zero0 import numbered_states, unpartitioned_metadata


@dataclass(frozen=True)
class Assembled:
    """A native checkpoint."""

    ranks: Mapping[int, RankFiles]  # by model-parallel rank
    grid: Grid
    metadata: CheckpointMetadata


def assemble(
    found: CheckpointInfo,
    mp_ranks: Sequence[int],
    indexed: Sequence[Any],
    options: MetadataOptions,
    name_states: NameStates,
    opened: Collection[str] = (),
    lacking: Sequence[str] = (),
) -> Assembled:
    """Combine files, given each one's rank and contents; masters in those ``opened`` are compared with weights.

    ``lacking``: optimizer-states files that are missing, for want of which weights alone are taken.
    """
    if lacking:
        found = replace(found, files=replace(found.files, optimizer={}))
    layers = [item for item in indexed if isinstance(item, LayerShard)]
    ranks = _by_rank(mp_ranks, indexed)
    for rank in (rank for rank in ranks.values() if rank.model.lacks_names):
        # its files lack names of buffers, which dtypes tell as far as they can, and the version
        in_files = [rank.model.weights, *(each.weights for each in rank.experts)]
        refs = {name: ref for each in in_files for name, ref in each.items()}
        names = tuple(sorted(name for name, ref in refs.items() if not is_floating(ref.dtype)))
        version = next((shard.ds_version for shard in rank.optimizers), "")
        rank.models = [replace(model, buffer_names=names, ds_version=version) for model in rank.models]
    firsts = {mp: rank.model for mp, rank in ranks.items()}
    tp_of_layers = max((layer.tp_rank for layer in layers), default=-1) + 1
    grid = grid_of(firsts, found.folder, options.coordinates, tp_of_layers)
    model_states.check_same_save(list(firsts.values()), one_rank=False)
    for layer in (layer for layer in layers if layer.tp_rank >= grid.tp):
        problem = "this file is of a tensor-parallel rank that the save did not have: remove what another save left"
        raise LayoutError(problem, layer.path, f"ranks below {grid.tp}", f"rank {layer.tp_rank}")
    if not all(model.param_shapes for model in firsts.values()):
        for tp_rank, members in enumerate(zip(*grid.stages, strict=True)):
            _list_missing_shapes(ranks, members, [layer for layer in layers if layer.tp_rank == tp_rank])
    stages = numbered_stages(ranks, grid, layers, options) if layers else {}
    all_metadata = {
        mp: _fit_together(found, mp, rank, grid, options, name_states, stages.get(mp)) for mp, rank in ranks.items()
    }
    metadata = merging.merge_stages([merging.merge_shards([all_metadata[mp] for mp in stage]) for stage in grid.stages])
    known = frozenset[str]()
    if layers:
        buffers = frozenset(name for rank in ranks.values() for model in rank.models for name in model.buffer_names)
        known = buffers.union(metadata.parameters, options.live_names)
        if not metadata.parameters:  # of weights alone, whose names some files still list
            shapes = chain.from_iterable(model.param_shapes for model in firsts.values())
            known = known.union(name for name, _ in chain.from_iterable(shapes))
        weights = ((layer, layer.tp_rank, layer.named(known)) for layer in layers)
        metadata = merging.with_module_files(metadata, weights, buffers.__contains__, grid.tp)
    across = _experts_across(found, list(ranks.values()), grid.tp, options)
    if across is not None:
        metadata = merging.with_more(metadata, across)
    of_models = {mp: rank.models for mp, rank in ranks.items()}
    experts = {mp: rank.experts for mp, rank in ranks.items()}
    extra = extra_states_of(of_models, grid, options.coordinates, experts, layers, known)
    metadata = replace(metadata, extra_states=extra)
    if not metadata.parameters:
        models = {mp: rank.model for mp, rank in ranks.items()}
        metadata = module_weights.with_weights_checked(metadata, models, layers, lacking)
    files = Assembled(ranks, grid, metadata)
    if options.check_shards and opened:
        _spot_check(files, all_metadata, layers, across, opened)
    return files


def _spot_check(
    files: Assembled,
    all_metadata: Mapping[int, CheckpointMetadata],
    layers: Sequence[LayerShard],
    across: CheckpointMetadata | None,
    opened: Collection[str],
) -> None:
    """Compare masters with weights, in the files that this process opened."""

    def opened_of(metadata: CheckpointMetadata) -> set[int]:
        return {number for number, file in enumerate(metadata.files) if file.path in opened}

    known = frozenset(chain.from_iterable(metadata.parameters for metadata in all_metadata.values()))
    first_layers: dict[str, int] = {}
    of_places: dict[tuple[int, int], list[tuple[LayerShard, dict[str, TensorRef]]]] = {}
    for layer in layers:
        # a tied module's first layer is the first stage's, and copies on other stages may have other values
        by_stage: dict[int, dict[str, TensorRef]] = {}
        for name, ref in layer.named(known).items():
            if first_layers.setdefault(name, layer.layer) == layer.layer:
                by_stage.setdefault(files.metadata.stages.get(name, (0,))[0], {})[name] = ref
        for stage, own in by_stage.items():
            of_places.setdefault((stage, layer.tp_rank), []).append((layer, own))
    of_across = set() if across is None else opened_of(across)
    for mp, rank in files.ranks.items():
        mine = opened_of(all_metadata[mp])
        spot_check(all_metadata[mp], rank.model.path, rank.model.weights, mine)
        for layer, own in of_places.get(divmod(mp, files.grid.tp), ()):
            spot_check(all_metadata[mp], layer.path, own, mine)
        for expert in rank.experts:
            of_experts, shards = (all_metadata[mp], mine) if across is None else (across, of_across)
            spot_check(of_experts, expert.path, expert.weights, shards)


def _experts_across(
    found: CheckpointInfo, ranks: Sequence[RankFiles], tp: int, options: MetadataOptions
) -> CheckpointMetadata | None:
    """The metadata of the experts that tensor-parallel ranks do not slice, if any: each is on one of these, whole."""
    model = ranks[0].model
    of_ranks = [rank.optimizers for rank in ranks]
    flats = range(len(model.param_shapes)) if of_ranks[0] else ()
    numbers = [flat for flat in flats if partitioned.is_across(model, of_ranks[0], flat, tp)]
    if not numbers:
        return None
    shards = list(chain.from_iterable(zip(*of_ranks, strict=True)))  # tensor-parallel ranks count first
    experts = {(each.layer, each.expert): each for rank in ranks for each in rank.experts}
    _refuse_different_experts(model, shards, numbers)
    partitioned.check_experts(found, model, shards, [each for _, each in sorted(experts.items())], mp="*")
    metadata = partitioned.partitioned_metadata(found, [model], shards, None, options.states, numbers)
    metadata = with_progress_compared(metadata, model, options.check_shards, [shards[0].loss_scaler])
    ep = max(partitioned.degree_of(shards, flat) for flat in numbers)
    metadata = replace(metadata, source=replace(metadata.source, ep=ep))
    return partitioned.with_experts(metadata, list(experts.values()), model)


def _by_rank(mp_ranks: Sequence[int], indexed: Sequence[Any]) -> dict[int, RankFiles]:
    ranks: dict[int, RankFiles] = {}
    shared: dict[str, str] = {}
    for mp, item in zip(mp_ranks, indexed, strict=True):
        if isinstance(item, ModelShard):
            ranks.setdefault(mp, RankFiles()).models.append(item)
            shared = {**item.shared, **shared} if item.shared else shared
        elif isinstance(item, OptimizerShard):
            ranks.setdefault(mp, RankFiles()).optimizers.append(item)
        elif isinstance(item, ExpertShard):
            ranks.setdefault(mp, RankFiles()).experts.append(item)
        elif isinstance(item, UnpartitionedState):
            rank = ranks.setdefault(mp, RankFiles())
            rank.expert_optimizers.append(item)
            # the first has the dense parameters too, whose states are in the model-states file without experts
            rank.models = [replace(model, optimizer=model.optimizer or item) for model in rank.models]
    # DeepSpeed lists tied names in the file of the job's first rank alone (_get_shared_params, engine.py)
    known: dict[int, dict[str, str]] = {}  # files share their weights, and so do what is made of them
    for rank in ranks.values():
        for position, model in enumerate(rank.models):
            if model.optimizer is None and shared:
                mine = {name: target for name, target in shared.items() if name in model.weights}
                rank.models[position] = replace(model, shared=known.setdefault(id(model.weights), mine))
    return ranks


def _list_missing_shapes(ranks: Mapping[int, RankFiles], members: Iterable[int], layers: Sequence[LayerShard]) -> None:
    """List ``param_shapes`` by names of the slices, and shapes of weights in the files of modules, layers and experts.

    ``BF16_Optimizer`` without ZeRO lists none, nor does any file beside experts before 0.19.4. The spot check proves
    the slices right; in round-robin order, their names alone are used (``_round_robin_reorder``, stage_1_and_2.py).
    """
    sliced = (names for each in ranks.values() for shard in each.optimizers for names in shard.slice_names)
    known = frozenset(chain.from_iterable(sliced))
    of_others = {name: ref.shape for layer in layers for name, ref in layer.named(known).items()}
    experts = chain.from_iterable(each.experts for each in ranks.values())
    of_others |= {name: ref.shape for expert in experts for name, ref in expert.weights.items()}
    for rank in (ranks[mp] for mp in members):
        model = rank.model
        mine = rank.optimizers
        slices = [shard.slice_names for shard in mine]
        if not slices or model.param_shapes or not all(slices):
            continue
        flats = [list(dict.fromkeys(chain.from_iterable(names))) for names in zip(*slices, strict=True)]
        if mine[0].round_robin:
            counts = [partitioned.partitions_of(mine, flat) for flat in range(len(flats))]
            flats = [_in_turn(names, count) for names, count in zip(flats, counts, strict=True)]
        shapes = {name: ref.shape for name, ref in model.weights.items()} | of_others
        missing = [name for name in chain.from_iterable(flats) if name not in shapes]
        if missing and rank.experts:
            continue  # partitioned.check_experts names the file
        if missing:
            number = missing[0].partition(".")[0]
            problem = "the optimizer holds states of parameters of which no layer file has the weights"
            file = os.path.join(os.path.dirname(model.path), f"layer_{number:0>2}-*model_states.pt")
            both = "a file of every pipeline layer", "none with these parameters"
            raise DamagedError(problem, file, *both, parameter=missing)
        param_shapes = tuple(tuple((name, shapes[name]) for name in names) for names in flats)
        rank.models = [replace(each, param_shapes=param_shapes) for each in rank.models]


def _in_turn(names: Sequence[str], count: int) -> list[str]:
    """Names that are dealt to ``count`` ranks, by rank. The count is a file's claim, and may be of any size."""
    return [*chain.from_iterable(names[rank::count] for rank in range(min(count, len(names))))]


def numbered_stages(
    ranks: Mapping[int, RankFiles], grid: Grid, layers: Sequence[LayerShard], options: MetadataOptions
) -> dict[int, StageFiles]:
    """By model-parallel rank, what each stage of a pipeline has, if these number their states and states are wanted.

    Raises :class:`LayoutError` for a stage without states, where others have some.
    """
    optimizers = {mp: rank.model.optimizer for mp, rank in ranks.items() if not rank.optimizers}
    states = {mp: state for mp, state in optimizers.items() if state is not None}
    if not states or not options.with_states:
        return {}
    for lacking in (rank.model for mp, rank in ranks.items() if mp not in states):
        problem = "a pipeline stage has no optimizer states in its model-states file, and others have"
        expected = f"states, as in {states[min(states)].path}"
        found_here = "none, or files of partitioned ones"
        raise LayoutError(problem, lacking.path, expected, found_here, remedy=module_weights.RESTORE)
    found: dict[int, StageFiles] = {}
    for tp_rank, members in enumerate(zip(*grid.stages, strict=True)):
        of_rank = [layer for layer in layers if layer.tp_rank == tp_rank]
        models, files = with_layers([ranks[mp].model for mp in members], of_rank, options.live_names)
        folds = models[0].may_be_folded(len(members))
        pairs = zip(members, models, strict=True)
        numbered = [replace(numbered_states(model, states[mp], options), may_be_folded=folds) for mp, model in pairs]
        for number, (mp, model) in enumerate(zip(members, models, strict=True)):
            found[mp] = StageFiles(model, files, numbered, number)
    return found


def _fit_together(
    found: CheckpointInfo,
    mp: int,
    rank: RankFiles,
    grid: Grid,
    options: MetadataOptions,
    name_states: NameStates,
    stage: StageFiles | None,
) -> CheckpointMetadata:
    """The metadata of one model-parallel rank, without the experts that its tensor-parallel ranks do not slice."""
    models = rank.models
    optimizers = rank.optimizers
    features = models[0].features | (optimizers[0].features if optimizers else Features())
    refuse_features(features, models[0].path)
    numbers = _own_flats(found, mp, rank, grid)
    if optimizers:
        if options.with_states:
            shards.refuse_states_apart(models[0].zero, models[0].counters.get("global_steps", 0), optimizers)
        optimizers = shards.with_own_padding(optimizers)
        _check_belong_together(models, optimizers, numbers)
        own = grid.own_file(options.coordinates) if len(models) > 1 else None
        if grid.tp * grid.pp > 1 and any(flat.swapped for shard in optimizers for flat in shard.flats):
            problem = "optimizer states on NVMe of a model-parallel run are not supported yet"
            expected = "states inside the optimizer-states files, or a run without tensor and pipeline parallelism"
            raise UnsupportedError(
                problem, optimizers[0].path, expected, f"{counted(grid.tp * grid.pp, 'model-parallel rank')}"
            )
        metadata = partitioned.partitioned_metadata(found, models, optimizers, own, options.states, numbers)
    elif options.with_states and rank.experts and not (rank.expert_optimizers or models[0].zero.get("stage")):
        # the model-states file has the optimizer of rank 0 alone
        raise missing_file(found, "expp_rank_0_mp_rank_00_optim_states.pt", "none")
    elif models[0].without_states and not rank.expert_optimizers:
        if options.with_states:
            problem = "the checkpoint was saved without optimizer states, as DeepSpeed 0.17 saves bf16 without ZeRO, "
            problem += "and in ZeRO-1 with gradients in fp32"
            expected = "optimizer states, in this file or in optimizer-states files beside it"
            found_here = f"none, saved by DeepSpeed {models[0].ds_version}"
            remedy = WITHOUT_STATES, WEIGHTS_ALONE
            raise LayoutError(problem, models[0].path, expected, found_here, remedy=remedy)
        metadata = module_weights.weights_alone(found, models[0])
    elif models[0].optimizer is None:
        metadata = module_weights.of_model_files(found, mp, models[0], options.with_states)
    elif found.files.layers and not options.with_states:
        metadata = module_weights.weights_alone(found, models[0])
    else:
        experts = rank.experts if rank.expert_optimizers else ()
        states = rank.expert_optimizers
        metadata = unpartitioned_metadata(found, models[0], options, name_states, experts, states, stage)
    scalers = [each.scaler for each in rank.expert_optimizers]  # of files of optimizer states alone
    scalers += [each.loss_scaler for each in optimizers[:1]]
    refuse_within_step(models, options.check_shards)
    metadata = with_progress_compared(metadata, models[0], options.check_shards, scalers)
    degrees = [partitioned.degree_of(optimizers, flat) for flat in numbers if optimizers]
    ep = max([1, len(rank.expert_optimizers), *degrees])
    metadata = replace(metadata, source=replace(metadata.source, sequence=grid.sequence, ep=ep))
    is_whole = len(numbers) == len(models[0].param_shapes)
    return partitioned.with_experts(metadata, rank.experts, models[0]) if is_whole else metadata


def _own_flats(found: CheckpointInfo, mp: int, rank: RankFiles, grid: Grid) -> list[int]:
    """The flat tensors of one model-parallel rank without those of experts that its ranks do not slice."""
    model = rank.model
    optimizers = rank.optimizers
    numbers = list(range(len(model.param_shapes)))
    if not (rank.experts or model.features.experts):
        return numbers
    groups = [group for each in rank.expert_optimizers for group in each.groups]
    few = 2 * len(rank.expert_optimizers) <= max(map(partitioned.degree_in_name, groups), default=0)
    if not optimizers and grid.tp > 1 and (model.stacked or few):
        problem = "without ZeRO, experts that tensor-parallel ranks do not slice are not supported"
        expected = "a save with ZeRO-1 or 2, or enable_expert_tensor_parallelism"
        ep = len(rank.expert_optimizers)
        have = f"optimizers of {counted(ep, 'expert-parallel rank')} at tensor-parallel degree {grid.tp}"
        raise UnsupportedError(problem, model.path, expected, have)
    own = [flat for flat in numbers if not (optimizers and partitioned.is_across(model, optimizers, flat, grid.tp))]
    if own == numbers:
        partitioned.check_experts(found, model, optimizers, rank.experts, f"{mp:02d}")
        if optimizers:
            _refuse_different_experts(model, optimizers, numbers)
    return own


def missing_file(found: CheckpointInfo, name: str, have: str, parameters: Iterable[str] = ()) -> DamagedError:
    have_weights = name.endswith("optim_states.pt") and not found.files.model_zero3
    remedy = module_weights.RESTORE_OR_ALONE if have_weights else module_weights.RESTORE
    problem = "a file of the checkpoint is missing"
    concerned = tuple(parameters) or None
    return MissingFilesError(problem, found.path(name), name, have, parameter=concerned, remedy=remedy)


def _refuse_different_experts(model: ModelShard, optimizers: Sequence[OptimizerShard], numbers: Sequence[int]) -> None:
    """The model-states file has rank 0's names alone."""
    for flat in numbers:
        if not 0 < partitioned.partitions_of(optimizers, flat) < len(optimizers):
            continue
        names = {name for name, _ in model.param_shapes[flat]}
        for ranks in (divided.ranks for divided in partitioned.partition_groups(model, optimizers, flat)):
            sliced = [optimizers[rank].slice_names[flat : flat + 1] for rank in ranks]
            found = set(chain.from_iterable(chain.from_iterable(sliced)))
            if found == names or not all(sliced):
                continue
            problem = "expert-parallel ranks train different parameters of their experts, which is not supported yet"
            both = f"the parameters that rank 0 trains, according to {model.path}", "others, numbered as on that rank"
            raise UnsupportedError(problem, optimizers[ranks[0]].path, *both, parameter=found ^ names)


def _check_belong_together(
    models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard], numbers: Sequence[int]
) -> None:
    shards.check_same_save(optimizers)
    model_states.check_same_save(models)
    of_experts = {number for number, group in enumerate(optimizers[0].groups) if group.get("moe")}
    for number, count in enumerate(optimizers[0].partition_count or (len(optimizers),)):
        group = optimizers[0].flat_groups[number] if number < len(optimizers[0].flat_groups) else number
        # fewer ranks divide a group of experts, those that hold the same
        if number in numbers and (group not in of_experts or not count or len(optimizers) % count):
            _check_count(optimizers, count, "partition_count of the optimizer-states files")
    _check_count(optimizers, int(models[0].counters["dp_world_size"]), f"dp_world_size in {models[0].path}")
    if optimizers[0].zero_stage == 3:
        _check_count(models, len(optimizers), "the number of optimizer-states files")
    if len(models[0].param_shapes) != len(optimizers[0].flats):
        expected = f"{counted(len(models[0].param_shapes), 'flat tensor')}, from {models[0].path}"
        problem = "model-states and optimizer-states files are of different saves"
        raise other_save_than_model(optimizers[0], problem, expected, len(optimizers[0].flats))


def _check_count(files: Sequence[SourceFile], expected: int, according_to: str) -> None:
    """Require ``expected`` files, and name the first that is missing or one too many."""
    found = len(files)
    if found != expected:
        folder, name = os.path.split(files[0].path)
        missing = os.path.join(folder, name.replace("zero_pp_rank_0_", f"zero_pp_rank_{found}_"))
        problem = f"a file of the checkpoint is {'missing' if found < expected else 'one too many'}"
        file = files[expected].path if found > expected else missing
        have = f"{counted(found, 'file')}, {name} to {os.path.basename(files[-1].path)}"
        have_weights = found < expected and isinstance(files[0], OptimizerShard) and files[0].zero_stage < 3
        remedy = module_weights.RESTORE_OR_ALONE if have_weights else module_weights.RESTORE
        error = MissingFilesError if found < expected else LayoutError
        raise error(problem, file, f"{counted(expected, 'file')}, according to {according_to}", have, remedy=remedy)

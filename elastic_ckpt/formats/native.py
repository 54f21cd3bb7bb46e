"""Native checkpoints, of any ZeRO stage -> Catalog."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from elastic_ckpt import parallel
from elastic_ckpt.catalog import Catalog, SourceFacts
from elastic_ckpt.destinations import Place
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.errors import listed as listed_names
from elastic_ckpt.formats import model_states, shards
from elastic_ckpt.formats.base import (
    Checkpoint,
    Found,
    ReadOptions,
    open_my_share,
    refuse_unsupported_folder,
    source_file,
)
from elastic_ckpt.formats.features import Features, refuse_features
from elastic_ckpt.formats.grid import Grid, grid_of
from elastic_ckpt.formats.host_state import loss_scale_from, loss_scale_of, read_host_state
from elastic_ckpt.formats.layers import LayerShard, index_layer, layer_tensors
from elastic_ckpt.formats.legacy import LegacyShard, refuse_legacy
from elastic_ckpt.formats.merging import merge_shards, merge_stages
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.partitioned import partitioned_catalog
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.progress import with_progress_compared
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.spot_check import SavedWeights, spot_check
from elastic_ckpt.formats.zero0 import unpartitioned_catalog
from elastic_ckpt.formats.zero3 import index_zero3
from elastic_ckpt.formats.zero12 import index_zero12
from elastic_ckpt.host_state import HostState, LossScale
from elastic_ckpt.states.classify import StateOptions


@dataclass(frozen=True)
class _Names:
    """Names of one model-parallel rank's files, in data-parallel order."""

    models: tuple[str, ...]
    optimizers: tuple[str, ...]


@dataclass
class _Rank:
    """What one model-parallel rank's files hold, and the positions at which they stand in the list of all files."""

    models: dict[int, ModelShard] = field(default_factory=dict)
    optimizers: dict[int, OptimizerShard] = field(default_factory=dict)

    @property
    def positions(self) -> list[int]:
        """In the order of the files of the rank's catalog."""
        return [*self.models, *self.optimizers]


def read_native(found: Found, options: ReadOptions) -> Checkpoint:
    """Read the metadata of a native checkpoint. Collective.

    Raises:
        ElasticCkptError: on every rank, where the folder is incomplete, mixed, damaged or not supported.
    """
    with parallel.agreement("look at the checkpoint's files"):
        refuse_unsupported_folder(found)
        names = {mp: _expected_files(found, mp) for mp in sorted(found.files.mp_ranks)}
    kinds = [(mp, dp, "model") for mp, mine in names.items() for dp in range(len(mine.models))]
    kinds += [(mp, dp, "optimizer") for mp, mine in names.items() for dp in range(len(mine.optimizers))]
    kinds += [(*place, "layer") for place in sorted(found.files.layers)]
    paths = [found.path(_name_of(found, names, kind)) for kind in kinds]

    def index(file: PickledFile, position: int) -> ModelShard | OptimizerShard | LegacyShard | LayerShard:
        first, second, kind = kinds[position]
        if kind == "layer":
            return index_layer(file, first, second)
        if kind == "model":
            return index_model_states(file, second, options.states)
        return _index_optimizer(file, second, options.states)

    indexed, opened = open_my_share(paths, index, options.trust_pickle)
    with parallel.agreement("fit the checkpoint's files together"):
        refuse_legacy([item for item in indexed if isinstance(item, LegacyShard)], options.with_states)
        layers = [item for item in indexed if isinstance(item, LayerShard)]
        ranks = _by_rank(kinds, indexed)
        grid = grid_of({mp: next(iter(rank.models.values())) for mp, rank in ranks.items()}, found.folder)
        model_states.check_same_save([next(iter(rank.models.values())) for rank in ranks.values()], one_rank=False)
        _list_missing_shapes(ranks, grid, layers)
        catalogs = {mp: _fit_together(found, rank, grid, options) for mp, rank in ranks.items()}
        catalog = merge_stages([merge_shards([catalogs[mp] for mp in stage]) for stage in grid.stages])
        catalog = _with_layers(catalog, ranks, layers, grid, options.live_names)
        catalog = with_progress_compared(catalog, next(iter(ranks[0].models.values())), options.check_shards)
    with parallel.agreement("compare shards with the saved weights"):
        if options.check_shards:
            _spot_check(catalogs, ranks, layers, grid, opened)
    own = _own_position(ranks, grid, options.place)
    host = _host_state(opened, kinds, ranks, own, _is_unchanged(ranks, grid, options.place))
    host = replace(host, degrees=(grid.tp, grid.pp))
    return Checkpoint(catalog, host, paths[own], len(opened))


def _name_of(found: Found, names: Mapping[int, _Names], kind: tuple[int, int, str]) -> str:
    first, second, what = kind
    if what == "layer":
        return found.files.layers[first, second]
    return (names[first].models if what == "model" else names[first].optimizers)[second]


def _by_rank(kinds: Sequence[tuple[int, int, str]], indexed: Sequence[Any]) -> dict[int, _Rank]:
    ranks: dict[int, _Rank] = {}
    for position, ((mp, _, _), item) in enumerate(zip(kinds, indexed, strict=True)):
        if isinstance(item, ModelShard):
            ranks.setdefault(mp, _Rank()).models[position] = item
        elif isinstance(item, OptimizerShard):
            ranks.setdefault(mp, _Rank()).optimizers[position] = item
    return _with_ties(ranks)


def _with_ties(ranks: dict[int, _Rank]) -> dict[int, _Rank]:
    """DeepSpeed lists tied names in the file of the job's first rank alone (``_get_shared_params``, engine.py)."""
    models = [model for rank in ranks.values() for model in rank.models.values()]
    shared = {name: target for model in reversed(models) for name, target in model.shared.items()}
    for rank in ranks.values():
        for position, model in rank.models.items():
            known = {name: target for name, target in shared.items() if name in model.weights}
            rank.models[position] = replace(model, shared=known if model.optimizer is None else model.shared)
    return ranks


def _list_missing_shapes(ranks: Mapping[int, _Rank], grid: Grid, layers: Sequence[LayerShard]) -> None:
    """``BF16_Optimizer`` without ZeRO lists no ``param_shapes``: names are those of its slices, shapes those of layers.

    That its slices are right is proven by :func:`_spot_check`; only ZeRO-1/2 in round-robin order writes wrong ones.
    """
    sliced = (names for rank in ranks.values() for shard in rank.optimizers.values() for names in shard.slice_names)
    known = frozenset(chain.from_iterable(sliced))
    for stage in grid.stages:
        for tp_rank, mp in enumerate(stage):
            rank = ranks[mp]
            shards = list(rank.optimizers.values())
            model = next(iter(rank.models.values()))
            if not shards or model.param_shapes or not all(shard.slice_names for shard in shards):
                continue
            by_flat = zip(*(shard.slice_names for shard in shards), strict=True)
            flats = [dict.fromkeys(chain.from_iterable(names)) for names in by_flat]
            shapes = {name: ref.shape for name, ref in model.weights.items()}
            for layer in layers:
                if layer.tp_rank == tp_rank:
                    shapes |= {name: ref.shape for name, ref in layer.named(known).items()}
            _refuse_unlisted(found_in=model.path, names=chain.from_iterable(flats), shapes=shapes)
            listed = tuple(tuple((name, shapes[name]) for name in names) for names in flats)
            rank.models = {at: replace(item, param_shapes=listed) for at, item in rank.models.items()}


def _refuse_unlisted(found_in: str, names: Iterable[str], shapes: Mapping[str, Any]) -> None:
    missing = [name for name in names if name not in shapes]
    if missing:
        layer = missing[0].partition(".")[0]
        raise DamagedError(
            "the optimizer holds states of parameters of which no layer file has the weights",
            parameter=listed_names(missing),
            file=os.path.join(os.path.dirname(found_in), f"layer_{layer:0>2}-*model_states.pt"),
            expected="a file of every pipeline layer",
            found="none with these parameters",
            remedy="restore the file from its original, or take another tag",
        )


def _is_unchanged(ranks: Mapping[int, _Rank], grid: Grid, place: Place) -> bool:
    """Whether the job has the topology of the save."""
    saved_dp = int(next(iter(ranks[0].models.values())).counters["dp_world_size"])
    return (grid.tp, grid.pp, saved_dp) == (place.tp, place.pp, place.dp)


def _own_position(ranks: Mapping[int, _Rank], grid: Grid, place: Place) -> int:
    """The model-states file that holds what belongs to this rank: its own where the topology allows, else rank 0's."""
    mine = ranks[place.mp_rank if (grid.tp, grid.pp) == (place.tp, place.pp) else 0]
    per_rank = len(mine.models) > 1 and _is_unchanged(ranks, grid, place)
    return list(mine.models)[place.dp_rank if per_rank else 0]


def _fit_together(found: Found, rank: _Rank, grid: Grid, options: ReadOptions) -> Catalog:
    """The catalog of one model-parallel rank's files."""
    models, optimizers = list(rank.models.values()), list(rank.optimizers.values())
    features = models[0].features | (optimizers[0].features if optimizers else Features())
    refuse_features(features, models[0].path)
    if optimizers:
        _check_belong_together(models, optimizers)
        unchanged = _is_unchanged({0: rank}, grid, options.place)
        own = options.place.dp_rank if len(models) > 1 and unchanged else 0
        _refuse_swapped(optimizers, grid)
        per_rank = len(models) > 1 and unchanged
        catalog = partitioned_catalog(found, models, optimizers, own, per_rank, options.states)
    elif models[0].optimizer is None:
        number = re.search(r"mp_rank_(\d+)", os.path.basename(models[0].path))
        raise _missing(found, f"*zero_pp_rank_0_mp_rank_{number[1] if number else '00'}_optim_states.pt", "none")
    elif found.files.layers and not options.with_states:
        catalog = _without_states(found, models[0])
    else:
        _refuse_unnamed(found, models[0])
        catalog = unpartitioned_catalog(found, models[0], options)
    return replace(catalog, declared=models[0].declared, run=models[0].run)


def _without_states(found: Found, model: ModelShard) -> Catalog:
    """Weights alone, which lie in the files of the layers."""
    dp = int(model.counters["dp_world_size"])
    source = SourceFacts("native", found.folder, found.tag, 0, dp, model.ds_version)
    return Catalog(source, (source_file(model),), {}, {}, (), frozen_recorded=False, notes=found.notes)


def _refuse_swapped(optimizers: Sequence[OptimizerShard], grid: Grid) -> None:
    if grid.tp * grid.pp > 1 and any(flat.swapped for shard in optimizers for flat in shard.flats):
        raise UnsupportedError(
            "optimizer states on NVMe of a model-parallel run are not supported yet",
            file=optimizers[0].path,
            expected="states inside the optimizer-states files, or a run without tensor and pipeline parallelism",
            found=f"{grid.tp * grid.pp} model-parallel ranks",
        )


def _refuse_unnamed(found: Found, model: ModelShard) -> None:
    """Without ZeRO, states are numbered in the order of the module, and pipelines do not save that order."""
    if found.files.layers:
        raise UnsupportedError(
            "pipeline checkpoints without ZeRO do not say which optimizer state is of which parameter",
            file=model.path,
            expected='a save with "zero_optimization": {"stage": 1} (or bf16 with fp32 gradient accumulation)',
            found="optimizer states that are numbered, not named",
            remedy="load it at the topology it was saved with, or its weights alone: load_module_only=True",
        )


def _with_layers(
    catalog: Catalog,
    ranks: Mapping[int, _Rank],
    layers: Sequence[LayerShard],
    grid: Grid,
    live_names: frozenset[str],
) -> Catalog:
    if not layers:
        return catalog
    models = [model for rank in ranks.values() for model in rank.models.values()]
    buffers = frozenset(name for model in models for name in model.buffer_names)
    tensors, files = layer_tensors(catalog, layers, buffers, grid.tp, live_names)
    return replace(catalog, tensors={**catalog.tensors, **tensors}, files=catalog.files + files)


def _spot_check(
    catalogs: Mapping[int, Catalog],
    ranks: Mapping[int, _Rank],
    layers: Sequence[LayerShard],
    grid: Grid,
    opened: Mapping[int, PickledFile],
) -> None:
    """Compare each rank's masters with its weights, in the files that this process opened."""
    known = frozenset(chain.from_iterable(catalog.parameters for catalog in catalogs.values()))
    for mp, rank in ranks.items():
        mine = {number for number, position in enumerate(rank.positions) if position in opened}
        model = next(iter(rank.models.values()))
        spot_check(catalogs[mp], SavedWeights(model.path, model.weights), mine)
        tp_rank = next(stage.index(mp) for stage in grid.stages if mp in stage)
        for layer in layers:
            if layer.tp_rank == tp_rank:
                spot_check(catalogs[mp], SavedWeights(layer.path, layer.named(known)), mine)


def _expected_files(found: Found, mp: int) -> _Names:
    """Names of one rank's model-states and optimizer-states files; errors where the set has holes."""
    optimizer = {dp: name for (dp, rank), name in found.files.optimizer.items() if rank == mp}
    zero3 = {dp: name for (dp, rank), name in found.files.model_zero3.items() if rank == mp}
    model = found.files.model.get(mp)
    if model and zero3:
        raise DamagedError(
            "model-states files of ZeRO-3 and of another stage lie in one folder",
            file=found.path(model),
            expected="files of one save",
            found=f"{model} beside {zero3[min(zero3)]}",
            remedy="remove the files of the older save, or take another tag",
        )
    if not model and not zero3:
        raise _missing(
            found, f"mp_rank_{mp:02d}_model_states.pt (or zero_pp_rank_*_mp_rank_{mp:02d}_model_states.pt)", "none"
        )
    for kind, names in (("optim_states", optimizer), ("model_states", zero3)):
        holes = set(range(max(names, default=-1) + 1)) - set(names)
        if holes:
            sample = next(iter(names.values())).replace(f"rank_{next(iter(names))}_", f"rank_{min(holes)}_", 1)
            raise _missing(found, sample, f"{kind} of ranks {sorted(names)}")
    models = (model,) if model else tuple(zero3[rank] for rank in sorted(zero3))
    return _Names(models, tuple(optimizer[rank] for rank in sorted(optimizer)))


def _missing(found: Found, name: str, have: str) -> DamagedError:
    return DamagedError(
        "a file of the checkpoint is missing",
        file=found.path(name),
        expected=name,
        found=have,
        remedy="restore the file from its original, or take another tag",
    )


def _index_optimizer(file: PickledFile, dp_rank: int, options: StateOptions) -> OptimizerShard | LegacyShard:
    index: Callable[..., OptimizerShard | LegacyShard] = (
        index_zero3 if "fp32_flat_groups" in file.section("optimizer_state_dict") else index_zero12
    )
    return index(file, dp_rank, options)


def _check_belong_together(models: list[ModelShard], optimizers: list[OptimizerShard]) -> None:
    shards.check_same_save(optimizers)
    model_states.check_same_save(models)
    optimizer_paths = [shard.path for shard in optimizers]
    model_paths = [shard.path for shard in models]
    for count in optimizers[0].partition_count or (len(optimizers),):
        _check_count(optimizer_paths, count, "partition_count of the optimizer-states files")
    _check_count(optimizer_paths, int(models[0].counters["dp_world_size"]), f"dp_world_size in {models[0].path}")
    if optimizers[0].zero_stage == 3:
        _check_count(model_paths, len(optimizers), "the number of optimizer-states files")
    if len(models[0].param_shapes) != len(optimizers[0].flats):
        raise DamagedError(
            "model-states and optimizer-states files are of different saves",
            file=optimizers[0].path,
            expected=f"{len(models[0].param_shapes)} flat tensors, from {models[0].path}",
            found=len(optimizers[0].flats),
            remedy="restore the folder from its original",
        )


def _check_count(paths: list[str], expected: int, according_to: str) -> None:
    """There must be one file for each of ``expected`` ranks; names the first that is missing or too many."""
    if len(paths) == expected:
        return
    offender = paths[expected] if len(paths) > expected else _of_rank(paths[0], len(paths))
    raise DamagedError(
        f"a file of the checkpoint is {'missing' if len(paths) < expected else 'one too many'}",
        file=offender,
        expected=f"{expected} files, according to {according_to}",
        found=f"{len(paths)} files, {os.path.basename(paths[0])} to {os.path.basename(paths[-1])}",
        remedy="restore the missing shards, or remove those of another save",
    )


def _of_rank(path: str, rank: int) -> str:
    """The path of rank 0's file, turned into another rank's."""
    folder, name = os.path.split(path)
    return os.path.join(folder, name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_"))


def _host_state(
    opened: Mapping[int, PickledFile],
    kinds: Sequence[tuple[int, int, str]],
    ranks: Mapping[int, _Rank],
    own: int,
    unchanged: bool,
) -> HostState:
    """The host state of the file at position ``own``, whichever rank has opened it. Collective."""
    asked = parallel.share(own)
    elsewhere = {position for rank, position in enumerate(asked) if rank != parallel.rank()}
    mine: HostState | None = None
    with parallel.agreement("read counters, scheduler and client state"):
        packed: dict[int, bytes] = {}
        for position in sorted({own, *elsewhere} & set(opened)):
            rank = ranks[kinds[position][0]]
            models, optimizers = list(rank.models.values()), list(rank.optimizers.values())
            overflow = optimizers[0].overflow if optimizers else False
            state = read_host_state(opened[position], _loss_scale(models, optimizers), overflow, unchanged)
            if position == own:
                mine = state
            if position in elsewhere:
                packed[position] = parallel.pack(state)
    everybody: dict[int, bytes] = {}
    for part in parallel.share(packed):
        everybody.update(part)
    return mine if mine is not None else parallel.unpack(everybody[own])


def _loss_scale(models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard]) -> LossScale | None:
    if optimizers:
        return loss_scale_of(optimizers[0].loss_scaler)
    return None if models[0].optimizer is None else loss_scale_from(models[0].optimizer.scaler)

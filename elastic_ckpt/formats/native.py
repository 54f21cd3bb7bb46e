"""Native checkpoints, of any ZeRO stage -> Catalog."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from elastic_ckpt import parallel
from elastic_ckpt.catalog import (
    Catalog,
)
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats import model_states, shards
from elastic_ckpt.formats.base import (
    Checkpoint,
    Found,
    ReadOptions,
    open_my_share,
    refuse_unsupported_folder,
)
from elastic_ckpt.formats.features import Features, refuse_features
from elastic_ckpt.formats.host_state import loss_scale_from, loss_scale_of, read_host_state
from elastic_ckpt.formats.legacy import LegacyShard, refuse_legacy
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.partitioned import partitioned_catalog
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.progress import with_progress_compared
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.spot_check import spot_check
from elastic_ckpt.formats.zero0 import unpartitioned_catalog
from elastic_ckpt.formats.zero3 import index_zero3
from elastic_ckpt.formats.zero12 import index_zero12
from elastic_ckpt.host_state import HostState, LossScale
from elastic_ckpt.states.classify import StateOptions


def read_native(found: Found, options: ReadOptions) -> Checkpoint:
    """Read the metadata of a native checkpoint. Collective.

    Raises:
        ElasticCkptError: on every rank, where the folder is incomplete, mixed, damaged or not supported.
    """
    with parallel.agreement("look at the checkpoint's files"):
        refuse_unsupported_folder(found)
        model_names, optimizer_names = _expected_files(found)
    paths = [found.path(name) for name in model_names + optimizer_names]

    def index(file: PickledFile, position: int) -> ModelShard | OptimizerShard | LegacyShard:
        if position < len(model_names):
            return index_model_states(file, position, options.states)
        return _index_optimizer(file, position - len(model_names), options.states)

    indexed, opened = open_my_share(paths, index, options.trust_pickle)
    models = [item for item in indexed if isinstance(item, ModelShard)]
    optimizers = [item for item in indexed if isinstance(item, OptimizerShard)]
    with parallel.agreement("fit the checkpoint's files together"):
        refuse_legacy([item for item in indexed if isinstance(item, LegacyShard)], options.with_states)
        own = parallel.rank() if len(models) == parallel.world_size() else 0
        catalog = _fit_together(found, models, optimizers, own, options)
        catalog = with_progress_compared(catalog, models[0], options.check_shards)
    with parallel.agreement("compare shards with the saved weights"):
        if options.check_shards:
            spot_check(catalog, models[0], opened)
    host = _host_state(opened, models, optimizers)
    return Checkpoint(catalog, host, models[own].path, len(opened))


def _fit_together(
    found: Found, models: list[ModelShard], optimizers: list[OptimizerShard], own: int, options: ReadOptions
) -> Catalog:
    features = models[0].features | (optimizers[0].features if optimizers else Features())
    refuse_features(features, models[0].path)
    if optimizers:
        _check_belong_together(models, optimizers)
        per_rank = 1 < len(models) == parallel.world_size()
        return partitioned_catalog(found, models, optimizers, own, per_rank, options.states)
    if models[0].optimizer is None:
        raise _missing(found, "*zero_pp_rank_0_mp_rank_00_optim_states.pt", "none")
    return unpartitioned_catalog(found, models[0], options)


def _expected_files(found: Found) -> tuple[list[str], list[str]]:
    """Names of model-states and optimizer-states files in rank order; errors where the set has holes."""
    optimizer = {dp: name for (dp, _), name in found.files.optimizer.items()}
    zero3 = {dp: name for (dp, _), name in found.files.model_zero3.items()}
    model = list(found.files.model.values())
    if model and zero3:
        raise DamagedError(
            "model-states files of ZeRO-3 and of another stage lie in one folder",
            file=found.path(model[0]),
            expected="files of one save",
            found=f"{model[0]} beside {zero3[min(zero3)]}",
            remedy="remove the files of the older save, or take another tag",
        )
    if not model and not zero3:
        raise _missing(found, "mp_rank_00_model_states.pt (or zero_pp_rank_*_mp_rank_00_model_states.pt)", "none")
    for kind, names in (("optim_states", optimizer), ("model_states", zero3)):
        holes = set(range(max(names, default=-1) + 1)) - set(names)
        if holes:
            sample = next(iter(names.values())).replace(f"rank_{next(iter(names))}_", f"rank_{min(holes)}_")
            raise _missing(found, sample, f"{kind} of ranks {sorted(names)}")
    models = model or [zero3[rank] for rank in sorted(zero3)]
    return models, [optimizer[rank] for rank in sorted(optimizer)]


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
    opened: dict[int, PickledFile], models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard]
) -> HostState:
    """This rank's own host state where the topology allows, else rank 0's. Collective."""
    unchanged = int(models[0].counters["dp_world_size"]) == parallel.world_size()
    per_rank = len(models) == parallel.world_size()
    mine: HostState | None = None
    with parallel.agreement("read counters, scheduler and client state"):
        position = parallel.rank() if per_rank else 0
        if position in opened:
            overflow = optimizers[0].overflow if optimizers else False
            mine = read_host_state(opened[position], _loss_scale(models, optimizers), overflow, per_rank or unchanged)
        pickled = None if per_rank or mine is None else parallel.pack(mine)
    return mine if per_rank and mine is not None else parallel.unpack(parallel.broadcast(pickled, src=0))


def _loss_scale(models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard]) -> LossScale | None:
    if optimizers:
        return loss_scale_of(optimizers[0].loss_scaler)
    return None if models[0].optimizer is None else loss_scale_from(models[0].optimizer.scaler)

"""Reads native checkpoints of any ZeRO stage.

DeepSpeed's checkpoint writers (``"checkpoint": {"writer": ...}``) save the model-states file below ZeRO-3 on each rank
that is one. ``fast`` writers of several replicas, sockets or machines each write a whole copy, under a name of their
own. Ranks of one name write one file at the same time, so that it may be a mixture of theirs: all of them with
``python``, with ``fast`` those that are not the writers of their socket or machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

from elastic_ckpt.core.fqn import NameStates
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import TrainingState
from elastic_ckpt.errors import (
    DamagedError,
    ElasticCkptError,
    MissingFilesError,
    SavedOverError,
    UnsupportedError,
    errors_of_file,
    listed,
    shortened,
)
from elastic_ckpt.formats import merging, partitioned
from elastic_ckpt.formats.assembling import Assembled, assemble, missing_file
from elastic_ckpt.formats.base import CheckpointInfo, Fitted, FolderReading, MetadataOptions, Once, OpenFile
from elastic_ckpt.formats.leftovers import find_leftovers
from elastic_ckpt.formats.merging import ExpertShard, LayerShard
from elastic_ckpt.formats.model_states import ModelShard, UnpartitionedState, index_unpartitioned, model_indexer
from elastic_ckpt.formats.module_weights import RESTORE, RESTORE_OR_ALONE
from elastic_ckpt.formats.naming import number_of_writers, plain_name
from elastic_ckpt.formats.own_entries import checked_tree
from elastic_ckpt.formats.pickled import PickledFile, open_file
from elastic_ckpt.formats.saved_config import (
    COUNTERS,
    config_section,
    loss_scale_of,
    read_training_state,
    section_of,
)
from elastic_ckpt.formats.saved_files import refuse_other_files
from elastic_ckpt.formats.shards import OptimizerShard, index_shard
from elastic_ckpt.storage import open_stream

_SAVE_ELSE = 'use another tag; save without "writer", or with "type": "fast" and "data_parallel": "replica"'
#: Files that are not there are not enumerated if they would be more than this, and than those that are: the number of
#: ranks is only a file's claim.
_MOST_RANKS = 1 << 17
_RANKS = re.compile(r"rank_\d+_mp_rank_\d+")
#: What one file of a native checkpoint holds.
Indexed = ModelShard | OptimizerShard | LayerShard | ExpertShard | UnpartitionedState | None
Indexer = Callable[[PickledFile], Indexed]


def native_reading(found: CheckpointInfo, options: MetadataOptions, once: Once) -> FolderReading:
    """How to read a native checkpoint."""
    if found.files.by_fast_writer:
        once(lambda: refuse_writers(found, options.trust_pickle))
    mp_ranks, names, indexers = zip(*_expected_files(found, options), strict=True)
    paths = list(map(found.path, names))

    def read(position: int, open_one: OpenFile) -> Indexed | ElasticCkptError:
        try:
            return indexers[position](open_one(paths[position]))
        except SavedOverError:
            raise
        except (DamagedError, UnsupportedError) as error:
            return error  # which is none where the file is left over

    def fit(read: Sequence[Any], opened: Mapping[str, PickledFile], name_states: NameStates) -> Fitted:
        left = find_leftovers(found, dict(zip(names, read, strict=True)))
        belong = (item for name, item in zip(names, read, strict=True) if name not in left)
        gone = missing_optimizers(found, left, [item for item in belong if isinstance(item, ModelShard)])
        # below ZeRO-3, weights are in the files of the module
        are_alone = bool(gone) and not (options.with_states or found.files.model_zero3)
        useless = left.union(found.files.optimizer.values()) if are_alone else left
        kept = [name not in useless for name in names]
        indexed = [*compress(read, kept)]
        if damaged := [item for item in indexed if isinstance(item, DamagedError)]:
            raise damaged[0]
        if not are_alone:
            _refuse_missing(found, gone)
            _refuse_holes(found, left, options.states)
        if unsupported := [item for item in indexed if isinstance(item, UnsupportedError)]:  # which no waiting mends
            raise unsupported[0]
        lacking = gone if are_alone else ()
        files = assemble(found, [*compress(mp_ranks, kept)], indexed, options, name_states, opened, lacking)
        note = f"left out: files of another save of this tag, on other ranks, which may be removed: {listed(left)}"
        own, for_all = _own_state(files, options.coordinates)
        if options.check_shards and paths[0] in opened:  # one rank reads the sheet for all
            refuse_other_files(found.folder, int(own.counters["global_steps"]), indexed)

        def read_state(at: int) -> TrainingState:
            path = paths[at]
            grid = files.grid
            rank = next(rank for rank in files.ranks.values() if any(model.path == path for model in rank.models))
            scaler = None if rank.model.optimizer is None else rank.model.optimizer.scaler
            overflow = False
            of_scaler = path
            if rank.optimizers:
                of_scaler = rank.optimizers[0].path
                scaler = rank.optimizers[0].loss_scaler
                overflow = rank.optimizers[0].overflow
            same_ranks = grid.has_ranks_of(options.coordinates)
            with errors_of_file(of_scaler):
                scale = loss_scale_of(scaler, wanted=options.with_states)
            state = read_training_state(opened[path], scale, overflow, same_ranks, grid.sequence, options)
            return replace(state, degrees=(grid.tp, grid.pp))

        metadata = replace(files.metadata, notes=(*files.metadata.notes, *([note] if left else ())))
        return Fitted(metadata, own.path, None, paths.index(own.path), for_all, read_state)

    return FolderReading(len(paths), paths.__getitem__, read, fit)


def _own_state(files: Assembled, coordinates: RankCoordinates) -> tuple[ModelShard, bool]:
    """The file with this rank's training state, its own if the topology allows; whether all want that."""
    grid = files.grid
    same_model = (grid.tp, grid.pp) == (coordinates.tp, coordinates.pp)
    models = files.ranks[coordinates.mp_rank if same_model else 0].models
    own = grid.own_file(coordinates) if len(models) > 1 else None
    return models[own or 0], own is None and (not same_model or coordinates.tp * coordinates.pp == 1)


def _expected_files(found: CheckpointInfo, wanted: MetadataOptions) -> list[tuple[int, str, Indexer]]:
    """Model-parallel rank, name and indexer of each file."""
    files = found.files
    options = wanted.states
    index_model = model_indexer(options, files.of_weights_alone and not wanted.with_states)
    every: list[tuple[int, str, Indexer]] = []

    def index_whole_model(file: PickledFile) -> ModelShard:
        refuse_mixture(file)
        return index_model(file)

    optimizers = _by_model_rank(files.optimizer)
    models_zero3 = _by_model_rank(files.model_zero3)
    for mp in sorted(files.mp_ranks):
        model = files.model.get(mp)
        optimizer = optimizers.get(mp, {})
        zero3 = models_zero3.get(mp, {})
        if model and zero3:
            problem = "model-states files of ZeRO-3 and of another stage are in one folder: two saves are mixed"
            raise DamagedError(problem, found.path(model), "files of one save", f"{model} beside {zero3[min(zero3)]}")
        if not model and not zero3:
            expected = f"mp_rank_{mp:02d}_model_states.pt (or zero_pp_rank_*_mp_rank_{mp:02d}_model_states.pt)"
            raise missing_file(found, expected, "none")
        every += [(mp, name, index_whole_model) for _, name in sorted(({0: model} if model else zero3).items())]
        for dp, name in sorted(optimizer.items()):
            every.append((mp, name, partial(index_shard, dp_rank=dp, options=options)))
    for (layer, tp_rank), name in sorted(files.layers.items()):
        every.append((-1, name, partial(merging.index_layer, layer=layer, tp_rank=tp_rank)))
    for (ep_rank, mp), name in sorted(files.expert_optimizers.items()):
        every.append((mp, name, partial(index_unpartitioned, options=options, ep_rank=ep_rank)))
    experts = sorted((mp, layer, expert, name) for (layer, expert, mp), name in files.experts.items())
    return [*every, *((mp, name, merging.index_expert) for mp, _, _, name in experts)]


def _by_model_rank(files: Mapping[tuple[int, int], str]) -> dict[int, dict[int, str]]:
    """Model-parallel rank -> data-parallel rank -> file."""
    found: dict[int, dict[int, str]] = {}
    for (dp, mp), name in files.items():
        found.setdefault(mp, {})[dp] = name
    return found


def _of(files: Mapping[tuple[int, int], str], mp: int) -> dict[int, str]:
    return {dp: name for (dp, rank), name in files.items() if rank == mp}


def missing_optimizers(found: CheckpointInfo, left: Collection[str], models: Sequence[ModelShard]) -> list[str]:
    """The optimizer-states files that are missing between others of a save, by the ranks that its ``models`` state."""
    present = {at: name for at, name in found.files.optimizer.items() if name not in left}
    ranks = max((int(model.counters["dp_world_size"]) for model in models), default=0)
    if not present or ranks * len(found.files.mp_ranks) > _MOST_RANKS + 2 * len(present):
        return []
    sample = plain_name(next(iter(present.values())))
    places = ((dp, mp) for mp in sorted(found.files.mp_ranks) for dp in range(ranks))
    wanted = {(dp, mp): _RANKS.sub(f"rank_{dp}_mp_rank_{mp:02d}", sample) for dp, mp in places}
    return [name for at, name in wanted.items() if at not in present]


def _refuse_missing(found: CheckpointInfo, names: Sequence[str]) -> None:
    """Raise :class:`MissingFilesError` for several files; one alone is refused with more that is known of it."""
    if len(names) > 1:
        problem = "optimizer-states files are missing"
        problem += ", which under ZeRO-3 hold the weights too" if found.files.model_zero3 else ""
        remedy = RESTORE if found.files.model_zero3 else RESTORE_OR_ALONE
        have = f"{len(found.files.optimizer)} others"
        raise MissingFilesError(problem, found.path(names[0]), shortened(names), have, remedy=remedy)


def _refuse_holes(found: CheckpointInfo, left: Collection[str], options: StateOptions) -> None:
    """Raise :class:`MissingFilesError` for a file that is missing between others of the save."""
    kinds = found.files.model_zero3, found.files.optimizer
    models, shards = ({at: name for at, name in kind.items() if name not in left} for kind in kinds)
    for kind in (shards, models):
        ranks = Counter[int]()  # of each model-parallel rank, those that have files
        for (dp, mp), name in sorted(kind.items()):
            if dp != (hole := ranks[mp]):
                both = _of(models, mp) or {0: found.files.model[mp]}, _of(shards, mp)
                some = [found.path(next(iter(each.values()))) for each in both if each]
                gone = plain_name(name).replace(f"rank_{dp}_", f"rank_{hole}_", 1)
                have = f"{name}, but {counted(hole, 'file')} of lower ranks"
                raise missing_file(found, gone, have, _parameters_on(hole, some, options))
            ranks[mp] += 1


def _parameters_on(rank: int, paths: Sequence[str], options: StateOptions) -> list[str]:
    """The parameters of which a rank has elements, by a model-states and an optimizer-states file of others."""
    with suppress(ElasticCkptError, LookupError, ValueError):  # of a file that nobody asked for
        model, shard = (open_file(path, trust_pickle=False) for path in paths)
        return list(partitioned.parameters_on(rank, model_indexer(options)(model), index_shard(shard, 0, options)))
    return []


def refuse_writers(found: CheckpointInfo, trust_pickle: bool) -> None:
    """Raise :class:`DamagedError` for copies of another number of writers that are of another save. Opens few files."""
    compared: set[tuple[str, int]] = set()
    for copy, name in found.files.copies.items():
        writers = number_of_writers(copy)
        if writers == number_of_writers(name) or (name, writers) in compared:
            continue
        compared.add((name, writers))
        saved, other = (open_file(found.path(each), trust_pickle) for each in (name, copy))
        expected, counters = ({key: file.tree.get(key) for key in COUNTERS} for file in (saved, other))
        if counters != expected:
            problem = f"two saves are mixed in one folder: {copy} belongs to another one than {name}"
            remedy = "remove the older files, or use another tag"
            raise DamagedError(problem, other.path, expected, counters, remedy=remedy)


def refuse_mixture(file: PickledFile) -> None:
    """Raise :class:`DamagedError` for a model-states file that is a mixture of what several ranks wrote.

    Reads the whole file, if it is one that several ranks may have written. :class:`UnsupportedError` if it has no
    checksums that would tell.
    """
    tree = checked_tree(file)
    writer = section_of(config_section(file, "checkpoint"), "writer")
    stage = config_section(file, "zero_optimization").get("stage", 0)
    ranks = tree.get("dp_world_size", 1)
    if not writer or stage == 3 or ranks == 1 or number_of_writers(file.path) > 1:
        return
    if stage == 0 and not writer.get("data_parallel"):
        return  # rank 0 alone is a writer
    with open_stream(file.path) as stream:
        is_zip = stream.read(2) == b"PK"
    if not is_zip:
        problem = "several ranks may have written this legacy (non-zip) archive at once, and it has no checksums"
        both = "a zip archive, or a file that one rank wrote", f"the writer {dict(writer)}"
        raise UnsupportedError(problem, file.path, *both, remedy=_SAVE_ELSE)
    changed = file.changed_record() if any(file.records.crc32s) else None  # none: set_crc32_options(False)
    if changed is not None:
        problem = "this file is a mixture: several ranks wrote it at the same time, as DeepSpeed's writers do"
        expected = "records with the CRC32s that the archive's directory states"
        found = f"another at byte {changed}"
        raise DamagedError(problem, file.path, expected, found, remedy=_SAVE_ELSE)

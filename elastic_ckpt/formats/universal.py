"""Reads DeepSpeed's universal checkpoints.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`` hold one whole tensor each, beside copies of the model-states
files. From stages 1 and 2 a state is a dict with ``param``, beside ``step.pt``; from stage 3 it is a bare flat tensor,
and ``step`` is in ``zero/optimizer_state.pt``. Source: ``ds_to_universal.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from itertools import accumulate, chain, groupby, islice
from operator import itemgetter, or_
from typing import Any

from elastic_ckpt.core.chunks import ListedChunks, StorageChunk
from elastic_ckpt.core.extra_states import SavedExtraState, is_extra_state
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.fqn import NameStates, with_slices
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.metadata import (
    ITEMSIZE,
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    TensorMetadata,
)
from elastic_ckpt.core.shard_specs import DeclaredSpecs
from elastic_ckpt.core.state_kinds import COMPANIONS
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.values import TrainingState
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError, errors_of_file, shortened
from elastic_ckpt.formats import model_states
from elastic_ckpt.formats.base import (
    CONVERT_AGAIN,
    CheckpointInfo,
    Fitted,
    FolderReading,
    MetadataOptions,
    Once,
    OpenFile,
)
from elastic_ckpt.formats.grid import grid_of
from elastic_ckpt.formats.merging import shard_by_shard
from elastic_ckpt.formats.metadata_builder import Tensors, module_tensors, weights_crc32s
from elastic_ckpt.formats.model_states import ModelShard, model_indexer
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.rank_files import extra_states_of
from elastic_ckpt.formats.same_save import refuse_within_step, spot_check, with_progress_compared
from elastic_ckpt.formats.saved_config import loss_scale_of, read_training_state, refuse_features
from elastic_ckpt.formats.universal_contents import refuse_exchanged_files
from elastic_ckpt.formats.universal_files import PresentFiles, folders_of
from elastic_ckpt.formats.universal_groups import group_of_flats
from elastic_ckpt.formats.universal_optimizer import OptimizerFile, index_optimizer
from elastic_ckpt.formats.universal_shapes import parameter_shape
from elastic_ckpt.formats.universal_states import (
    StateFile,
    StatesBuilder,
    index_state,
)
from elastic_ckpt.storage import exists, file_names, folder_names

_SHOWN = 5  # of ranks without a file
_LOAD_NATIVE = "load the native checkpoint instead"
_NO_OPTIMIZER_FILE = (
    "the universal checkpoint has no zero/optimizer_state.pt (BLOOM's have none): the optimizer's step was taken from "
    "the counters, hyperparameters of the live param groups stay, and whether Adam or AdamW saved it is not known"
)


def list_parameters(found: CheckpointInfo) -> tuple[bool, list[str]]:
    """Whether there is an optimizer's file, and the sorted names of parameters, whose folders are not looked into.

    DeepSpeed's converter also makes folders of tensors that modules keep as extra state, which are in the model files.
    """
    folder = found.path(UNIVERSAL_FOLDER)
    names = (name for name in folder_names(folder) if not is_extra_state(name))
    return exists(os.path.join(folder, UNIVERSAL_OPTIMIZER)), sorted(names)


def universal_reading(found: CheckpointInfo, options: MetadataOptions, once: Once) -> FolderReading:
    """How to read a universal checkpoint. Each rank also lists the folders of its parameters."""
    has_optimizer, names = once(lambda: list_parameters(found))
    model_files = _model_files(found)
    ranks = list(model_files)
    paths = [*map(found.path, model_files.values())]
    files = len(paths) + has_optimizer
    index_model = model_indexer()

    def path(position: int) -> str:
        if position >= files:
            return found.path(os.path.join(UNIVERSAL_FOLDER, names[position - files], f"{MASTER}.pt"))
        if position == len(paths):
            return found.path(os.path.join(UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER))
        return paths[position]

    def read(position: int, open_one: OpenFile) -> Any:
        if position >= files:
            folder = found.path(os.path.join(UNIVERSAL_FOLDER, names[position - files]))
            listed = sorted(file for file in file_names(folder) if file.endswith(".pt"))
            return [index_state(open_one(f"{folder}/{file}"), options.states) for file in listed]
        if position == len(paths):
            return index_optimizer(open_one(path(position)), options.states)
        return index_model(open_one(path(position)))

    def fit(items: Sequence[Any], opened: Mapping[str, PickledFile], _: NameStates) -> Fitted:
        of_folder = dict(zip(names, items[files:], strict=True))
        folders = folders_of(found, of_folder, items[: len(paths)])
        states = {(fqn, each.key): each for fqn, folder in folders.items() for each in of_folder[folder]}
        models: dict[tuple[int, int], ModelShard] = dict(zip(ranks, items, strict=False))
        optimizer: OptimizerFile = items[len(paths)] if has_optimizer else OptimizerFile()
        first = models[ranks[0]]
        builder = _Builder(found, models, optimizer, states, folders, options)
        scalers = [optimizer.loss_scaler]
        grid = builder.grid
        refuse_within_step([first], options.check_shards)
        metadata = with_progress_compared(builder.of_files(), first, options.check_shards, scalers)
        metadata = replace(metadata, extra_states=builder.extra_states(options.coordinates))
        if options.check_shards:
            of_files = {fqn: found.path(f"{UNIVERSAL_FOLDER}/{folder}") for fqn, folder in folders.items()}
            list_path = found.path(f"{UNIVERSAL_FOLDER}/{UNIVERSAL_OPTIMIZER}")
            refuse_exchanged_files(optimizer.contents, states, of_files, list_path)
        if options.check_shards and metadata.source.merged_from == 1:
            numbers = {number for number, file in enumerate(metadata.files) if file.path in opened}
            spot_check(metadata, first.path, first.weights, numbers)

        def read_state(_: int) -> TrainingState:
            same_ranks = len(models) == 1 and grid.has_ranks_of(options.coordinates)
            of_optimizer = found.path(os.path.join(UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER))
            with errors_of_file(of_optimizer):
                scale = loss_scale_of(optimizer.loss_scaler, wanted=options.with_states)
            state = read_training_state(
                opened[first.path], scale, optimizer.overflow, same_ranks, grid.sequence, options
            )
            # with several model-parallel ranks, every rank gets the state of one
            return replace(state, degrees=(0, 0)) if grid.tp * grid.pp > 1 else state

        return Fitted(metadata, first.path, read_state=read_state)

    return FolderReading(files + len(names), path, read, fit)


def _model_files(found: CheckpointInfo) -> dict[tuple[int, int], str]:
    """(model-parallel rank, data-parallel rank) -> its model-states file."""
    files = found.files
    names = {(mp, 0): name for mp, name in files.model.items()}
    names = names or {(mp, dp): name for (dp, mp), name in files.model_zero3.items()}
    if not names:
        problem = "a file of the universal checkpoint is missing"
        file = found.path("mp_rank_00_model_states.pt")
        expected = "the model-states files that DeepSpeed's converter copies"
        raise DamagedError(problem, file, expected, "none", remedy=CONVERT_AGAIN)
    return dict(sorted(names.items()))


def _refuse_missing_model_files(found: CheckpointInfo, models: Mapping[tuple[int, int], ModelShard]) -> None:
    """Raise :class:`DamagedError` for a file that is needed: a first rank's, or any with a part of frozen weights."""
    for (mp, _), model in models.items():
        ranks = range(int(model.counters["dp_world_size"]) if model.frozen_fragments else 1)
        # a counter of the file, which may be of any size: the ranks are not listed
        lost = list(islice((dp for dp in ranks if (mp, dp) not in models), _SHOWN + 1))
        if lost and found.files.model_zero3:
            name = f"zero_pp_rank_{lost[0]}_mp_rank_{mp:02d}_model_states.pt"
            shown = ", ".join(map(str, lost[:_SHOWN])) + ", ..." * (len(lost) > _SHOWN)
            problem = "a file of the universal checkpoint is missing"
            raise DamagedError(problem, found.path(name), name, f"none of rank {shown}", remedy=CONVERT_AGAIN)


class _Builder(StatesBuilder):
    """Builds metadata, given model-states files by model- and data-parallel rank, and files by parameter and key."""

    def __init__(
        self,
        found: CheckpointInfo,
        models: Mapping[tuple[int, int], ModelShard],
        optimizer: OptimizerFile,
        states: Mapping[tuple[str, str], StateFile],
        folders: Mapping[str, str],
        options: MetadataOptions,
    ) -> None:
        of_optimizer = optimizer.shared, optimizer.file
        super().__init__(found, list(models.values()), states, of_optimizer, options.states, folders)
        self._models = list(models.values())
        self._optimizer = optimizer
        self._states = states
        self._optimizer_path = found.path(os.path.join(UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER))
        _refuse_missing_model_files(found, models)
        self._ranks = [[models[rank] for rank in of_one] for _, of_one in groupby(models, key=itemgetter(0))]
        for rank in self._ranks:
            model_states.check_same_save(rank)
        first = self._models[0]
        firsts = {mp: model for (mp, dp), model in models.items() if dp == 0}
        model_states.check_same_save(list(firsts.values()), one_rank=False)
        refuse_features(first.features, first.path)
        if optimizer.scalars is not None and not optimizer.in_true_order:
            _refuse_wrong_data(first, optimizer)
        self.grid = grid_of(firsts, found.folder, options.coordinates)
        self._stateful = {name for (name, key), item in states.items() if item.tensor is not None and key != MASTER}

    def of_files(self) -> CheckpointMetadata:
        optimizer = self._optimizer
        first = self._models[0]
        self._add_parameters()
        self.add_masters_and_states()
        self._add_module()
        self.notes += [_NO_OPTIMIZER_FILE] * (optimizer.scalars is None)
        declared = DeclaredSpecs(tuple(item.rule for item in self._states.values() if item.rule is not None))
        declared = reduce(or_, (model.declared for model in self._models), declared)
        most = max((saved.group for saved in self.parameters.values()), default=0) + 1
        metadata = self.build(
            first,
            optimizer.zero_stage,
            optimizer.groups or ({},) * most,
            # frozen ones of MoE layers are in the files of experts, which the converter leaves out
            frozen_recorded=first.frozen_recorded or bool(first.features.experts and not first.stacked),
            buffers_recorded=any(model.weights for model in self._models),
            merged_from=self.grid.tp,
            sequence=self.grid.sequence,
        )
        crc32s = weights_crc32s([self._ranks[rank][0] for rank in self.grid.stages[0]])
        states = replace(metadata.states, missing=self._present().missing())
        whole = replace(metadata, declared=declared, crc32s=crc32s, states=states)
        return with_slices(whole, self._options.are_restored)

    def extra_states(self, coordinates: RankCoordinates) -> dict[str, SavedExtraState]:
        """What modules keep beside parameters and buffers, for one live rank."""
        return extra_states_of(dict(enumerate(self._ranks)), self.grid, coordinates)

    def _present(self) -> PresentFiles:
        """The files of the folder."""
        optimizer = self._optimizer
        counters = self._models[0].counters
        keys: dict[str, set[str]] = {}
        codes: dict[str, set[str]] = {}
        for (name, key), file in self._states.items():
            keys.setdefault(name, set()).add(key)
            if key in COMPANIONS and file.tensor is not None and file.tensor.dtype == "uint8":
                codes.setdefault(name, set()).add(key)
        return PresentFiles(
            keys={name: frozenset(each) for name, each in keys.items()},
            codes={name: frozenset(each) for name, each in codes.items()},
            shared=frozenset(optimizer.shared.tensors).union(dict(optimizer.shared.scalars)),
            has_optimizer_file=optimizer.scalars is not None,
            ds_version=self._models[0].ds_version,
            zero_stage=optimizer.zero_stage,
            steps=int(counters["global_steps"]) - int(counters["skipped_steps"]),
            file_list=optimizer.file_list,
            groups=optimizer.groups,
            parameters=self.parameters,
        )

    def _add_parameters(self) -> None:
        """The parameters of all pipeline stages, of the shapes in their files or, if flat (from stage 3), as listed."""
        own = self.scalars_by_name()
        shapes = self.shapes_by_name()
        group_of: Mapping[int, int] = {}
        if self._optimizer.scalars is not None:
            group_of = group_of_flats(self._optimizer.members, self._models, self._optimizer_path)
        for model in self._models:
            steps = float(int(model.counters["global_steps"]) - int(model.counters["skipped_steps"]))
            for flat, named_shapes in enumerate(model.param_shapes):
                of_flat = (self._optimizer.scalars or {}).get(flat, {})
                in_order = tuple(sorted(of_flat.items()))  # once: a flat tensor may have thousands of members
                for name, local in named_shapes:
                    counted = {"step": steps} if name in self._stateful else {}
                    shared = counted if self._optimizer.scalars is None else of_flat
                    is_alike = shared is of_flat and name not in own
                    scalars = in_order if is_alike else tuple(sorted({**shared, **own.get(name, {})}.items()))
                    of_files = shapes.get(name, {})
                    saved = of_files.get(MASTER, local)
                    shape = parameter_shape(of_files, local, self.grid.tp)
                    self.listed_shapes.setdefault(name, (local, self.grid.tp))
                    if self.grid.tp > 1 and len(shape) > 1 and len(saved) == 1:
                        problem = "DeepSpeed's converter does not join the shards of a tensor-parallel ZeRO-3 run"
                        both = "tensors of the whole parameters", f"a flat tensor of {saved[0]} elements"
                        raise UnsupportedError(problem, model.path, *both, parameter=name, remedy=_LOAD_NATIVE)
                    parameter = SavedParameter(shape, group_of.get(flat, flat), scalars)
                    self.parameters.setdefault(name, parameter)
        # masters alone say nothing: the converter writes buffers and the other names of tied weights, too
        if unlisted := sorted(self._stateful - self.parameters.keys()):
            problem = "the model-states files of the universal checkpoint do not list all parameters that have states"
            expected = "every parameter whose folder below zero has states, in param_shapes"
            where = (self._models[0].path, expected, "none of these")
            names = shortened(unlisted)
            raise DamagedError(problem, *where, parameter=names, remedy=CONVERT_AGAIN)

    def add_tensor(self, tensor: TensorMetadata, item: StateFile) -> None:
        shapes = self._local_shapes.get(tensor.name) if item.is_concatenated else None
        path = self._files[self.file_of[tensor.name, tensor.key]].path
        super().add_tensor(tensor if shapes is None else _divided(tensor, shapes, path), item)

    @cached_property
    def _local_shapes(self) -> dict[str, tuple[Shape, ...]]:
        """The shape that each rank lists of a parameter whose shards DeepSpeed's converter put together unrecorded."""
        found: dict[str, tuple[Shape, ...]] = {}
        if self._optimizer.in_true_order:
            return found
        for stage in self.grid.stages if self.grid.tp > 1 else ():
            models = [self._ranks[rank][0] for rank in stage]
            ranks = [dict(chain.from_iterable(model.param_shapes)) for model in models]
            for name in ranks[0].keys() - self._models[0].stacked.keys():
                if not models[0].declared.is_recorded(name) and all(name in rank for rank in ranks):
                    found.setdefault(name, tuple(rank[name] for rank in ranks))
        return found

    def _add_module(self) -> None:
        """Buffers and frozen parameters of the model-states files; each tensor-parallel rank has its own shard."""
        tensors = Tensors()
        notes = list[str]()
        starts = [*accumulate(map(len, self._ranks), initial=0)]
        for stage in self.grid.stages:
            found = [module_tensors(self._ranks[rank], None, self.parameters, starts[rank]) for rank in stage]
            notes += chain.from_iterable(noted for _, noted in found)
            for key in found[0][0]:
                if all(key in mine for mine, _ in found):
                    tensors.setdefault(key, shard_by_shard([mine[key] for mine, _ in found]))
        self.tensors.add(tensors)
        self.notes += dict.fromkeys(notes)


def _refuse_wrong_data(model: ModelShard, optimizer: OptimizerFile) -> None:
    """Refuse what DeepSpeed's converter gets wrong."""
    if optimizer.zero_stage < 3 and model.zero.get("round_robin_gradients") and model.counters["dp_world_size"] > 1:
        option = "round_robin_gradients"
        harm = "assigns the wrong data to almost every parameter of such a run"
    elif optimizer.zero_stage == 3 and model.alignment > 1:
        option = "align_partitions"
        harm = "takes padding for parameters there"
    else:
        return
    problem = f"this universal checkpoint was converted from a run with {option}: DeepSpeed's converter {harm}"
    expected = f"a universal checkpoint from a run without {option}"
    found = f"{option} in the saved config"
    raise UnsupportedError(problem, model.path, expected, found, remedy=_LOAD_NATIVE)


def _divided(tensor: TensorMetadata, shapes: tuple[Shape, ...], path: str) -> TensorMetadata:
    """The shards that DeepSpeed's converter concatenated, whatever is fused in them; ``shapes`` by rank."""
    if tensor.is_quantized:
        problem = "how the tensor-parallel shards of this parameter's 8-bit states were put together is not recorded"
        remedy = f"{_LOAD_NATIVE}, or elastic-ckpt convert --to universal"
        raise UnsupportedError(problem, path, parameter=f"{tensor.name} ({tensor.key})", remedy=remedy)
    (chunk,) = tensor.chunks or (StorageChunk(FlatRange(0, 0), 0, 0),)
    numels = [math.prod(shape) for shape in shapes]
    if len({shape[1:] for shape in (tensor.shape, *shapes)}) > 1 or sum(numels) != chunk.range.numel:
        problem = "DeepSpeed's converter concatenated the tensor-parallel shards of this parameter, but the shapes in "
        problem += "the model-states files do not add up to its tensor"
        expected = " + ".join(map(str, shapes))
        remedy = f"files of two conversions are mixed: {CONVERT_AGAIN}"
        raise MismatchError(problem, path, expected, tensor.shape, parameter=tensor.name, remedy=remedy)
    starts = accumulate(numels, initial=0)
    offsets = (chunk.byte_offset + start * ITEMSIZE[tensor.dtype] for start in starts)
    sources = tuple(
        ListedChunks((StorageChunk(FlatRange(0, numel), chunk.file, offset),) if numel else ())
        for numel, offset in zip(numels, offsets, strict=False)
    )
    return replace(tensor, shape=shapes[0], sources=sources, shards=shapes)

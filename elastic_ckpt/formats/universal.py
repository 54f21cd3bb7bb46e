"""DeepSpeed universal checkpoints -> Catalog.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`` hold one whole tensor each, beside copies of the model-states
files. Source of the layout: ``ds_to_universal.py``. From stages 1 and 2 each file is a dict with ``param``, and
``step.pt`` is there; from stage 3 it is a bare flat tensor, and ``step`` sits in ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ckpt import parallel
from elastic_ckpt.catalog import (
    MASTER,
    Catalog,
    Extent,
    LogicalTensor,
    SavedParameter,
    SourceFacts,
)
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.formats import model_states
from elastic_ckpt.formats.base import (
    Checkpoint,
    Found,
    ReadOptions,
    open_my_share,
    refuse_unsupported_folder,
    source_file,
)
from elastic_ckpt.formats.features import refuse_features
from elastic_ckpt.formats.host_state import loss_scale_of, read_host_state
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.module_tensors import module_tensors
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.pickled import PickledFile, TensorRef, materialise
from elastic_ckpt.formats.progress import with_progress_compared
from elastic_ckpt.formats.saved_groups import normal_groups, read_groups
from elastic_ckpt.formats.spot_check import SavedWeights, spot_check
from elastic_ckpt.geometry import FlatRange
from elastic_ckpt.host_state import HostState


@dataclass(frozen=True)
class StateFile:
    """One ``zero/<name>/<key>.pt``: a whole tensor, or a scalar."""

    path: str
    nbytes: int
    name: str
    key: str
    tensor: TensorRef | None
    scalar: float | None


@dataclass(frozen=True)
class OptimizerFile:
    """``zero/optimizer_state.pt``.

    Attributes:
        zero_stage: stage of the run that saved the native checkpoint.
        groups: hyperparameters per param group.
        members: per param group, the indices of its flat tensors.
        scalars: per flat tensor, its scalar states; empty from stages 1 and 2.
        loss_scaler: DeepSpeed's loss scaler object.
        overflow: the optimizer's overflow flag.
    """

    zero_stage: int
    groups: tuple[Mapping[str, Any], ...]
    members: tuple[tuple[int, ...], ...]
    scalars: Mapping[int, Mapping[str, float]]
    loss_scaler: Any
    overflow: bool


def read_universal(found: Found, options: ReadOptions) -> Checkpoint:
    """Read the metadata of a universal checkpoint. Collective.

    Raises:
        ElasticCkptError: on every rank, where the folder is incomplete, damaged or not supported.
    """
    with parallel.agreement("look at the checkpoint's files"):
        refuse_unsupported_folder(found)
        model_names = _model_files(found)
        listed = _list_state_files(found) if parallel.rank() == 0 else None
    models_to_open = [found.path(name) for name in model_names]
    state_paths = parallel.broadcast(listed, src=0)
    optimizer_path = found.path(os.path.join(UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER))
    paths = [*models_to_open, optimizer_path, *state_paths]

    def index(file: PickledFile, position: int) -> ModelShard | OptimizerFile | StateFile:
        if position < len(model_names):
            return index_model_states(file, dp_rank=position)
        return _index_optimizer(file) if file.path == optimizer_path else _index_state(file)

    indexed, opened = open_my_share(paths, index, options.trust_pickle)
    models = [item for item in indexed if isinstance(item, ModelShard)]
    optimizer = next(item for item in indexed if isinstance(item, OptimizerFile))
    with parallel.agreement("fit the checkpoint's files together"):
        model_states.check_same_save(models)
        refuse_features(models[0].features, models[0].path)
        _refuse_round_robin(models[0], optimizer)
        _refuse_aligned(models[0], optimizer)
        states = [item for item in indexed if isinstance(item, StateFile)]
        catalog = _build_catalog(found, models, optimizer, states)
        catalog = with_progress_compared(catalog, models[0], options.check_shards)
        positions = {path: position for position, path in enumerate(file.path for file in catalog.files)}
    with parallel.agreement("compare masters with the saved weights"):
        if options.check_shards:
            weights = SavedWeights(models[0].path, models[0].weights)
            spot_check(catalog, weights, {positions[file.path] for file in opened.values() if file.path in positions})
    pickled: bytes | None = None
    with parallel.agreement("read counters, scheduler and client state"):
        if parallel.rank() == 0:  # which opened the first model-states file
            unchanged = len(models) == 1 and int(models[0].counters["dp_world_size"]) == parallel.world_size()
            mine = read_host_state(opened[0], loss_scale_of(optimizer.loss_scaler), optimizer.overflow, unchanged)
            pickled = parallel.pack(mine)
    host: HostState = parallel.unpack(parallel.broadcast(pickled, src=0))
    return Checkpoint(catalog, host, models[0].path, len(opened))


def _model_files(found: Found) -> list[str]:
    zero3 = found.files.model_zero3
    names = list(found.files.model.values()) or [zero3[key] for key in sorted(zero3)]
    if not names:
        raise DamagedError(
            "a file of the universal checkpoint is missing",
            file=found.path("mp_rank_00_model_states.pt"),
            expected="the model-states files that DeepSpeed's converter copies",
            found="none",
            remedy="convert the native checkpoint again",
        )
    return names


def _list_state_files(found: Found) -> list[str]:
    root = found.path(UNIVERSAL_FOLDER)
    paths = []
    for folder in sorted(os.scandir(root), key=lambda entry: entry.name):
        if folder.is_dir():
            paths += sorted(file.path for file in os.scandir(folder.path) if file.name.endswith(".pt"))
    return paths


def _index_state(file: PickledFile) -> StateFile:
    folder, base = os.path.split(file.path)
    value = file.tree["param"] if isinstance(file.tree, dict) and "param" in file.tree else file.tree
    name, key = os.path.basename(folder), base.removesuffix(".pt")
    if isinstance(value, TensorRef) and value.shape:
        if not value.is_contiguous:
            raise DamagedError(
                f"{key} of this parameter was saved as a view that is not contiguous", parameter=name, file=file.path
            )
        return StateFile(file.path, file.nbytes, name, key, value, None)
    scalar = materialise(file, value)
    scalar = scalar.item() if hasattr(scalar, "item") else scalar
    if isinstance(scalar, bool) or not isinstance(scalar, (int, float)):
        raise DamagedError(
            f"{key} of this parameter is neither a tensor nor a number",
            parameter=name,
            file=file.path,
            expected="a tensor, or a dict with 'param'",
            found=type(scalar).__name__,
            remedy="convert the native checkpoint again",
        )
    return StateFile(file.path, file.nbytes, name, key, None, scalar)


def _index_optimizer(file: PickledFile) -> OptimizerFile:
    groups = file.section("param_groups")
    states = file.tree.get("optimizer_state_dict", {}).get("state", {})
    scalars: dict[int, dict[str, float]] = {}
    for flat, state in states.items():
        read = {k: materialise(file, v) for k, v in state.items() if not isinstance(v, TensorRef) or not v.shape}
        scalars[int(flat)] = {key: v.item() if hasattr(v, "item") else v for key, v in read.items()}
    return OptimizerFile(
        zero_stage=int(file.tree.get("zero_stage", 1)),
        groups=read_groups(file, groups),
        members=tuple(tuple(group["params"]) for group in groups),
        scalars=scalars,
        loss_scaler=file.tree.get("loss_scaler"),
        overflow=bool(file.tree.get("overflow", False)),
    )


def _refuse_round_robin(model: ModelShard, optimizer: OptimizerFile) -> None:
    if optimizer.zero_stage < 3 and model.zero.get("round_robin_gradients") and model.counters["dp_world_size"] > 1:
        raise UnsupportedError(
            "this universal checkpoint was converted from a run with round_robin_gradients: DeepSpeed's converter "
            "assigns the wrong data to almost every parameter of such a run",
            file=model.path,
            expected="a universal checkpoint from a run without round_robin_gradients",
            found='"zero_optimization": {"round_robin_gradients": true} in the saved config',
            remedy="load the native checkpoint instead: elastic_ckpt restores its true order",
        )


def _refuse_aligned(model: ModelShard, optimizer: OptimizerFile) -> None:
    if optimizer.zero_stage == 3 and model.alignment > 1:
        raise UnsupportedError(
            'this universal checkpoint was converted from a ZeRO-3 run with "align_partitions": DeepSpeed\'s converter '
            "takes padding for parameters there",
            file=model.path,
            expected='a universal checkpoint from a run without "align_partitions"',
            found=f'"align_partitions": {model.alignment} in the saved config',
            remedy="load the native checkpoint instead",
        )


def _build_catalog(
    found: Found, models: list[ModelShard], optimizer: OptimizerFile, states: list[StateFile]
) -> Catalog:
    files = tuple([source_file(item) for item in models] + [source_file(item) for item in states])
    step_files: dict[str, dict[str, float]] = {}
    for item in states:
        if item.scalar is not None:
            step_files.setdefault(item.name, {})[item.key] = item.scalar
    group_of = {flat: number for number, members in enumerate(optimizer.members) for flat in members}
    parameters: dict[str, SavedParameter] = {}
    for flat, named_shapes in enumerate(models[0].param_shapes):
        shared = optimizer.scalars.get(flat, {})
        for name, shape in named_shapes:
            scalars = {**shared, **step_files.get(name, {})}
            parameters[name] = SavedParameter(shape, group_of.get(flat, flat), tuple(sorted(scalars.items())))
    tensors: dict[tuple[str, str], LogicalTensor] = {}
    for position, item in enumerate(states, start=len(models)):
        if item.tensor is not None and item.name in parameters:
            shape = parameters[item.name].shape
            _check_numel(item, shape)
            extent = Extent(FlatRange(0, item.tensor.numel), position, item.tensor.byte_offset)
            tensors[item.name, item.key] = LogicalTensor(item.name, item.key, shape, item.tensor.dtype, (extent,))
    whole, notes = module_tensors(models, 0, frozenset(parameters))
    tensors.update(whole)
    stage, dp = optimizer.zero_stage, int(models[0].counters["dp_world_size"])
    return Catalog(
        source=SourceFacts("universal", found.folder, found.tag, stage, dp, models[0].ds_version),
        files=files,
        parameters=parameters,
        tensors=tensors,
        groups=normal_groups(optimizer.groups, is_bitsandbytes=False),
        scalar_forms={key: "float" for p in parameters.values() for key, _ in p.scalars},
        aliases=models[0].shared,
        frozen_recorded=models[0].frozen_recorded,
        notes=found.notes + notes,
    )


def _check_numel(item: StateFile, shape: tuple[int, ...]) -> None:
    """From stage 3 the tensor is flat, from stages 1 and 2 it has the parameter's shape."""
    assert item.tensor is not None
    if item.tensor.numel != math.prod(shape) or (len(item.tensor.shape) > 1 and item.tensor.shape != shape):
        raise MismatchError(
            f"{item.key} of this parameter does not have the shape that the model-states file lists",
            parameter=item.name,
            file=item.path,
            expected=f"{shape}, {MASTER} and states alike",
            found=item.tensor.shape,
            remedy="files of two conversions are mixed, or vocabulary padding was stripped: convert again",
        )

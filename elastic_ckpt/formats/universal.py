"""Reads DeepSpeed's universal checkpoints.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`` hold one whole tensor each, beside copies of the model-states
files. Source: ``ds_to_universal.py``. From stages 1 and 2 each file is a dict with ``param``, beside ``step.pt``; from
stage 3 it is a bare flat tensor, and ``step`` is in ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.core.declared import Declared
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata, SavedParameter, SourceFile
from elastic_ckpt.core.tp_rules import COLUMN, ROW, VOCABULARY, Rule
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.formats import model_states
from elastic_ckpt.formats.base import Checkpoint, Found, MetadataOptions, refuse_unsupported_folder
from elastic_ckpt.formats.exchange import open_my_share
from elastic_ckpt.formats.experts import with_slices
from elastic_ckpt.formats.grid import Grid, grid_of
from elastic_ckpt.formats.merging import shard_by_shard
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, Tensors, dense_tensor, module_tensors
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.same_save import spot_check, with_progress_compared
from elastic_ckpt.formats.saved_config import refuse_features
from elastic_ckpt.formats.saved_states import read_groups
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.training_state import loss_scale_of, read_training_state
from elastic_ckpt.formats.values import materialise, plain_numbers

_NO_OPTIMIZER_FILE = (
    "the universal checkpoint has no zero/optimizer_state.pt (BLOOM's have none): the optimizer's step was taken from "
    "the counters, hyperparameters of the live param groups stay, and whether Adam or AdamW saved it is not known"
)
#: Entries that belong to one rank's partition.
_PARTITIONS = frozenset(
    {
        "base_optimizer_state",
        "param_slice_mappings",
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "fp32_groups_flat_partition",
        "optimizer_state_dict",
    }
)
#: Marks that each parameter has its own data, whatever DeepSpeed's converter would have made of such a run.
TRUE_ORDER = "elastic_ckpt_true_order"


def read_universal(found: Found, options: MetadataOptions) -> Checkpoint:
    """Read the metadata of a universal checkpoint. Collective: all ranks raise the same :class:`ElasticCkptError`."""
    with distributed.deterministic("look at the checkpoint's files"):  # at their names, as rank 0 has found them
        refuse_unsupported_folder(found)
        model_files = _model_files(found)
    state_paths = distributed.broadcast("look at the checkpoint's files", lambda: _list_state_files(found))
    ranks = list(model_files)

    def index(file: PickledFile, position: int) -> ModelShard | OptimizerFile | StateFile:
        if position < len(ranks):
            return index_model_states(file, dp_rank=ranks[position][1])
        return index_optimizer(file) if os.path.basename(file.path) == UNIVERSAL_OPTIMIZER else index_state(file)

    paths = [*map(found.path, model_files.values()), *state_paths]
    indexed, opened = open_my_share(paths, index, options)
    models = {rank: item for rank, item in zip(ranks, indexed, strict=False) if isinstance(item, ModelShard)}
    optimizer = next((item for item in indexed if isinstance(item, OptimizerFile)), None)
    states = [item for item in indexed if isinstance(item, StateFile)]
    first = models[ranks[0]]
    fitted: list[CheckpointMetadata] = []

    def fit() -> bytes | None:
        for _, of_one in groupby(models, key=lambda rank: rank[0]):
            model_states.check_same_save([models[rank] for rank in of_one])
        firsts = {mp: model for (mp, dp), model in models.items() if dp == 0}
        model_states.check_same_save(list(firsts.values()), one_rank=False)
        refuse_features(first.features, first.path)
        if optimizer is not None and not optimizer.in_true_order:
            _refuse_wrong_data(first, optimizer)
        grid = grid_of(firsts, found.folder, options.coordinates)
        metadata = _build_metadata(found, list(models.values()), optimizer, states, grid)
        metadata = with_slices(metadata, first)
        metadata = with_progress_compared(metadata, first, options.check_shards)
        if options.check_shards and metadata.source.merged_from == 1:
            mine = {file.path for file in opened.values()}
            numbers = {number for number, file in enumerate(metadata.files) if file.path in mine}
            spot_check(metadata, first.path, first.weights, numbers)
        fitted.append(metadata)
        if 0 not in opened:
            return None
        same_ranks = len(models) == 1 and grid.has_ranks_of(options.coordinates)
        scale, overflow = (None, False) if optimizer is None else (optimizer.loss_scaler, optimizer.overflow)
        state = read_training_state(
            opened[0], loss_scale_of(scale), overflow, same_ranks, grid.sequence, options.with_client_state
        )
        # with several model-parallel ranks, every rank gets the state of one
        return distributed.pack(replace(state, degrees=(0, 0)) if grid.tp * grid.pp > 1 else state)

    everybody = distributed.all_gather("fit the checkpoint's files together", fit)
    packed = next(each for each in everybody if each is not None)
    return Checkpoint(fitted[0], distributed.unpack(packed), first.path, len(opened))


def _model_files(found: Found) -> dict[tuple[int, int], str]:
    """(model-parallel rank, data-parallel rank) -> its model-states file."""
    files = found.files
    names = {(mp, 0): name for mp, name in files.model.items()}
    names = names or {(mp, dp): name for (dp, mp), name in files.model_zero3.items()}
    if not names:
        raise DamagedError(
            "a file of the universal checkpoint is missing",
            file=found.path("mp_rank_00_model_states.pt"),
            expected="the model-states files that DeepSpeed's converter copies",
            found="none",
            remedy="convert the native checkpoint again",
        )
    return dict(sorted(names.items()))


def _list_state_files(found: Found) -> list[str]:
    root = found.path(UNIVERSAL_FOLDER)
    paths = []
    for folder in sorted(os.scandir(root), key=lambda entry: entry.name):
        if folder.is_dir():
            paths += sorted(file.path for file in os.scandir(folder.path) if file.name.endswith(".pt"))
    optimizer = os.path.join(root, UNIVERSAL_OPTIMIZER)
    return [optimizer, *paths] if os.path.isfile(optimizer) else paths


def _refuse_wrong_data(model: ModelShard, optimizer: OptimizerFile) -> None:
    """Refuse what DeepSpeed's converter gets wrong."""
    if optimizer.zero_stage < 3 and model.zero.get("round_robin_gradients") and model.counters["dp_world_size"] > 1:
        raise UnsupportedError(
            "this universal checkpoint was converted from a run with round_robin_gradients: DeepSpeed's converter "
            "assigns the wrong data to almost every parameter of such a run",
            file=model.path,
            expected="a universal checkpoint from a run without round_robin_gradients",
            found='"zero_optimization": {"round_robin_gradients": true} in the saved config',
            remedy="load the native checkpoint instead: elastic_ckpt restores its true order",
        )
    if optimizer.zero_stage == 3 and model.alignment > 1:
        raise UnsupportedError(
            'this universal checkpoint was converted from a ZeRO-3 run with "align_partitions": DeepSpeed\'s converter '
            "takes padding for parameters there",
            file=model.path,
            expected='a universal checkpoint from a run without "align_partitions"',
            found=f'"align_partitions": {model.alignment} in the saved config',
            remedy="load the native checkpoint instead",
        )


def _build_metadata(
    found: Found, models: list[ModelShard], optimizer: OptimizerFile | None, states: list[StateFile], grid: Grid
) -> CheckpointMetadata:
    first = models[0]
    builder = MetadataBuilder(found, [*models, *states])
    builder.parameters = parameters = _parameters(models, optimizer, states, grid)
    builder.scalar_forms = {key: "float" for saved in parameters.values() for key, _ in saved.scalars}
    for file, item in enumerate(states, start=len(models)):
        if item.tensor is not None and item.name in parameters:
            shape = parameters[item.name].shape
            _check_numel(item, item.tensor, shape)
            builder.tensors[item.name, item.key] = dense_tensor(item.name, item.key, item.tensor, file, shape)
    whole, notes = _module_tensors(models, parameters, grid)
    builder.tensors |= whole
    builder.notes += notes if optimizer is not None else [*notes, _NO_OPTIMIZER_FILE]
    declared = Declared(tuple(item.rule for item in states if item.rule is not None))
    for model in models:
        declared = declared | model.declared
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
    return replace(metadata, declared=declared)


def _parameters(
    models: Sequence[ModelShard], optimizer: OptimizerFile | None, states: Sequence[StateFile], grid: Grid
) -> dict[str, SavedParameter]:
    """The parameters of all pipeline stages, of the shapes in their files or, if flat (from stage 3), as listed."""
    step_files: dict[str, dict[str, float]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stateful = set()
    for item in states:
        if item.scalar is not None:
            step_files.setdefault(item.name, {})[item.key] = item.scalar
        elif item.tensor is not None and item.key == MASTER:
            shapes[item.name] = item.tensor.shape
        else:
            stateful.add(item.name)
    members = () if optimizer is None else optimizer.members
    group_of = {flat: number for number, inside in enumerate(members) for flat in inside}
    parameters: dict[str, SavedParameter] = {}
    for model in models:
        steps = int(model.counters["global_steps"]) - int(model.counters["skipped_steps"])
        for flat, named_shapes in enumerate(model.param_shapes):
            shared = {} if optimizer is None else optimizer.scalars.get(flat, {})
            for name, listed in named_shapes:
                if optimizer is None:
                    shared = {"step": float(steps)} if name in stateful else {}
                scalars = {**shared, **step_files.get(name, {})}
                saved = shapes.get(name)
                shape = saved if saved is not None and (len(saved) > 1 or len(listed) == 1) else listed
                if grid.tp > 1 and len(shape) > 1 and saved is not None and len(saved) == 1:
                    raise UnsupportedError(
                        "this universal checkpoint was converted from a tensor-parallel ZeRO-3 run, whose shards "
                        "DeepSpeed's converter does not put together",
                        parameter=name,
                        file=model.path,
                        expected="tensors of the whole parameters",
                        found=f"a flat tensor of {saved[0]} elements",
                        remedy="load the native checkpoint instead",
                    )
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


def _check_numel(item: StateFile, tensor: TensorRef, shape: tuple[int, ...]) -> None:
    """From stage 3 the tensor is flat, from stages 1 and 2 it has the parameter's shape."""
    if tensor.numel != math.prod(shape) or (len(tensor.shape) > 1 and tensor.shape != shape):
        raise MismatchError(
            f"{item.key} of this parameter does not have the shape that the model-states file lists",
            parameter=item.name,
            file=item.path,
            expected=f"{shape}, {MASTER} and states alike",
            found=tensor.shape,
            remedy="files of two conversions are mixed, or vocabulary padding was stripped: convert again",
        )


@dataclass(frozen=True)
class StateFile(SourceFile):
    """One ``zero/<name>/<key>.pt``: a parameter's whole tensor or scalar, and its ``rule`` for shards, if known."""

    name: str
    key: str
    tensor: TensorRef | None
    scalar: float | None
    rule: Rule | None = None


@dataclass(frozen=True)
class OptimizerFile:
    """``zero/optimizer_state.pt``.

    Attributes:
        zero_stage: stage of the run that saved the native checkpoint.
        groups, members: per param group, hyperparameters and the indices of its flat tensors.
        scalars: per flat tensor, its scalar states; empty from stages 1 and 2.
        loss_scaler, overflow: DeepSpeed's loss scaler object, and the optimizer's overflow flag.
        in_true_order: whether its writer guarantees that each parameter has its own data (:data:`TRUE_ORDER`).
    """

    zero_stage: int
    groups: tuple[Mapping[str, Any], ...]
    members: tuple[tuple[int, ...], ...]
    scalars: Mapping[int, Mapping[str, float]]
    loss_scaler: Any
    overflow: bool
    in_true_order: bool = False


def index_state(file: PickledFile) -> StateFile:
    """Read one parameter's file; a :class:`DamagedError` if it contains neither a dense tensor nor a number."""
    folder, base = os.path.split(file.path)
    is_parameters = isinstance(file.tree, dict) and "param" in file.tree
    value = file.tree["param"] if is_parameters else file.tree
    name, key = os.path.basename(folder), base.removesuffix(".pt")
    if isinstance(value, TensorRef) and (value.shape or is_parameters):  # of a parameter that may have no dimension
        if not value.is_contiguous:
            raise DamagedError(
                f"{key} of this parameter was saved as a view that is not contiguous", parameter=name, file=file.path
            )
        return StateFile(
            file.path, file.nbytes, name, key, value, None, _rule_of(name, file.tree), records=file.records
        )
    scalar = plain_numbers(file, {key: value})[key]
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


def _rule_of(name: str, tree: Any) -> Rule | None:
    """The rule that DeepSpeed's converter notes beside a tensor; its default, dimension 0, means nothing."""
    if not isinstance(tree, dict):
        return None
    pattern = f"^{re.escape(name)}$"
    if tree.get("vocab_tensor") or "vocab_divisibility_padding_tensor" in tree:
        return Rule(pattern=pattern, kind=VOCABULARY)
    if tree.get("param_n_sub_params"):
        return Rule(pattern=pattern, kind=COLUMN, dim=0, sub_parameters=[1] * int(tree["param_n_sub_params"]))
    parts = _sub_parameters(tree.get("sub_param_shape"))
    if parts is not None:
        return Rule(pattern=pattern, kind=COLUMN, dim=parts[0], sub_parameters=parts[1])
    return Rule(pattern=pattern, kind=ROW) if tree.get("cat_dim") == 1 else None


def _sub_parameters(noted: Any) -> tuple[int, list[int]] | None:
    """Dimension and relative widths of a ``SubparamShape``; ``None``: it is none, or empty."""
    dim, shape = getattr(noted, "partition_dim", None), getattr(noted, "shape", None)
    if not isinstance(dim, int) or not isinstance(shape, (list, tuple)) or not 0 <= dim < len(shape):
        return None
    widths = shape[dim]
    if not isinstance(widths, (list, tuple)) or not all(isinstance(width, int) and width > 0 for width in widths):
        return None
    return (dim, [width // math.gcd(*widths) for width in widths]) if widths else None


def index_optimizer(file: PickledFile) -> OptimizerFile:
    """Read the optimizer's file."""
    groups = file.section("param_groups")
    states = file.tree.get("optimizer_state_dict", {}).get("state", {})
    scalars: dict[int, dict[str, float]] = {}
    for flat, values in _scalars(states).items():
        scalars[int(flat)] = plain_numbers(file, values)
    return OptimizerFile(
        zero_stage=int(file.tree.get("zero_stage", 1)),
        groups=read_groups(file, groups),
        members=tuple(tuple(group["params"]) for group in groups),
        scalars=scalars,
        loss_scaler=file.tree.get("loss_scaler"),
        overflow=bool(file.tree.get("overflow", False)),
        in_true_order=file.tree.get(TRUE_ORDER) is True,
    )


def common_optimizer_state(file: PickledFile) -> dict[str, Any]:
    """What of an optimizer's state belongs to no parameter, as a tree to save, with small tensors read.

    ``file`` is ``*zero_pp_rank_0_mp_rank_00*_optim_states.pt``; :class:`DamagedError` if it has no optimizer state.
    """
    state = file.section("optimizer_state_dict")
    kept = {key: value for key, value in state.items() if key not in _PARTITIONS}
    is_stage3 = "fp32_flat_groups" in state
    base = file.section("optimizer_state_dict", "optimizer_state_dict" if is_stage3 else "base_optimizer_state")
    groups = base["param_groups"] if isinstance(base, dict) else []
    kept["param_groups"] = groups
    kept[TRUE_ORDER] = True
    if is_stage3:
        kept["optimizer_state_dict"] = {"state": _scalars(base["state"]), "param_groups": groups}
    return dict(materialise(file, kept))


def _scalars(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Each flat tensor's states without dimensions."""
    return {
        flat: {key: value for key, value in state.items() if not isinstance(value, TensorRef) or not value.shape}
        for flat, state in states.items()
    }

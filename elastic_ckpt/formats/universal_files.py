"""One file of a universal checkpoint: a state of a parameter, or what belongs to no parameter.

From stages 1 and 2 a state is a dict with ``param``, beside ``step.pt``; from stage 3 it is a bare flat tensor, and
``step`` is in ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.shard_specs import COLUMN, ROW, VOCABULARY, ShardSpec
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import read_groups
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import plain_numbers
from elastic_ckpt.storage.local import file_names, folder_names

#: Entries that belong to one rank's partition.
_PARTITIONS = frozenset(
    {"base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups"}
    | {"fp32_groups_flat_partition", "optimizer_state_dict"}
)
CONVERT_AGAIN = "convert the native checkpoint again"
#: Fused parts of a parameter, of which a file may claim any number.
_MOST_SUB_PARAMETERS = 1 << 10
#: Marks that each parameter has its own data, whatever DeepSpeed's converter would have made of such a run.
TRUE_ORDER = "elastic_ckpt_true_order"


class StateFile(NamedTuple):
    """One ``zero/<name>/<key>.pt``: a parameter's whole tensor or scalar. Without its path, as ranks exchange many.

    ``rule`` says how it is sharded, if known; ``is_concatenated``: for want of one, DeepSpeed's converter concatenated
    the tensor-parallel shards along dimension 0.
    """

    key: str
    nbytes: int
    tensor: TensorRef | None
    scalar: float | None
    rule: ShardSpec | None = None
    is_concatenated: bool = False
    records: Records = Records()


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


def optimizer_path(found: CheckpointInfo) -> str:
    return found.path(os.path.join(UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER))


def state_path(found: CheckpointInfo, name: str, key: str) -> str:
    return found.path(os.path.join(UNIVERSAL_FOLDER, name, f"{key}.pt"))


def list_parameters(found: CheckpointInfo) -> tuple[bool, list[str]]:
    """Whether there is an optimizer's file, and the sorted names of parameters, whose folders are not looked into."""
    names = sorted(folder_names(found.path(UNIVERSAL_FOLDER)))
    return os.path.lexists(optimizer_path(found)), names


def read_parameter(found: CheckpointInfo, name: str, open_one: Callable[[str], PickledFile]) -> list[StateFile]:
    """Read the files of one parameter. Local."""
    folder = found.path(os.path.join(UNIVERSAL_FOLDER, name))
    return [index_state(open_one(f"{folder}/{file}")) for file in sorted(file_names(folder)) if file.endswith(".pt")]


def index_state(file: PickledFile) -> StateFile:
    """Read one parameter's file; a :class:`DamagedError` if it contains neither a dense tensor nor a number."""
    folder, base = os.path.split(file.path)
    is_parameters = isinstance(file.tree, dict) and "param" in file.tree
    value = file.tree["param"] if is_parameters else file.tree
    name, key = os.path.basename(folder), base.removesuffix(".pt")
    if isinstance(value, TensorRef) and (value.shape or is_parameters):  # of a parameter that may have no dimension
        if not value.is_contiguous:
            problem = f"{key} of this parameter was saved as a view that is not contiguous"
            raise DamagedError(problem, file.path, parameter=name)
        rule = _rule_of(name, file.tree)
        is_concatenated = is_parameters and rule is None and file.tree.get("cat_dim") == 0
        return StateFile(key, file.nbytes, value, None, rule, is_concatenated, file.records)
    scalar = plain_numbers(file, {key: value})[key]
    if isinstance(scalar, bool) or not isinstance(scalar, (int, float)):
        problem, found = f"{key} of this parameter is neither a tensor nor a number", type(scalar).__name__
        expected = "a tensor, or a dict with 'param'"
        raise DamagedError(problem, file.path, expected, found, parameter=name, remedy=CONVERT_AGAIN)
    return StateFile(key, file.nbytes, None, scalar)


def _rule_of(name: str, tree: Any) -> ShardSpec | None:
    """The rule that DeepSpeed's converter notes beside a tensor; its default, dimension 0, means nothing."""
    if not isinstance(tree, dict):
        return None
    pattern = f"^{re.escape(name)}$"
    if tree.get("vocab_tensor") or "vocab_divisibility_padding_tensor" in tree:
        return ShardSpec(pattern=pattern, kind=VOCABULARY)
    if isinstance(count := tree.get("param_n_sub_params"), int) and 0 < count <= _MOST_SUB_PARAMETERS:
        return ShardSpec(pattern=pattern, kind=COLUMN, dim=0, sub_parameters=[1] * count)
    noted = tree.get("sub_param_shape")
    dim, shape = getattr(noted, "partition_dim", None), getattr(noted, "shape", None)
    widths = shape[dim] if isinstance(shape, list | tuple) and isinstance(dim, int) and 0 <= dim < len(shape) else None
    if isinstance(widths, list | tuple) and widths and all(isinstance(width, int) and width > 0 for width in widths):
        parts = [width // math.gcd(*widths) for width in widths]
        return ShardSpec(pattern=pattern, kind=COLUMN, dim=dim, sub_parameters=parts)
    return ShardSpec(pattern=pattern, kind=ROW) if tree.get("cat_dim") == 1 else None


def index_optimizer(file: PickledFile) -> OptimizerFile:
    """Read the optimizer's file."""
    groups = file.section("param_groups")
    states = file.tree.get("optimizer_state_dict", {}).get("state", {})
    scalars = {int(flat): plain_numbers(file, values) for flat, values in _scalars(states).items()}
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

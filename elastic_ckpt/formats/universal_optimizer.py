"""The optimizer's file of a universal checkpoint, ``zero/optimizer_state.pt``, and what of it ``convert`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.base import CONVERT_AGAIN
from elastic_ckpt.formats.metadata_builder import refuse_view
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.own_entries import check_groups, check_numbered, check_optimizer_file, malformed
from elastic_ckpt.formats.pickled import PickledFile, opened_once
from elastic_ckpt.formats.saved_states import NESTED, StatesOfOne, read_groups, sort_states
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.universal_contents import CONTENTS, Contents, read_contents
from elastic_ckpt.formats.universal_files import FILES, FileList, read_file_list
from elastic_ckpt.formats.universal_states import NO_STATES, SHARED_STATES

#: Entries that belong to one rank's partition.
_PARTITIONS = frozenset(
    {"base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups"}
    | {"fp32_groups_flat_partition", "optimizer_state_dict"}
)
#: Marks that each parameter has its own data, whatever DeepSpeed's converter would have made of such a run.
TRUE_ORDER = "elastic_ckpt_true_order"


@dataclass(frozen=True)
class OptimizerFile:
    """``zero/optimizer_state.pt``; the defaults are what is known where there is none."""

    zero_stage: int = 1  # of the run that saved the native checkpoint
    groups: tuple[Mapping[str, Any], ...] = ()
    members: tuple[tuple[int, ...], ...] = ()  # per param group, the indices of its flat tensors
    scalars: Mapping[int, Mapping[str, float]] | None = None  # per flat tensor; empty from stages 1 and 2
    loss_scaler: Any = None  # DeepSpeed's object
    overflow: bool = False
    in_true_order: bool = False  # whether its writer guarantees that each parameter has its own data (TRUE_ORDER)
    shared: StatesOfOne = NO_STATES  # of every parameter that has states
    file: SourceFile | None = None  # with the tensors of these
    file_list: FileList | None = None  # of the folder's files, by the parameters that have them
    contents: Contents = field(default_factory=dict)  # what tells each of them from others, as its converter noted


@opened_once
def index_optimizer(file: PickledFile, options: StateOptions) -> OptimizerFile:
    """Read the optimizer's file."""
    check_optimizer_file(file)
    saved = file.tree.get(SHARED_STATES, {})
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        problem = "the states that all parameters share are no dictionary"
        expected = "tensors and numbers by name"
        raise DamagedError(problem, file.path, expected, type(saved).__name__, remedy=CONVERT_AGAIN)
    shared = sort_states(file, saved, options)
    for key, ref in shared.tensors.items() if options.are_restored else ():  # which are read in one piece
        refuse_view(key, "this state of all parameters", ref, file.path, CONVERT_AGAIN)
    groups = check_groups(file, file.section("param_groups"))
    states = file.tree.get("optimizer_state_dict", {}).get("state", {})
    check_numbered(file, states)
    scalars = {int(flat): _numbers_of(file, flat, values, options) for flat, values in _scalars(states).items()}
    return OptimizerFile(
        zero_stage=int(file.tree.get("zero_stage", 1)),
        groups=read_groups(file, groups),
        members=tuple(tuple(group["params"]) for group in groups),
        scalars=scalars,
        loss_scaler=file.tree.get("loss_scaler"),
        overflow=bool(file.tree.get("overflow", False)),
        in_true_order=file.tree.get(TRUE_ORDER) is True,
        shared=shared,
        file=SourceFile(file.path, file.nbytes, records=file.records) if shared.tensors else None,
        file_list=read_file_list(file.tree.get(FILES), file.path),
        contents=read_contents(file.tree.get(CONTENTS), file.path),
    )


def _numbers_of(file: PickledFile, flat: int, values: Mapping[str, Any], options: StateOptions) -> dict[str, Any]:
    """The numbers of one flat tensor's states; :class:`DamagedError` for what counts no steps, or is no number."""
    found = sort_states(file, dict(values), options)
    odd = next((key for key in found.opaque if options.are_restored and options.layout(key) is None), None)
    if odd is not None:
        raise malformed(file, f"optimizer_state_dict / state / {flat} / {odd}", "a number", values[odd])
    return {key: each.elements[0] if isinstance(each, TensorValue) else each for key, each in found.scalars}


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
        flat: {
            key: value
            for key, value in state.items()
            if key != NESTED and (not isinstance(value, TensorRef) or not value.shape)
        }
        for flat, state in states.items()
    }

"""``*_optim_states.pt``: one rank's flat partitions in one form for every ZeRO stage.

Stages 1 and 2 write one per param group, stage 3 one per sub-group, under other entry names.

On NVMe (stage 3), their data is in swap files beside the shards. ``DeepSpeedEngine.save_checkpoint`` copies the swap
folder of rank R to ``<tag>/offloaded_tensors/rankR``. The master of a large sub-group is in ``<id>.tensor.swp``, a
state in ``<state>-<id>.tensor.swp``: raw fp32, padded at the end. Its tensors in the shard are empty or, with
``pipeline_read`` or ``pipeline_write``, stale at full size; each has its file's name as an attribute. Sources:
``swap_tensor/optimizer_utils.py``, ``swap_tensor/pipelined_optimizer_swapper.py``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from elastic_ckpt.core.metadata import MASTER, SourceFile, is_floating
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import Features
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.errors import WITHOUT_STATES, DamagedError, LayoutError, UnsupportedError, listed
from elastic_ckpt.formats.base import refuse_other_saves
from elastic_ckpt.formats.model_states import refuse_old, refuse_own_kind
from elastic_ckpt.formats.naming import SWAPPED_FOLDER
from elastic_ckpt.formats.own_entries import check_base_state, check_own_entries, malformed, text_of
from elastic_ckpt.formats.pickled import PickledFile, opened_once
from elastic_ckpt.formats.saved_config import config_section, features_in, saved_config, section_of
from elastic_ckpt.formats.saved_states import StatesOfOne, read_groups, settings, sort_states, with_strangers
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.storage import exists, file_names, is_folder, open_stream, size_of

_SUFFIX = ".tensor.swp"
_ID = re.compile(r"\d+_\d+")
_STATE = re.compile(r"\w+")
_MOST_PADDING_NBYTES = 1 << 20  # upper bound of the padding behind the data (``intra_op_parallelism`` of 1024)
_ALIGNMENT_NBYTES = 1024


@dataclass(frozen=True)
class FlatShard:
    """One flat partition in one file."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("swapped",)

    master: TensorRef  # fp32 master weights
    partition_numel: int  # elements of the partition, padding included; -1 if swapped
    states: StatesOfOne
    #: Elements behind each parameter (``param_alignment_paddings``), where recorded.
    alignment_paddings: tuple[int, ...] | None = None
    #: Key (``fp32`` or a state) -> swap file with its data from the first byte on; empty if not swapped.
    swapped: Mapping[str, SourceFile] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerShard(SourceFile):
    """What one optimizer-states file holds."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "slice_names")

    partition_count: tuple[int, ...]  # number of partitions of each flat tensor; a single one where all are equal
    zero_stage: int  # of the run that saved it, as ``ds_version``
    ds_version: str
    flats: tuple[FlatShard, ...]
    groups: tuple[Mapping[str, Any], ...]  # hyperparameters per param group
    flat_groups: tuple[int, ...]  # the param group of each flat partition
    loss_scaler: Any  # DeepSpeed's object
    loss_scale: Any  # what of it is compared across files
    overflow: bool  # the optimizer's flag
    features: Features  # what only DeepSpeed's own loader restores
    slice_names: tuple[tuple[str, ...], ...] = ()  # per flat partition, the parameters with elements in it, in order
    data_before_experts: bool = False  # whether ranks with the same experts are adjacent
    round_robin: bool = False  # whether ZeRO-1/2 divides parameters in another order than that of ``slice_names``


def build_shard(
    file: PickledFile, zero_stage: int, flats: list[FlatShard], param_groups: Any, flat_groups: list[int]
) -> OptimizerShard:
    """An :class:`OptimizerShard` from what the stage's own module read, and what all stages write."""
    state = file.section("optimizer_state_dict")
    scaler = state.get("loss_scaler")
    counts = state.get("partition_count")
    if counts is not None and not isinstance(counts, (list, tuple)):
        by_flat = state.get("ds_zero_partition_groups")  # ZeRO-3 with experts of AutoEP
        counts = [each["partition_count"] for each in by_flat] if by_flat else [counts]
    return OptimizerShard(
        **file.facts,
        partition_count=tuple(map(int, counts or ())),
        zero_stage=zero_stage,
        ds_version=str(file.tree.get("ds_version")),
        flats=tuple(flats),
        groups=read_groups(file, param_groups),
        flat_groups=tuple(flat_groups),
        loss_scaler=scaler,
        loss_scale=tuple(getattr(scaler, key, None) for key in ("cur_scale", "cur_iter", "last_overflow_iter")),
        overflow=bool(state.get("overflow", False)),
        features=features_in(file),
        slice_names=tuple(
            tuple(without_hidden(str(name)) for name, address in sorted(slices.items(), key=lambda item: item[1].start))
            for slices in state.get("param_slice_mappings") or ()
        ),
        data_before_experts=bool((saved_config(file) or {}).get("use_data_before_expert_parallelism")),
        round_robin="zero_stage" in state
        and bool(config_section(file, "zero_optimization").get("round_robin_gradients")),
    )


@opened_once
def index_shard(file: PickledFile, dp_rank: int, options: StateOptions) -> OptimizerShard:
    """Read one optimizer-states file of any ZeRO stage; :class:`UnsupportedError` if of DeepSpeed before 0.6.2."""
    check_own_entries(file)
    if "fp32_flat_groups" in file.section("optimizer_state_dict"):
        return _index_zero3(file, dp_rank, options)
    state = file.section("optimizer_state_dict")
    signs = {"local_sub_partitions_of_fp32_groups": state, "param_shapes": file.tree}
    refuse_old(file, [sign for sign, tree in signs.items() if sign in tree])
    base = file.section("optimizer_state_dict", "base_optimizer_state")
    if not isinstance(base, Mapping):  # removes the padding's numel from every tensor, and all hyperparameters
        problem = "this checkpoint was saved with the legacy zero_optimization.elastic_checkpoint, which loses states"
        expected = '"zero_optimization": {"elastic_checkpoint": false} at save time'
        raise UnsupportedError(problem, file.path, expected, "a list of states")
    refuse_own_kind(file, base)
    check_base_state(file, base)
    masters = file.section("optimizer_state_dict", "single_partition_of_fp32_groups")
    # BF16_Optimizer saves its partitions with the padding, and called the entry "groups_padding" until 0.7.0
    in_masters = "zero_stage" not in state
    paddings = [0] * len(masters) if in_masters else file.section("optimizer_state_dict", "group_paddings")
    alignments = state.get("param_alignment_paddings") or [None] * len(masters)
    _check_flats(file, base["param_groups"], len(masters))
    every = {index: sort_states(file, base["state"].get(index, {}), options) for index in range(len(masters))}
    flats = []
    for (index, states), master in zip(with_strangers(every, base).items(), masters, strict=True):
        ref = _flat_ref(file, f"fp32 partition of param group {index}", master)
        alignment = None if alignments[index] is None else tuple(alignments[index])
        flats.append(FlatShard(ref, ref.numel + int(paddings[index]), states, alignment))
    stage = int(state.get("zero_stage", 1))
    return build_shard(file, stage, flats, base["param_groups"], list(range(len(masters))))


def _index_zero3(file: PickledFile, dp_rank: int, options: StateOptions) -> OptimizerShard:
    masters = file.section("optimizer_state_dict", "fp32_flat_groups")
    base = file.section("optimizer_state_dict", "optimizer_state_dict")
    refuse_own_kind(file, base)
    if not isinstance(base, Mapping):
        raise malformed(file, "optimizer_state_dict / optimizer_state_dict", "a dictionary", base)
    check_base_state(file, base)
    flat_groups = [-1] * len(masters)
    _check_flats(file, base["param_groups"], len(masters))
    for number, group in enumerate(base["param_groups"]):
        for index in group["params"]:
            flat_groups[index] = number
    folder = os.path.join(os.path.dirname(file.path), SWAPPED_FOLDER, f"rank{dp_rank:02d}")
    refs: list[TensorRef] = []
    swapped_of: list[Mapping[str, SourceFile]] = []
    every: dict[int, StatesOfOne] = {}
    for index, master in enumerate(masters):
        ref = _flat_ref(file, f"fp32 partition of sub-group {index}", master)
        state = base["state"].get(index, {})
        swapped = _swap_files(file, folder, ref, state)
        kept = {key: value for key, value in state.items() if key not in swapped}
        refs.append(ref)
        swapped_of.append(swapped)
        every[index] = sort_states(file, kept, options)
    flats = [
        FlatShard(ref, -1 if swapped else ref.numel, states, swapped=swapped)
        for ref, swapped, states in zip(refs, swapped_of, with_strangers(every, base).values(), strict=True)
    ]
    is_swapped = any(flat.swapped for flat in flats)
    if not is_swapped and is_folder(folder) and any(name.endswith(_SUFFIX) for name in file_names(folder)):
        # of a rewritten shard, they may be stale
        problem = "swap files are beside this shard, but none of its tensors says that it was swapped to NVMe"
        expected = "tensors that name their swap files"
        found = f"unnamed files in {folder}"
        remedy = "use the shard as DeepSpeed saved it; if nothing was swapped, remove the folder"
        raise UnsupportedError(problem, file.path, expected, found, remedy=remedy)
    return build_shard(file, 3, flats, base["param_groups"], flat_groups)


def _check_flats(file: PickledFile, groups: Sequence[Mapping[str, Any]], count: int) -> None:
    """Raise :class:`DamagedError` unless the param groups list the ``count`` flat tensors, all of them and no other."""
    numbers = {number for group in groups for number in group["params"]}
    if beyond := [number for number in numbers if number >= count]:
        raise malformed(file, "params of a param group", f"numbers of {counted(count, 'flat tensor')}", min(beyond))
    if len(numbers) < count:
        missing = next(number for number in range(count) if number not in numbers)
        expected = f"params of the param groups: numbers of {counted(count, 'flat tensor')}"
        raise DamagedError(f"no param group has the flat tensor {missing}", file.path, expected, sorted(numbers)[:8])


def _flat_ref(file: PickledFile, what: str, ref: Any) -> TensorRef:
    """``ref``, which must be a dense 1-D tensor, else :class:`DamagedError`."""
    is_flat = isinstance(ref, TensorRef) and len(ref.shape) == 1 and ref.is_contiguous
    if not is_flat or not is_floating(ref.dtype):
        expected = "a contiguous tensor of real numbers and one dimension, as DeepSpeed's ZeRO writes it"
        raise LayoutError(f"{what} is not a dense flat tensor", file.path, expected, text_of(ref))
    return ref


def other_save_than_model(shard: OptimizerShard, problem: str, expected: str, found: Any) -> LayoutError:
    """The error for an optimizer-states file that does not fit the parameters in the model-states file."""
    remedy = "model-states and optimizer-states files are of different saves: restore the folder from its original"
    return LayoutError(problem, shard.path, expected, found, remedy=remedy)


def refuse_states_apart(zero: Mapping[str, Any], steps: int, shards: Sequence[OptimizerShard]) -> None:
    """Raise :class:`LayoutError` for states that a second optimizer kept, which DeepSpeed does not save.

    With ``offload_optimizer.ratio`` below 1 (Twin-Flow), one on the accelerator updates some sub-groups; SuperOffload's
    is a process of its own. ``zero`` is the saved config's ``zero_optimization``, ``steps`` the counted ones.
    """
    offload = section_of(zero, "offload_optimizer")
    ratio = offload.get("ratio", 1.0)
    entries: dict[str, Any] = {"super_offload": True} if offload.get("super_offload") is True else {}
    entries |= {"ratio": ratio} if isinstance(ratio, (int, float)) and ratio < 1 else {}
    for shard in shards if entries and steps else ():
        stateless = [not (flat.states.tensors or flat.states.scalars or flat.swapped) for flat in shard.flats]
        lost = [str(number) for number, flat in enumerate(shard.flats) if stateless[number] and flat.master.numel]
        if lost:
            problem = "optimizer states of some sub-groups are in no file: DeepSpeed saves none of a second optimizer, "
            problem += f'which "offload_optimizer": {json.dumps(entries)} makes'
            expected = f"states of {counted(len(shard.flats), 'sub-group')}"
            raise LayoutError(problem, shard.path, expected, "none of " + listed(lost), remedy=WITHOUT_STATES)


def with_own_padding(shards: Sequence[OptimizerShard]) -> list[OptimizerShard]:
    """The shards of all ranks, with partitions of one size.

    Until 0.15, DeepSpeed counts all padding of a param group as the last rank's, and saves ``2 * partition - padding``
    elements of a partition that is smaller.
    """
    flats = list(shards[-1].flats)
    for number, (first, last) in enumerate(zip(shards[0].flats, flats, strict=False)):
        equal = first.partition_numel
        padding = last.partition_numel - last.master.numel
        if padding > equal > 0 and last.master.numel == max(0, 2 * equal - padding):
            flats[number] = replace(last, partition_numel=equal)
    return [*shards[:-1], replace(shards[-1], flats=tuple(flats))]


def check_same_save(shards: Sequence[OptimizerShard]) -> None:
    """Raise :class:`DamagedError` for the first optimizer-states file of another save than rank 0's."""

    def facts_of(shard: OptimizerShard) -> dict[str, Any]:
        # ranks of one save do differ in what an optimizer computes of its own partition, and some keep a number in
        # place of a tensor for a partition of zeros
        states = [flat.states for flat in shard.flats]
        flats = shard.flats
        keys = [
            sorted({*each.tensors, *each.opaque, *flat.swapped, *dict(each.scalars)})
            for flat, each in zip(flats, states, strict=True)
        ]
        return {
            "ZeRO stage differs": shard.zero_stage,
            "partition count differs": shard.partition_count,
            "DeepSpeed version differs": shard.ds_version,
            "loss scale differs": shard.loss_scale,
            "number of flat tensors differs": len(flats),
            "size of the flat partitions differs": [flat.partition_numel for flat in flats],
            "param_alignment_paddings differ": [flat.alignment_paddings for flat in flats],
            "step of the optimizer differs": [dict(each.scalars).get("step") for each in states],
            "set of optimizer states differs": keys,
            "set of states on NVMe differs": [sorted(flat.swapped) for flat in flats],
            "hyperparameters of the param groups differ": settings(shard.groups),
        }

    refuse_other_saves(shards, facts_of)


def _swap_files(file: PickledFile, folder: str, master: TensorRef, state: Mapping[str, Any]) -> dict[str, SourceFile]:
    """The swap files of one sub-group by metadata key; empty if the shard itself has its data."""
    states = {key: ref for key, ref in state.items() if isinstance(ref, TensorRef) and ref.swap_id is not None}
    if not states:  # it may be on NVMe, and have no states yet
        if master.swap_id is None or (state and master.numel):
            return {}
        if master.numel:
            if not exists(os.path.join(folder, master.swap_id + _SUFFIX)):
                return {}
            problem = "saved before the first step, with states on NVMe: which masters are up to date is not known"
            expected = "a checkpoint saved after a step, or without pipeline_read and pipeline_write"
            found = f"a swap file and {master.numel} elements in the shard"
            remedy = "start from the initial weights"
            raise UnsupportedError(problem, file.path, expected, found, remedy=remedy)
    named = {MASTER: master.swap_id, **{key: ref.swap_id for key, ref in states.items()}}
    files = {}
    for key, swap_id in named.items():
        is_named = swap_id is not None and (
            _ID.fullmatch(swap_id) if key == MASTER else _STATE.fullmatch(key) and swap_id == f"{key}-{named[MASTER]}"
        )
        if not is_named:
            problem = f"{'the fp32 master' if key == MASTER else key} was swapped to NVMe, but names no swap file"
            expected = "<first>_<last> for a master, <state>-<first>_<last> for a state"
            raise DamagedError(problem, file.path, expected, repr(swap_id))
        path = os.path.join(folder, f"{swap_id}{_SUFFIX}")
        with open_stream(path) as stream:
            files[key] = SourceFile(path, size_of(stream))
    return files


def check_swap_file(source: SourceFile, numel: int) -> None:
    """Raise :class:`DamagedError` unless a swap file has the size of its data, padded."""
    padding = source.nbytes - 4 * numel
    if not 0 <= padding < _MOST_PADDING_NBYTES or source.nbytes % _ALIGNMENT_NBYTES:
        problem = "a swap file of the checkpoint has the wrong size: truncated, or of another run in the same folder"
        expected = f"{numel} fp32 elements, padded to a multiple of {_ALIGNMENT_NBYTES} bytes"
        raise DamagedError(problem, source.path, expected, f"{source.nbytes} bytes")

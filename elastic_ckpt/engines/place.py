"""Where a rank stands in a live job, and how tensor-parallel ranks hold the live parameters.

Read from DeepSpeed's pipeline grid, or from the ``mpu`` that the engine was given; parameters tell by the attributes of
Megatron's parallel layers (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``) or by what AutoTP notes
on them (``ds_autotp_universal_checkpoint_meta``).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import AFFINE_MAP, DS_AUTOTP_UC_META
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

from elastic_ckpt.core.declared import split_of_affine
from elastic_ckpt.core.local_state import LiveLayout, LocalState, RankCoordinates
from elastic_ckpt.core.sequence import SequenceParallel
from elastic_ckpt.core.strided import Shape, TPLayout
from elastic_ckpt.core.tp_rules import CannotSplit
from elastic_ckpt.errors import UnsupportedError

#: Elements of a buffer that is looked into: a rank's own bounds and offsets are small.
_MOST_COMPARED = 1 << 16


@dataclass(frozen=True)
class OneRank:
    """What one rank tells the others: where it stands, and its shard of each parameter and buffer."""

    place: RankCoordinates
    layouts: Mapping[str, LiveLayout]


def one_rank(engine: Any, dp: int, dp_rank: int) -> OneRank:
    """What this rank has to tell. Local.

    Raises:
        UnsupportedError: pipeline parallelism that is not DeepSpeed's.
    """
    place = place_of(engine, dp, dp_rank)
    return OneRank(place, _layouts(engine, with_values=place.tp > 1))


def place_of(engine: Any, dp: int, dp_rank: int) -> RankCoordinates:
    """Where this rank stands. Local.

    Raises:
        UnsupportedError: pipeline parallelism that is not DeepSpeed's.
    """
    if isinstance(engine, PipelineEngine):
        grid = engine.grid
        return RankCoordinates(
            dp,
            dp_rank,
            grid.get_slice_parallel_world_size(),
            grid.get_slice_parallel_rank(),
            grid.pipe_parallel_size,
            grid.get_stage_id(),
        )
    sequence, sp_rank = sequence_of(engine, dp)
    alone = RankCoordinates(dp, dp_rank, sequence=sequence, sp_rank=sp_rank)
    if engine.mpu is None:
        return alone
    if bwc_pipeline_parallel_world_size(engine.mpu) > 1:
        raise UnsupportedError(
            "the live engine uses pipeline parallelism of its own, which is not supported",
            expected="DeepSpeed's PipelineModule",
            found=f"{type(engine.module).__name__}, and an mpu of several stages",
        )
    if engine.mp_world_size == 1:
        return alone
    tp, tp_rank = bwc_tensor_model_parallel_world_size(engine.mpu), bwc_tensor_model_parallel_rank(engine.mpu)
    return replace(alone, tp=tp, tp_rank=tp_rank)


def sequence_of(engine: Any, dp: int) -> tuple[SequenceParallel, int]:
    """Sequence parallelism of a live engine, and this rank's place in its sequence-parallel group. Local.

    Args:
        engine: the live engine.
        dp: ranks that ZeRO partitions over.
    """
    degree = int(engine.sequence_parallel_size)
    if degree == 1:
        return SequenceParallel(), 0
    data = engine.dp_world_size  # None with ``parallel_state_sp``, which always partitions over sequence ranks
    partitioned = data is None or dp == data * degree
    members = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
    ranks = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    # with a device mesh that group leaves out the other sequence-parallel ranks; the job has no others then
    positions = [ranks.index(member) for member in members] if {*members} <= {*ranks} else members
    strided = positions != list(range(positions[0], positions[0] + degree))
    return SequenceParallel(degree, partitioned, strided), groups._get_sequence_parallel_rank()


def with_place(local_state: LocalState, mine: OneRank, everybody: Sequence[OneRank]) -> LocalState:
    """Add where this rank stands, and how the parameters of its stage are held. Local.

    Args:
        local_state: what this rank's engine holds.
        mine: what it told the others.
        everybody: what all ranks told; without tensor and pipeline parallelism, this one's word is enough.
    """
    place = mine.place
    stage = [
        other for other in everybody if (other.place.pp_rank, other.place.dp_rank) == (place.pp_rank, place.dp_rank)
    ]
    stage.sort(key=lambda other: other.place.tp_rank)
    layouts = (
        mine.layouts if len(stage) == 1 else {name: _held(name, layout, stage) for name, layout in mine.layouts.items()}
    )
    elsewhere = {name for other in everybody for name in other.layouts} - set(mine.layouts)
    return replace(
        local_state,
        tp=place.tp,
        tp_rank=place.tp_rank,
        pp=place.pp,
        pp_rank=place.pp_rank,
        elsewhere=frozenset(elsewhere),
        layouts=layouts,
    )


def _held(name: str, layout: LiveLayout, stage: Sequence[OneRank]) -> LiveLayout:
    """How all tensor-parallel ranks of a stage, in their order, hold a parameter or buffer."""
    held = [other.layouts[name] for other in stage if name in other.layouts]
    return replace(
        layout,
        shapes=tuple(other.shapes[0] for other in held),
        values=tuple(value for other in held for value in other.values),
    )


def _layouts(engine: Any, with_values: bool) -> dict[str, LiveLayout]:
    """Every parameter by DeepSpeed's name for it, and every buffer; each with this rank's shape alone."""
    owners = {
        id(tensor): type(module).__module__
        for module in engine.module.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    named = {name: param for param, name in engine.param_names.items()}
    by_autotp = any(getattr(param, DS_AUTOTP_UC_META, None) for param in named.values())
    buffers = dict(engine.module.named_buffers(remove_duplicate=False))
    layouts = {name: _layout(tensor, owners.get(id(tensor), "")) for name, tensor in {**buffers, **named}.items()}
    if with_values:
        small = {name: buffer for name, buffer in buffers.items() if buffer.numel() <= _MOST_COMPARED}
        layouts |= {name: replace(layouts[name], values=(_checksum(buffer),)) for name, buffer in small.items()}
    if by_autotp:  # which leaves whole what it does not note anything on
        untouched = {name for name, param in named.items() if not getattr(param, DS_AUTOTP_UC_META, None)}
        layouts |= {name: replace(layouts[name], dim=-1) for name in untouched}
    return layouts


def _checksum(buffer: torch.Tensor) -> int:
    flat = buffer.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def _layout(tensor: torch.Tensor, owner: str) -> LiveLayout:
    shape: Shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    is_cut = getattr(tensor, "tensor_model_parallel", None)
    dim = -1 if is_cut is False else getattr(tensor, "partition_dim", None) if is_cut else None
    stride = max(int(getattr(tensor, "partition_stride", 1) or 1), 1) if is_cut else 1
    return LiveLayout((shape,), dim, stride, owner, _recorded(tensor))


def _recorded(tensor: torch.Tensor) -> TPLayout | None:
    """AutoTP's map of all ranks' shards, where there is one that is a cut along one dimension."""
    conversion = (getattr(tensor, DS_AUTOTP_UC_META, None) or {}).get("conversion") or {}
    entry = conversion.get(AFFINE_MAP)
    try:
        return None if entry is None else split_of_affine(entry)
    except CannotSplit:
        return None

"""``*_optim_states.pt``: one rank's flat partitions, of any ZeRO stage, as one form.

Stages 1 and 2 keep one flat partition for each param group, stage 3 one for each sub-group; apart from the
names of the entries they hold the same things. The two modules beside this one read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.features import Features
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import DamagedError, LayoutError
from elastic_ckpt.formats.features import features_in
from elastic_ckpt.formats.pickled import PickledFile, TensorRef
from elastic_ckpt.formats.saved_states import StatesOfOne, read_groups


@dataclass(frozen=True)
class FlatShard:
    """One flat partition in one file.

    Attributes:
        master: the fp32 master weights.
        partition_numel: elements of the partition, padding included.
        states: its optimizer states.
        alignment_paddings: elements behind each parameter (``param_alignment_paddings``), where recorded.
        swapped: key -> swap file that holds the data of the master (``fp32``) and of each state, from its first byte
            on; empty where they lie in this file. ``partition_numel`` is then -1.
    """

    master: TensorRef
    partition_numel: int
    states: StatesOfOne
    alignment_paddings: tuple[int, ...] | None = None
    swapped: Mapping[str, SourceFile] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerShard(SourceFile):
    """What one optimizer-states file says, small enough to be sent to every rank.

    Attributes:
        dp_rank: whose partition it is.
        partition_count: into how many the state was cut, per group.
        zero_stage: stage that saved it.
        ds_version: DeepSpeed version.
        flats: the partitions.
        groups: hyperparameters per param group.
        flat_groups: per flat partition, the param group it belongs to.
        loss_scaler: DeepSpeed's loss scaler object.
        loss_scale: its current scale, for comparison across files.
        overflow: the optimizer's overflow flag.
        features: what only DeepSpeed's own loader restores.
        slice_names: per flat partition, names of the parameters of which it holds something, in flat order.
    """

    dp_rank: int
    partition_count: tuple[int, ...]
    zero_stage: int
    ds_version: str
    flats: tuple[FlatShard, ...]
    groups: tuple[Mapping[str, Any], ...]
    flat_groups: tuple[int, ...]
    loss_scaler: Any
    loss_scale: Any
    overflow: bool
    features: Features
    slice_names: tuple[tuple[str, ...], ...] = ()


def _partition_counts(saved: Any) -> tuple[int, ...]:
    """``partition_count`` as DeepSpeed writes it (a number, or one a group) in one form; empty where not recorded."""
    if saved is None:
        return ()
    return tuple(int(count) for count in saved) if isinstance(saved, (list, tuple)) else (int(saved),)


def build_shard(
    file: PickledFile, dp_rank: int, zero_stage: int, flats: list[FlatShard], param_groups: Any, flat_groups: list[int]
) -> OptimizerShard:
    """An :class:`OptimizerShard` from what the stage's own module found, and from what all stages write alike."""
    state = file.section("optimizer_state_dict")
    scaler = state.get("loss_scaler")
    return OptimizerShard(
        path=file.path,
        nbytes=file.nbytes,
        dp_rank=dp_rank,
        partition_count=_partition_counts(state.get("partition_count")),
        zero_stage=zero_stage,
        ds_version=str(file.tree.get("ds_version")),
        flats=tuple(flats),
        groups=read_groups(file, param_groups),
        flat_groups=tuple(flat_groups),
        loss_scaler=scaler,
        loss_scale=getattr(scaler, "cur_scale", None),
        overflow=bool(state.get("overflow", False)),
        features=features_in(file),
        slice_names=tuple(map(_in_flat_order, state.get("param_slice_mappings") or ())),
    )


def _in_flat_order(slices: Mapping[Any, Any]) -> tuple[str, ...]:
    """Names by where their slices (``fragment_address``) start."""
    return tuple(str(name) for name, _ in sorted(slices.items(), key=lambda item: item[1].start))


def flat_ref(file: PickledFile, what: str, ref: Any) -> TensorRef:
    """Check that a saved object is a dense 1-D tensor.

    Raises:
        DamagedError: it is something else.
    """
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not ref.is_contiguous:
        raise LayoutError(
            f"{what} is not a dense flat tensor",
            file=file.path,
            expected="a contiguous tensor of one dimension",
            found=str(ref)[:200],
            remedy="the file was not written by DeepSpeed's ZeRO; take another tag",
        )
    return ref


def check_same_save(shards: list[OptimizerShard]) -> None:
    """All optimizer-states files must come from one save.

    Raises:
        DamagedError: naming the first file that disagrees with rank 0's, and in what.
    """
    first = shards[0]
    for shard in shards[1:]:
        for what, expected, found in _compared(first, shard):
            if expected != found:
                raise DamagedError(
                    f"this file belongs to another save than {first.path}: {what} differs",
                    file=shard.path,
                    expected=str(expected)[:300],
                    found=str(found)[:300],
                    remedy=(
                        "remove the foreign file and restore the right one, or take another tag; if an optimizer's "
                        "own counts differ between ranks: load_optimizer_states=False"
                    ),
                )


def _compared(first: OptimizerShard, shard: OptimizerShard) -> list[tuple[str, Any, Any]]:
    return [
        ("ZeRO stage", first.zero_stage, shard.zero_stage),
        ("partition count", first.partition_count, shard.partition_count),
        ("DeepSpeed version", first.ds_version, shard.ds_version),
        ("loss scale", first.loss_scale, shard.loss_scale),
        ("number of flat tensors", len(first.flats), len(shard.flats)),
        ("size of the flat partitions", _sizes(first), _sizes(shard)),
        ("scalar optimizer state", _scalars(first), _scalars(shard)),
        ("set of optimizer states", _keys(first), _keys(shard)),
        ("hyperparameters of the param groups", repr(first.groups), repr(shard.groups)),
    ]


def _sizes(shard: OptimizerShard) -> list[int]:
    return [flat.partition_numel for flat in shard.flats]


def _scalars(shard: OptimizerShard) -> list[Any]:
    return [flat.states.scalars for flat in shard.flats]


def _keys(shard: OptimizerShard) -> list[Any]:
    return [sorted({*flat.states.tensors, *flat.states.opaque, *flat.swapped}) for flat in shard.flats]

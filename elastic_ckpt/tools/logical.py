"""Reads ranges of a checkpoint's logical tensors, whatever files and shards hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, WEIGHTS, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, ReplicaCheck, RequantizeItem, Slot, in_file_order
from elastic_ckpt.core.strided import Shape, ShardSources, copied
from elastic_ckpt.core.values import TensorValue, common
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, listed
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import find_drift, judge_drift
from elastic_ckpt.io.reader import execute
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.planning.read_items import check_tiling, read_items, rows_in_order
from elastic_ckpt.planning.replicas import compare_replicas, of_first_stage
from elastic_ckpt.planning.state_matching import refuse_partial, state_errors
from elastic_ckpt.sharding.resolve import resolve
from elastic_ckpt.sharding.specs import virtual_layouts


@dataclass(frozen=True, slots=True)
class Whole:
    """A logical tensor.

    Attributes:
        shape: logical shape, with rows as the leading dimension if there are several.
        dtype: in which it is read; of quantized states, that of dequantized values.
        rows: values of a state per element of its parameter.
        is_coded, has_own_shape: whether it is quantized in the files; whether it is a state with a shape of its own.
    """

    name: str
    key: str
    shape: Shape
    dtype: str
    rows: int = 1
    is_coded: bool = False
    has_own_shape: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


def refuse_without_masters(metadata: CheckpointMetadata) -> None:
    """Raise :class:`DamagedError` if the checkpoint lacks master weights of a parameter that an optimizer owned."""
    missing = [name for name in metadata.parameters if (name, MASTER) not in metadata.tensors]
    if missing:
        raise DamagedError(
            "the checkpoint knows these parameters but holds no master weights of them",
            parameter=listed(missing),
            file=metadata.source.folder,
            remedy="the save is incomplete: take another tag",
        )


def refuse_unreadable_states(metadata: CheckpointMetadata) -> None:
    """Raise an error that names the optimizer state that is damaged, of unknown layout, or not there for some."""
    for error in state_errors(metadata):
        raise error
    refuse_partial(metadata)


def weights_by_name(wholes: Iterable[Whole]) -> dict[str, Whole]:
    """Parameters and buffers by name, without optimizer states. Raises :class:`MismatchError` if two share a name."""
    found: dict[str, Whole] = {}
    for whole in wholes:
        if whole.key in WEIGHTS and found.setdefault(whole.name, whole) is not whole:
            keys = f"{found[whole.name].key} and {whole.key}"
            raise MismatchError("two tensors of the checkpoint share a name", parameter=whole.name, found=keys)
    return found


def scalars_of(metadata: CheckpointMetadata, name: str) -> dict[str, torch.Tensor | float]:
    """Scalar states of a parameter, as numbers or tensors, whichever was saved; not those in which ranks differ."""
    saved = common(dict(metadata.parameters[name].scalars))
    return {key: plain(value) for key, value in saved.items() if value is not None}


def plain(value: Any) -> Any:
    """A hyperparameter or scalar state with real tensors."""
    if isinstance(value, TensorValue):
        return torch.tensor(value.elements, dtype=getattr(torch, value.dtype)).reshape(value.shape)
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


class LogicalReader:
    """Reads logical tensors: joins tensor-parallel shards as a load with these rules and replication policy would.

    Raises :class:`MismatchError` if a layout is unknown or contradicts the shapes; if ``errors`` is given, they are
    collected there by name instead, and these tensors cannot be read.
    """

    def __init__(
        self, metadata: CheckpointMetadata, options: LoadOptions, errors: dict[str, ElasticCkptError] | None = None
    ) -> None:
        self.metadata = metadata
        self._options = options
        self._policy = options.config.replicated_params
        weights = (name for name, key in metadata.tensors if key in WEIGHTS)
        self._layouts = virtual_layouts(metadata, dict.fromkeys(weights), 1, options.rules, errors)
        is_sharded = metadata.source.tp > 1 or metadata.source.merged_from > 1
        self._model = ModelLayout(layouts=self._layouts if is_sharded else {})
        self.resharding = resolve(metadata, self._model, self._layouts, options.rules, self._policy, errors)
        self.notes: tuple[str, ...] = self.resharding.notes
        self._names = self._layouts.keys() - (errors or {}).keys()

    def tensors(self) -> Iterator[Whole]:
        """All tensors, in metadata order."""
        return map(self._whole, self.metadata.tensors.values())

    def compare_copies(self, options: ReadOptions, only: Whole | None = None) -> tuple[str, ...]:
        """Compare the saved copies of replicated tensors, or of one; returns notes on how differences were resolved.

        Without live shards, a vector that is replicated only by its shape is a guess, as matrices are in a load.
        Raises :class:`MismatchError` if copies differ and the policy is ``strict``.
        """
        guessed = self.resharding.guessed
        # states tell whether a tied pipeline module's copy is trained at all
        checks = (
            one
            for one in self.replica_checks
            if only is None or (one.name == only.name and (one.key == only.key or one.is_of_stages))
        )
        judged = tuple(replace(one, is_guess=one.is_guess or one.name in guessed) for one in checks)
        drift = find_drift(self.metadata.files, judged, options)
        return judge_drift(drift, self.of_first_stage.union(self.resharding.averaged), self._policy)

    @cached_property
    def of_first_stage(self) -> frozenset[str]:
        """Tied parameters of which only the first pipeline stage's copy is trained."""
        return of_first_stage(self.metadata, self._options.rules, self._model)

    @cached_property
    def replica_checks(self) -> tuple[ReplicaCheck, ...]:
        """The saved copies of replicated tensors."""
        return compare_replicas(self.metadata, self._model, self.resharding, self._names, with_states=True)

    def tensor(self, whole: Whole, options: ReadOptions) -> torch.Tensor:
        """Read a tensor into memory of its own."""
        tensor = torch.empty(whole.shape, dtype=getattr(torch, whole.dtype))
        if whole.numel:
            self.read(whole, FlatRange(0, whole.numel), tensor.view(-1), options)
        return tensor

    def read(self, whole: Whole, wanted: FlatRange, out: torch.Tensor, options: ReadOptions) -> None:
        """Read the elements ``wanted`` of a tensor, counted through all rows, into ``out``. Thread-safe.

        ``out``: contiguous CPU tensor of ``wanted.numel`` elements and :attr:`Whole.dtype`. Raises
        :class:`DamagedError` if a file cannot be read.
        """
        tensor = self.metadata.tensors[whole.name, whole.key]
        row_numel = whole.numel // whole.rows
        sources = self._sources(tensor, row_numel)
        items: list[ReadItem] = []
        for row in range(wanted.start // max(row_numel, 1), -(-wanted.stop // max(row_numel, 1))):
            base = row * row_numel
            inside = FlatRange(max(wanted.start - base, 0), min(wanted.stop - base, row_numel))
            items += read_items(tensor, sources, inside, to_slot=base - wanted.start, row=row, rows=whole.rows)
        requantize: tuple[RequantizeItem, ...] = ()
        if whole.is_coded or sources.scale is not None:
            requantize = (RequantizeItem(0, 0, wanted.numel, None, -1, 0, rows_in_order(items), sources.scale),)
            items = []
        slot = Slot(whole.key, 0, whole.name, wanted.numel, whole.dtype)
        plan = ReadPlan(self.metadata.files, (slot,), in_file_order(items), requantize)
        execute(plan, [out], options, show_progress=False)

    def _sources(self, tensor: TensorMetadata, numel: int) -> ShardSources:
        transfers, name = self.resharding.transfers, tensor.name
        found = None if tensor.has_own_shape else transfers.get((name, tensor.key)) or transfers.get((name, ""))
        return found or copied(0, numel)

    def _whole(self, tensor: TensorMetadata) -> Whole:
        check_tiling(self.metadata, tensor)
        is_coded = tensor.is_quantized
        layout = self._layouts.get(tensor.name)
        if tensor.has_own_shape or layout is None:
            return Whole(tensor.name, tensor.key, tensor.shape, tensor.dtype, 1, is_coded, tensor.has_own_shape)
        shape, first = layout.shapes[0], tensor.shard_shapes[0]
        rows = first[0] if len(first) == len(shape) + 1 else 1
        dtype = "float32" if is_coded else tensor.dtype
        return Whole(tensor.name, tensor.key, (rows, *shape) if rows > 1 else shape, dtype, rows, is_coded)

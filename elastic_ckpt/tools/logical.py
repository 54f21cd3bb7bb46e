"""A checkpoint's logical tensors, whatever files and shards hold them: their reader, and ``elastic_ckpt.open``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.metadata import FROZEN, ITEMSIZE, MASTER, WEIGHTS, CheckpointMetadata
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, ReplicaCheck, RequantizeItem, TargetTensor, in_file_order
from elastic_ckpt.core.strided import Shape, copied
from elastic_ckpt.core.values import TensorValue, common
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, printable_errors, shortened
from elastic_ckpt.io.coalesce import ReadOptions, read_options
from elastic_ckpt.io.compare_replicas import find_drift, judge_drift
from elastic_ckpt.io.reader import execute
from elastic_ckpt.planning.planner import compare_replicas, of_first_stage
from elastic_ckpt.planning.read_items import check_tiling, read_items, refuse_shared_bytes, rows_in_order
from elastic_ckpt.planning.state_errors import refuse_missing_files, refuse_unreadable_states
from elastic_ckpt.sharding.resolve import resolve
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.sharding.specs import virtual_layouts
from elastic_ckpt.storage import VIEW, medium_of, seen_through
from elastic_ckpt.tools.opened import Folders, OpenedCheckpoint, config_of, open_checkpoint, open_folder, seen_together

logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A parameter, state or buffer, its tensor-parallel shards joined."""

    name: str
    key: str
    shape: Shape  # logical, with planes as the leading dimension if there are several
    dtype: str  # in which it is read; of quantized states, that of dequantized values
    planes: int = 1  # values of a state per element of its parameter

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
        refuse_missing_files(metadata)
        problem = "the checkpoint knows these parameters but holds no master weights of them"
        remedy = "the save is incomplete: use another tag"
        raise DamagedError(problem, metadata.source.folder, parameter=missing, remedy=remedy)


def weights_by_name(reader: LogicalReader) -> dict[str, LogicalTensor]:
    """Parameters and buffers by name, without optimizer states. Raises :class:`MismatchError` if two share a name."""
    refuse_without_masters(reader.metadata)
    found: dict[str, LogicalTensor] = {}
    for tensor in reader.tensors.values():
        if tensor.key in WEIGHTS and found.setdefault(tensor.name, tensor) is not tensor:
            keys = f"{found[tensor.name].key} and {tensor.key}"
            raise MismatchError("two tensors of the checkpoint share a name", parameter=tensor.name, found=keys)
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
    """Reads logical tensors: joins tensor-parallel shards as a load with this config would.

    ``options``: how to read; by default, as the config says, without a progress bar. Raises :class:`MismatchError` if
    a layout is unknown or contradicts the shapes; if ``errors`` is given, they are collected there by name instead,
    and these tensors cannot be read.
    """

    def __init__(
        self,
        metadata: CheckpointMetadata,
        config: ElasticConfig,
        options: ReadOptions | None = None,
        errors: dict[str, ElasticCkptError] | None = None,
    ) -> None:
        refuse_shared_bytes(metadata)
        self.metadata = metadata
        self.rules = ShardingRules.of(config)
        self._policy = config.replicated_params
        self.options = options or read_options(config, medium_of(metadata.source.folder, config.reading.storage))
        self.errors: Mapping[str, ElasticCkptError] = {} if errors is None else errors
        weights = (name for name, key in metadata.tensors if key in WEIGHTS)
        self._layouts = virtual_layouts(metadata, dict.fromkeys(weights), 1, self.rules, errors)
        is_sharded = metadata.source.tp > 1 or metadata.source.merged_from > 1
        self._model = ModelLayout(layouts=self._layouts if is_sharded else {})
        self.resharding = resolve(metadata, self._model, self._layouts, self.rules, self._policy, errors)
        self.notes = (*self.resharding.notes, *self._rounding_notes())
        self._names = self._layouts.keys() - self.errors.keys()

    def _rounding_notes(self) -> Iterator[str]:
        """What is computed of several shards, and kept in a dtype that may not have the result."""
        rounded: dict[str, list[str]] = {}
        for (name, key), sources in self.resharding.transfers.items():
            tensor = self.metadata.tensors.get((name, key or MASTER)) or self.metadata.tensors.get((name, FROZEN))
            if sources.scale is not None and tensor is not None and ITEMSIZE[tensor.dtype] < ITEMSIZE["float32"]:
                rounded.setdefault(tensor.dtype, []).append(name)
        for dtype, names in rounded.items():
            yield f"sums and means of shards are rounded to {dtype}, as saved: {shortened(dict.fromkeys(names))}"

    @cached_property
    def tensors(self) -> dict[tuple[str, str], LogicalTensor]:
        """(name, key) -> tensor, in metadata order. Raises :class:`DamagedError` if elements of one are in no file."""
        found: dict[tuple[str, str], LogicalTensor] = {}
        for at, tensor in self.metadata.tensors.items():
            check_tiling(self.metadata, tensor)
            layout = self._layouts.get(tensor.name)
            if tensor.has_own_shape or layout is None:
                found[at] = LogicalTensor(*at, tensor.shape, tensor.dtype)
                continue
            shape = layout.shapes[0]
            first = tensor.shard_shapes[0]
            planes = first[0] if len(first) == len(shape) + 1 else 1
            dtype = "float32" if tensor.is_quantized else tensor.dtype
            found[at] = LogicalTensor(*at, (planes, *shape) if planes > 1 else shape, dtype, planes)
        return found

    def compare_copies(self, only: LogicalTensor | None = None) -> tuple[str, ...]:
        """Compare the saved copies of replicated tensors, or of one; returns notes on how differences were resolved.

        Without live shards, a vector that is replicated only by its shape is a guess, as matrices are in a load.
        Raises :class:`MismatchError` if copies differ and the policy is ``strict``.
        """
        # states tell whether a tied pipeline module's copy is trained at all
        checks = tuple(
            replace(one, is_guess=one.is_guess or one.name in self.resharding.guessed)
            for one in self.replica_checks
            if only is None or (one.name == only.name and (one.key == only.key or one.is_of_stages))
        )
        drift = find_drift(self.metadata.files, checks, self.options)
        may_differ = self.of_first_stage.union(self.resharding.averaged)
        return judge_drift(drift, may_differ, self._policy, has_live_model=False)

    @cached_property
    def of_first_stage(self) -> frozenset[str]:
        return of_first_stage(self.metadata, self.rules, self._model)

    @cached_property
    def replica_checks(self) -> tuple[ReplicaCheck, ...]:
        return compare_replicas(self.metadata, self._model, self.resharding, self._names, with_states=True)

    def tensor(self, logical: LogicalTensor) -> torch.Tensor:
        """Read a tensor into memory of its own."""
        tensor = torch.empty(logical.shape, dtype=getattr(torch, logical.dtype))
        if logical.numel:
            self.read(logical, FlatRange(0, logical.numel), tensor.view(-1))
        return tensor

    def read(self, logical: LogicalTensor, wanted: FlatRange, out: torch.Tensor) -> None:
        """Read the elements ``wanted`` of a tensor, counted through all planes, into ``out``. Thread-safe.

        ``out``: contiguous CPU tensor of ``wanted.numel`` elements and :attr:`LogicalTensor.dtype`. Raises
        :class:`DamagedError` if a file cannot be read.
        """
        tensor = self.metadata.tensors[logical.name, logical.key]
        items, scale = self.items_of(logical, wanted)
        requantize: tuple[RequantizeItem, ...] = ()
        if tensor.is_quantized or scale is not None:
            requantize = (RequantizeItem(0, 0, wanted.numel, None, -1, 0, rows_in_order(items), scale),)
            items = []
        target = TargetTensor(logical.key, 0, logical.name, wanted.numel, logical.dtype)
        plan = ReadPlan(self.metadata.files, (target,), in_file_order(items), requantize)
        execute(plan, [out], self.options)

    def items_of(self, logical: LogicalTensor, wanted: FlatRange) -> tuple[list[ReadItem], float | None]:
        """The items that read the elements ``wanted``, and so many times their sum each is (``None``: as it is)."""
        tensor = self.metadata.tensors[logical.name, logical.key]
        plane_numel = logical.numel // logical.planes
        transfers = {} if tensor.has_own_shape else self.resharding.transfers
        sources = transfers.get((tensor.name, tensor.key)) or transfers.get((tensor.name, "")) or copied(0, plane_numel)
        items: list[ReadItem] = []
        for plane in range(wanted.start // max(plane_numel, 1), -(-wanted.stop // max(plane_numel, 1))):
            base = plane * plane_numel
            inside = FlatRange(max(wanted.start - base, 0), min(wanted.stop - base, plane_numel))
            items += read_items(tensor, sources, inside, 0, base - wanted.start, plane, logical.planes)
        return items, sources.scale


@printable_errors()
def open(  # shadows the built-in function here alone: it is elastic_ckpt.open
    folder: Folders, *, tag: str | None = None, config: ElasticConfig | None = None
) -> CheckpointTensors:
    """Open a checkpoint as a mapping of FQNs to tensors. No engine and no GPU is needed.

    Reads the checkpoint's metadata; a tensor's bytes are read when it is accessed::

        checkpoint = elastic_ckpt.open("checkpoints")
        weight = checkpoint["model.layers.0.weight"]
        moments = checkpoint.optimizer_state("model.layers.0.weight")["exp_avg"]

    Args:
        folder: folder with a ``latest`` file, or the folder of one tag; several, of nodes with disks of their own.
        tag: which checkpoint of the folder; ``None``: the latest.
        config: options of the load; rules of tensor parallelism, for example.

    Raises:
        ElasticCkptError: there is no checkpoint, or its metadata cannot be read.
    """
    with seen_together(folder, config, tag) as path:
        return CheckpointTensors(open_folder(path, tag, config or config_of(None), with_states=False))


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """A checkpoint's parameters and buffers by FQN, tied names included; :func:`elastic_ckpt.open` returns it.

    Parameters are fp32 master weights where the checkpoint has them; frozen parameters and buffers are as the module
    had them. Every access reads the tensor anew, and no other, into memory of its own on the CPU; tensor-parallel
    shards are joined as in a load, and saved copies compared. Thread-safe. The files must not change meanwhile.

    Raises :class:`KeyError` for an unknown name, and :class:`ElasticCkptError` if a tensor cannot be read exactly.
    """

    def __init__(self, opened: OpenedCheckpoint) -> None:
        self._opened = opened
        self._view = VIEW.get()
        self._reader = LogicalReader(opened.metadata, opened.config, errors={})
        self._weights = weights_by_name(self._reader)
        aliases = opened.metadata.aliases.items()
        self._weights |= {alias: self._weights[name] for alias, name in aliases if name in self._weights}

    @printable_errors()
    def __getitem__(self, name: str) -> torch.Tensor:
        with seen_through(self._view):
            return self._read(self._reader, self._logical(name))

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @printable_errors()
    def optimizer_state(self, name: str) -> dict[str, torch.Tensor | float]:
        """Optimizer states of a parameter, in its shape: ``{"step": tensor(3.), "exp_avg": ..., "exp_avg_sq": ...}``.

        8-bit states are dequantized to fp32. Scalar states are as they were saved, numbers or tensors. What belongs
        to whole partitions and no parameter is left out. Empty for a parameter that no step has updated.

        Raises :class:`KeyError` if no optimizer owned such a parameter, and :class:`ElasticCkptError` if states are
        damaged or of unknown layout, or the optimizer's parameters could not be named.
        """
        with seen_through(self._view):
            reader = self._states
            name = self._logical(name).name
            metadata = reader.metadata
            if name not in metadata.parameters:
                raise KeyError(f"no optimizer owned {name!r} when {metadata.source.folder} was saved")
            tensors = {key: tensor for key in metadata.state_keys if (tensor := reader.tensors.get((name, key)))}
            return scalars_of(metadata, name) | {key: self._read(reader, tensor) for key, tensor in tensors.items()}

    @cached_property
    def _states(self) -> LogicalReader:
        """The reader of optimizer states, without which weights can be read."""
        opened = open_checkpoint(self._opened.found, self._opened.config)
        refuse_unreadable_states(opened.metadata)
        return LogicalReader(opened.metadata, opened.config, errors={})

    def _logical(self, name: str) -> LogicalTensor:
        if name not in self._weights:
            nearest = ", ".join(difflib.get_close_matches(str(name), self._weights, n=3))
            folder = self._opened.metadata.source.folder
            raise KeyError(f"{folder} has no tensor {name!r}" + (f"; there are {nearest}" if nearest else ""))
        return self._weights[name]

    @staticmethod
    def _read(reader: LogicalReader, logical: LogicalTensor) -> torch.Tensor:
        if logical.name in reader.errors:
            raise reader.errors[logical.name]
        for note in reader.compare_copies(logical):
            logger.warning("elastic_ckpt: %s", note)
        return reader.tensor(logical)

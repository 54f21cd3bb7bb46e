"""Writes a checkpoint as a folder of ``torch.distributed.checkpoint`` (DCP), with DCP's own writer.

The layout is that of ``get_state_dict``: ``model`` by FQN, ``optim`` with ``state`` by FQN and ``param_groups``. DCP
plans with tensors that have no memory; each chunk is read when it is written.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from tqdm import tqdm

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.hyperparameters import refuse_left_in_file
from elastic_ckpt.core.metadata import ITEMSIZE, WEIGHTS, CheckpointMetadata
from elastic_ckpt.core.values import common, differing
from elastic_ckpt.errors import ElasticCkptError, listed
from elastic_ckpt.formats.pickled import open_file
from elastic_ckpt.formats.saved_config import config_section
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import progress_bar
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.conversion.contents import refuse_unconvertible
from elastic_ckpt.tools.logical import LogicalReader, Whole, plain, refuse_without_masters, scalars_of
from elastic_ckpt.tools.opened import Opened
from elastic_ckpt.tools.workplace import CONVERSION, Workplace, WriteReport, naming_os_errors, refuse_target, scratch

#: Incremented whenever the same source is converted to different bytes.
_VERSION = 2
#: Before torch 2.6, DCP saves alone where there is no process group.
_ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
_DECOUPLED = "decoupled_weight_decay"
#: Hyperparameters that Adam has, DeepSpeed's or torch's; and those of optimizers that have these too.
_ADAMS, _OTHERS = frozenset({"bias_correction", "amsgrad"}), frozenset({"max_coeff", "use_muon"})
_WITHOUT_HYPERPARAMETERS = "export its weights, or convert it to a universal checkpoint"
_NOT_CONVERTED = "lr scheduler, counters and client state have no place in this layout, and are left out"


def convert_to_dcp(
    opened: Opened,
    target: Path,
    threads: int = 4,
    chunk_nbytes: int = 32 << 20,
    progress: bool | None = None,
    restart: bool = False,
) -> WriteReport:
    """Write a DCP folder. Memory beside metadata: a few chunks, of one row at least, for each thread.

    Arguments and errors are those of :func:`elastic_ckpt.tools.conversion.convert`; an interrupted one starts anew.
    """
    target, started = target.absolute(), time.monotonic()
    refuse_target(CONVERSION, target, Path(opened.found.folder))
    metadata, config = opened.metadata, opened.config
    refuse_unconvertible(metadata, "dcp")
    refuse_without_masters(metadata)
    for number, group in enumerate(metadata.groups):
        names = (name for name, saved in metadata.parameters.items() if saved.group == number)
        refuse_left_in_file(group, names, opened.found.folder, _WITHOUT_HYPERPARAMETERS)
    load = LoadOptions.of(config)
    reader, decoupled = LogicalReader(metadata, load), _is_decoupled(opened)
    read = ReadOptions(threads=1, chunk_nbytes=chunk_nbytes, staging_nbytes=chunk_nbytes)
    facts = (_VERSION, "dcp", target.name, load.rules, config.replicated_params, config.rename, threads, chunk_nbytes)
    wholes = {path: whole for whole in reader.tensors() for path in _paths_of(whole, metadata)}
    with (
        naming_os_errors(CONVERSION, target),
        Workplace(CONVERSION, target, metadata.files, facts, restart) as place,
        progress_bar("converting", sum(whole.nbytes for whole in wholes.values()), progress) as bar,
    ):
        notes = (*metadata.notes, *reader.notes, *reader.compare_copies(read), *_notes_on(metadata, decoupled))
        planner = _ChunkPlanner(wholes, reader, read, bar)
        # without copying ahead, DCP writes each tensor before it asks for the next, which takes its memory
        writer = dcp.FileSystemWriter(place.folder, thread_count=threads, sync_files=True, per_thread_copy_ahead=0)
        try:
            with warnings.catch_warnings(), _errors_of_threads() as errors:
                warnings.simplefilter("ignore")  # of a save without a process group
                state_dict = _state_dict(wholes, metadata, decoupled)
                written = dcp.save(state_dict, storage_writer=writer, planner=planner, **_ALONE)
        except CheckpointException as error:  # which is no Exception
            raise next(iter(error.failures.values()))[0] from error
        if errors:
            raise errors[0]
        planner.refuse_unwritten({item: info.length for item, info in written.storage_data.items()}, place.folder)
        place.finish()
    files = list(target.glob("*.distcp"))
    nbytes = sum(file.stat().st_size for file in files)
    return WriteReport(str(target), len(wholes), len(files), nbytes, 0, time.monotonic() - started, notes)


@contextmanager
def _errors_of_threads() -> Iterator[list[BaseException]]:
    """What is raised on threads meanwhile: on its own, DCP loses it."""
    errors, before = list[BaseException](), threading.excepthook
    threading.excepthook = lambda raised: errors.append(raised.exc_value or raised.exc_type())
    try:
        yield errors
    finally:
        threading.excepthook = before


def _paths_of(whole: Whole, metadata: CheckpointMetadata) -> Iterator[tuple[str, ...]]:
    """Where a tensor is in the state dict; tied weights are there under each name."""
    if whole.key in WEIGHTS:
        yield "model", whole.name
        yield from (("model", alias) for alias, name in metadata.aliases.items() if name == whole.name)
    else:
        yield "optim", "state", whole.name, whole.key


def _state_dict(
    wholes: Mapping[tuple[str, ...], Whole], metadata: CheckpointMetadata, decoupled: bool | None
) -> dict[str, Any]:
    """The state dict, its large tensors without memory."""
    names: list[list[str]] = [[] for _ in metadata.groups]
    states: dict[str, dict[str, Any]] = {}
    for name, saved in metadata.parameters.items():
        names[saved.group].append(name)
        for key, value in scalars_of(metadata, name).items():
            is_number = key == "step" and not isinstance(value, torch.Tensor)  # torch counts steps in float32
            states.setdefault(name, {})[key] = torch.tensor(value, dtype=torch.float32) if is_number else value
    groups = [
        {**_defaults(values, metadata, decoupled), **plain(common(values)), "params": members}
        for values, members in zip(metadata.groups, names, strict=True)
    ]
    tree: dict[str, Any] = {"model": {}, "optim": {"state": states, "param_groups": groups}}
    for path, whole in wholes.items():
        *above, last = path
        inside = tree
        for key in above:
            inside = inside.setdefault(key, {})
        inside[last] = torch.empty(whole.shape, dtype=getattr(torch, whole.dtype), device="meta")
    return tree


def _is_decoupled(opened: Opened) -> bool | None:
    """Whether weight decay is AdamW's, by DeepSpeed's saved config, since its groups do not say; ``None``: unknown."""
    if opened.found.format in ("dcp", "safetensors"):
        return None
    section = config_section(open_file(opened.checkpoint.model_path, opened.config.trust_pickle), "optimizer")
    kind, given = str(section.get("type", "")).lower(), section.get("params")
    mode = given.get("adam_w_mode", True) if isinstance(given, Mapping) else True
    return {"adamw": True, "adam": bool(mode)}.get(kind)  # as DeepSpeedEngine._configure_basic_optimizer decides


def _defaults(values: Mapping[str, Any], metadata: CheckpointMetadata, decoupled: bool | None) -> dict[str, Any]:
    """What torch's AdamW has beside the hyperparameters of another Adam's group; nothing for other optimizers."""
    has_states = "exp_avg_sq" in metadata.state_keys and {"betas", "eps"} <= values.keys()
    if not has_states or not _ADAMS & values.keys() or _OTHERS & values.keys():
        return {}
    added = {key: value for key, value in torch.optim.AdamW([torch.zeros(1)]).defaults.items() if key not in values}
    if _DECOUPLED in added and decoupled is not None:
        added[_DECOUPLED] = decoupled
    elif values.get("weight_decay"):  # without decay, it has no effect
        added.pop(_DECOUPLED, None)
    return added


def _notes_on(metadata: CheckpointMetadata, decoupled: bool | None) -> Iterator[str]:
    yield _NOT_CONVERTED
    if own := differing([*(dict(one.scalars) for one in metadata.parameters.values()), *metadata.groups]):
        yield f"left out, since each rank has its own: {listed(own)}"
    added = [_defaults(values, metadata, decoupled) for values in metadata.groups]
    keys = set().union(*added) - (set() if decoupled is None else {_DECOUPLED})
    if keys:
        yield f"hyperparameters that the checkpoint lacks are those of torch.optim.AdamW: {listed(keys)}"
    unknown = [
        str(number)
        for number, (values, more) in enumerate(zip(metadata.groups, added, strict=True))
        if more and values.get("weight_decay") and _DECOUPLED not in {**more, **values}
    ]
    if unknown:
        yield (
            f"no file records whether weight decay of param groups {listed(unknown)} is decoupled (AdamW) or L2: "
            f"{_DECOUPLED} is left out, and dcp.load keeps the live optimizer's if allow_partial_load is set"
        )
    elif decoupled is not None and any(_DECOUPLED in more for more in added):
        yield f"{_DECOUPLED} is {decoupled}, by the optimizer in DeepSpeed's saved config"
    if any(values.get("bias_correction") is False for values in metadata.groups):
        yield "bias_correction is False, which torch.optim's Adam cannot express: it corrects the bias"
    stateful = {name for name, key in metadata.tensors if key in metadata.state_keys}
    without = [name for name in metadata.parameters if metadata.state_keys and name not in stateful]
    if without:
        yield f"no optimizer states (dcp.load asks for them unless allow_partial_load is set): {listed(without)}"


class _ChunkPlanner(dcp.DefaultSavePlanner):
    """Plans tensors in chunks of rows, and reads each when DCP writes it, on DCP's threads."""

    def __init__(
        self, wholes: Mapping[tuple[str, ...], Whole], reader: LogicalReader, options: ReadOptions, bar: tqdm[Any]
    ) -> None:
        super().__init__()
        self._wholes, self._reader, self._options, self._bar = wholes, reader, options, bar
        self._of_thread = threading.local()
        self._error: Exception | None = None

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._parts(item)])
        return self.plan

    def _whole(self, item: WriteItem) -> Whole | None:
        return self._wholes.get(tuple(map(str, self.mappings[item.index.fqn])))

    def _parts(self, item: WriteItem) -> Iterator[WriteItem]:
        whole, data = self._whole(item), item.tensor_data
        if whole is None or data is None or whole.nbytes <= self._options.chunk_nbytes or not whole.shape:
            yield item
            return
        step = max(whole.shape[0] * self._options.chunk_nbytes // whole.nbytes, 1)
        for first in range(0, whole.shape[0], step):
            offsets = torch.Size((first, *(0 for _ in whole.shape[1:])))
            sizes = torch.Size((min(step, whole.shape[0] - first), *whole.shape[1:]))
            chunk = TensorWriteData(ChunkStorageMetadata(offsets, sizes), data.properties, data.size)
            yield WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=chunk)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of an item. DCP loses the errors of its threads, so that the first is kept here."""
        whole, data = self._whole(write_item), write_item.tensor_data
        if whole is None or data is None:
            return super().resolve_data(write_item)
        try:
            return self._read(whole, data.chunk)
        except Exception as error:
            self._error = self._error or error
            raise

    def _read(self, whole: Whole, chunk: ChunkStorageMetadata) -> torch.Tensor:
        # DCP keeps references to tensors that it has written: all of a thread share one storage
        storage = self._of_thread.__dict__.setdefault("storage", torch.empty(0).untyped_storage())
        numel, dtype = math.prod(chunk.sizes), getattr(torch, whole.dtype)
        storage.resize_(numel * dtype.itemsize)
        values: torch.Tensor = torch.empty(0, dtype=dtype).set_(storage, 0, chunk.sizes)  # type: ignore[call-overload]
        if values.numel():
            first = chunk.offsets[0] * (whole.numel // whole.shape[0]) if whole.shape else 0
            buffer = scratch(values.nbytes).view(values.dtype)  # what numpy has seen cannot be resized
            self._reader.read(whole, FlatRange(first, first + values.numel()), buffer, self._options)
            values.view(-1).copy_(buffer)
        self._bar.update(values.nbytes)
        return values

    def refuse_unwritten(self, written: Mapping[MetadataIndex, int], folder: Path) -> None:
        """Raise the error of a thread; :class:`ElasticCkptError` if DCP lost it, or wrote an item without its bytes."""
        if self._error is not None:
            raise self._error
        whole = [item for item in self.plan.items if written.get(item.index, -1) >= self._nbytes(item)]
        if len(whole) != len(self.plan.items):
            raise ElasticCkptError(
                "DCP's writer did not write all items of the conversion",
                file=str(folder),
                expected=f"{len(self.plan.items)} items",
                found=f"{len(whole)}; the errors of its threads are above",
                remedy="make room on the disk, and give the same command again",
            )

    def _nbytes(self, item: WriteItem) -> int:
        whole, data = self._whole(item), item.tensor_data
        return 0 if whole is None or data is None else math.prod(data.chunk.sizes) * ITEMSIZE[whole.dtype]

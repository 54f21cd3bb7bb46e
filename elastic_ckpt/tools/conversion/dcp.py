"""Writes a checkpoint as a folder of ``torch.distributed.checkpoint`` (DCP), with DCP's own writer.

The layout is that of ``get_state_dict``: ``model`` by FQN, ``optim`` with ``state`` by FQN and ``param_groups``. DCP
plans with tensors that have no memory; each is read when it is written.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from elastic_ckpt.core.extra_states import left_out_note
from elastic_ckpt.core.metadata import WEIGHTS, CheckpointMetadata
from elastic_ckpt.core.values import common, differing
from elastic_ckpt.errors import ElasticCkptError, listed
from elastic_ckpt.formats.pickled import open_file
from elastic_ckpt.formats.saved_config import config_section
from elastic_ckpt.report import progress_bar
from elastic_ckpt.tools.conversion import refuse_unconvertible
from elastic_ckpt.tools.conversion.states import replicated_states
from elastic_ckpt.tools.logical import LogicalReader, LogicalTensor, plain, scalars_of
from elastic_ckpt.tools.module_files import refuse_lost_entries
from elastic_ckpt.tools.opened import OpenedCheckpoint
from elastic_ckpt.tools.output_folder import WriteReport, output_folder

#: Before torch 2.6, DCP saves alone where there is no process group.
_ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
#: Hyperparameters of optimizers with those of Adam that are none: LAMB and Muon.
_OTHERS = frozenset({"max_coeff", "use_muon"})


def convert_to_dcp(opened: OpenedCheckpoint, target: Path, progress: bool | None = None) -> WriteReport:
    """Write a DCP folder. Memory beside metadata: the largest tensor, twice. Errors are those of ``convert``."""
    target = target.absolute()
    started = time.monotonic()
    metadata = opened.metadata
    refuse_unconvertible(metadata, "dcp")
    refuse_lost_entries(opened)
    reader = LogicalReader(metadata, opened.config)
    adamw = _adamw_of(opened)
    tensors = {path: tensor for tensor in reader.tensors.values() for path in _paths_of(tensor, metadata)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with (
        output_folder(target, opened.found.folder, metadata.files) as place,
        progress_bar("converting", nbytes, progress) as bar,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of a save without a process group
        notes = (*metadata.notes, *reader.notes, *reader.compare_copies(), *_notes_on(metadata, adamw))
        notes += left_out_note(metadata.extra_states)
        planner = _Planner(tensors, reader, bar.update)
        # without copying ahead, DCP writes each tensor before it asks for the next; other threads would lose errors
        writer = dcp.FileSystemWriter(place, thread_count=1, sync_files=False, per_thread_copy_ahead=0)
        try:
            state_dict = _state_dict(tensors, metadata, adamw, replicated_states(metadata, reader.options))
            written = dcp.save(state_dict, storage_writer=writer, planner=planner, **_ALONE)
        except CheckpointException as error:  # which is no Exception
            raise next(iter(error.failures.values()))[0] from error
        planner.refuse_unwritten({item: info.length for item, info in written.storage_data.items()}, place)
    return WriteReport(str(target), len(tensors), 1, nbytes, time.monotonic() - started, notes)


def _paths_of(tensor: LogicalTensor, metadata: CheckpointMetadata) -> Iterator[tuple[str, ...]]:
    """Where a tensor is in the state dict; tied weights are there under each name."""
    if tensor.key in WEIGHTS:
        yield "model", tensor.name
        yield from (("model", alias) for alias in metadata.aliases_of.get(tensor.name, ()))
    else:
        yield "optim", "state", tensor.name, tensor.key


def _state_dict(
    tensors: Mapping[tuple[str, ...], LogicalTensor],
    metadata: CheckpointMetadata,
    adamw: Mapping[str, Any],
    replicated: Mapping[str, Mapping[str, torch.Tensor]],
) -> dict[str, Any]:
    """The state dict, its large tensors without memory."""
    names: list[list[str]] = [[] for _ in metadata.groups]
    states: dict[str, dict[str, Any]] = {}
    for name, saved in metadata.parameters.items():
        names[saved.group].append(name)
        for key, value in scalars_of(metadata, name).items():
            is_number = key == "step" and not isinstance(value, torch.Tensor)  # torch counts steps in float32
            states.setdefault(name, {})[key] = torch.tensor(value, dtype=torch.float32) if is_number else value
        if name in replicated:  # an entry without states would be one of an optimizer that has lost them
            states.setdefault(name, {}).update(replicated[name])
    groups = [
        {**_lacking(values, adamw), **plain(common(values)), "params": members}
        for values, members in zip(metadata.groups, names, strict=True)
    ]
    tree: dict[str, Any] = {"model": {}}
    if groups:  # of weights alone there are none
        tree["optim"] = {"state": states, "param_groups": groups}
    for (*above, last), tensor in tensors.items():
        inside = tree
        for key in above:
            inside = inside.setdefault(key, {})
        inside[last] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
    return tree


def _adamw_of(opened: OpenedCheckpoint) -> dict[str, Any]:
    """Hyperparameters of torch's AdamW where DeepSpeed's saved config names its Adam, whose groups lack some.

    Empty for an optimizer that the script made: no file says whether its weight decay is AdamW's.
    """
    if opened.found.foreign:
        return {}
    section = config_section(open_file(opened.checkpoint.model_path, opened.config.trust_pickle), "optimizer")
    kind = str(section.get("type", "")).lower()
    given = section.get("params")
    mode = given.get("adam_w_mode", True) if isinstance(given, Mapping) else True
    decoupled = {"adamw": True, "adam": bool(mode)}.get(kind)  # as DeepSpeedEngine._configure_basic_optimizer decides
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    return {} if decoupled is None else {**defaults, "decoupled_weight_decay": decoupled}


def _lacking(values: Mapping[str, Any], adamw: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group of Adam lacks of ``adamw``; nothing for other optimizers."""
    is_adam = {"betas", "eps"} <= values.keys() and _OTHERS.isdisjoint(values)
    return {key: value for key, value in adamw.items() if key not in values} if is_adam else {}


def _notes_on(metadata: CheckpointMetadata, adamw: Mapping[str, Any]) -> Iterator[str]:
    yield "lr scheduler, counters and client state have no place in this layout, and are left out"
    if own := differing([*(dict(one.scalars) for one in metadata.parameters.values()), *metadata.groups]):
        yield f"left out, since each rank has its own: {listed(own)}"
    known = adamw or torch.optim.AdamW([torch.zeros(1)]).defaults
    if keys := set().union(*(_lacking(values, known) for values in metadata.groups)):
        if adamw:
            yield f"hyperparameters that the checkpoint lacks are those of torch.optim.AdamW: {listed(keys)}"
        else:
            yield f"left out, since no file records them (dcp.load needs allow_partial_load): {listed(keys)}"
    if any(values.get("bias_correction") is False for values in metadata.groups):
        yield "bias_correction is False, which torch.optim's Adam cannot express: it corrects the bias"
    stateful = {name for name, key in metadata.tensors if key in metadata.state_keys}
    without = [name for name in metadata.parameters if metadata.state_keys and name not in stateful]
    if without:
        yield f"no optimizer states (dcp.load asks for them unless allow_partial_load is set): {listed(without)}"


class _Planner(dcp.DefaultSavePlanner):
    """Reads each tensor when DCP writes it."""

    def __init__(
        self, tensors: Mapping[tuple[str, ...], LogicalTensor], reader: LogicalReader, advance: Callable[[int], object]
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._reader = reader
        self._advance = advance
        self._last = torch.empty(0)

    def _logical(self, item: WriteItem) -> LogicalTensor | None:
        path = tuple(map(str, self.mappings[item.index.fqn]))
        return None if item.tensor_data is None else self._tensors.get(path)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of an item. DCP keeps references to tensors that it has written: their memory is freed here."""
        logical = self._logical(write_item)
        if logical is None:
            return super().resolve_data(write_item)
        self._last.untyped_storage().resize_(0)
        values = self._reader.tensor(logical)
        self._last = torch.empty_like(values).copy_(values)  # a storage that numpy has seen cannot be freed
        self._advance(logical.nbytes)
        return self._last

    def refuse_unwritten(self, written: Mapping[MetadataIndex, int], folder: Path) -> None:
        """Raise :class:`ElasticCkptError` if DCP left out an item, or wrote one without its bytes."""
        items = [(item.index, self._logical(item)) for item in self.plan.items]
        lost = [
            index for index, logical in items if written.get(index, -1) < (0 if logical is None else logical.nbytes)
        ]
        if lost:
            names = listed(index.fqn for index in lost)
            raise ElasticCkptError("DCP's writer did not write these items", file=str(folder), found=names)

"""Reads folders of ``torch.distributed.checkpoint`` (DCP), as FSDP2, torchtitan and Megatron Core save them.

Their tensors are whole ones, whatever mesh cut them: a chunk is a box of the tensor. Model weights are the masters.
Counters follow from the optimizer's step, and what has no home in a DeepSpeed engine is in the client state.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_ckpt.core.chunks import Box, boxed
from elastic_ckpt.core.metadata import (
    FROZEN,
    ITEMSIZE,
    MASTER,
    WEIGHTS,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    TensorMetadata,
    is_floating,
)
from elastic_ckpt.core.state_kinds import MOMENTS, REPLICATED, StateOptions
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.values import TensorValue, TrainingState
from elastic_ckpt.errors import WITHOUT_STATES, ElasticCkptError, MismatchError, Remedy, UnsupportedError, listed
from elastic_ckpt.formats.base import CheckpointInfo, Fitted, FolderReading, MetadataOptions, Once, OpenFile
from elastic_ckpt.formats.classification import FRESH
from elastic_ckpt.formats.dcp_entries import (
    SAVE_ALONE,
    CommonState,
    Entries,
    GroupKey,
    read_common_state,
    sort_entries,
    sort_megatron_entries,
    unstacked,
)
from elastic_ckpt.formats.dcp_metadata import DcpContents, DcpFile, read_dcp_file, read_dcp_metadata
from elastic_ckpt.formats.known_states import (
    check_key,
    check_master,
    check_scalars,
    check_shapes,
    check_tensor,
    check_value,
)
from elastic_ckpt.formats.metadata_builder import MetadataBuilder
from elastic_ckpt.formats.naming import DCP_METADATA
from elastic_ckpt.formats.saved_states import ELEMENTWISE_NAMES

#: Key of the client state for what has no home in a DeepSpeed engine.
CLIENT_KEY = "dcp"
_STEP = "step"
#: Seconds by which clocks of nodes may differ.
_MOST_SKEW = 60.0
_NEWER = (
    "files of {} are newer than its .metadata, which a save writes last: a later save into it did not finish, so that "
    "values of two steps are mixed, or copying changed the times: {}"
)
#: In the names of extra states, those of Transformer Engine for example.
_EXTRA_STATE = "._extra_state"


def dcp_reading(found: CheckpointInfo, options: MetadataOptions, once: Once) -> FolderReading:
    """How to read a DCP folder, of which one rank reads ``.metadata``."""

    def read_contents() -> tuple[DcpContents, CommonState | None]:
        contents = read_dcp_metadata(found.folder)
        common = read_common_state(found.folder, options.trust_pickle)
        return (contents if common is None else unstacked(contents, found.path(DCP_METADATA))), common

    contents, common = once(read_contents)
    if common is None:
        entries = sort_entries(contents, found.folder, options.with_states)
    else:
        entries = sort_megatron_entries(contents, found.folder)
    groups = frozenset(entry for group in entries.groups.values() for entry in group.values())
    tensors = contents.tensors
    names = list(contents.files)
    # small entries, beside hyperparameters: scalar states, and the client state's objects
    states = {entry for entry in entries.states.values() if entry not in tensors or not tensors[entry][1]}
    replicated = _replicated_keys(entries, contents, options.states)
    states |= {entry for (_, key), entry in entries.states.items() if key in replicated}
    others = {entry for entry in entries.others if entry not in tensors and _EXTRA_STATE not in entry}
    wanted = groups | states | (others if options.with_client_state else set())

    def read(position: int, _: OpenFile) -> DcpFile:
        name = names[position]
        return read_dcp_file(found.path(name), name, contents, wanted, groups, options.trust_pickle)

    def fit(files: Sequence[DcpFile], *_: Any) -> Fitted:
        builder = _Builder(found, contents, entries, files, options, common or CommonState())
        return Fitted(builder.of_entries(), found.path(DCP_METADATA), builder.training_state())

    return FolderReading(len(names), lambda position: found.path(names[position]), read, fit)


def _replicated_keys(entries: Entries, contents: DcpContents, options: StateOptions) -> frozenset[str]:
    """States that are one tensor for all parameters, as the user says by their names, or by their size."""
    shapes: dict[str, list[tuple[Shape, Shape]]] = {}
    for (name, key), entry in entries.states.items():
        if entry in contents.tensors and name in entries.weights and contents.tensors[entry][1]:
            own = contents.tensors[entries.weights[name]][1]
            shapes.setdefault(key, []).append((contents.tensors[entry][1], own))
    found = {key for key in shapes if options.layout(key) == REPLICATED}
    for key in shapes.keys() - options.schema.keys() - ELEMENTWISE_NAMES:
        is_small = max(math.prod(shape) for shape, _ in shapes[key]) <= options.max_numel
        is_elementwise = all(own in (shape, shape[1:]) for shape, own in shapes[key])
        if is_small and not is_elementwise and len({shape for shape, _ in shapes[key]}) == 1:
            found.add(key)
    return frozenset(found)


class _Builder(MetadataBuilder):
    """Builds metadata and training state from what ``.metadata`` lists and what is in the files."""

    def __init__(
        self,
        found: CheckpointInfo,
        contents: DcpContents,
        entries: Entries,
        files: Sequence[DcpFile],
        options: MetadataOptions,
        common: CommonState,
    ) -> None:
        super().__init__(found, files, options.counting_states)
        self._contents = contents
        self._entries = entries
        self._common = common
        self._with_states = options.with_states
        self._with_client_state = options.with_client_state
        self._fresh = frozenset(key for key, word in options.states.schema.items() if word == FRESH)
        self.opaque = {key: why for key, why in entries.opaque.items() if key not in self._fresh}
        self._values = {name: value for file in files for name, value in file.values.items()}
        newer = [os.path.basename(each.path) for each in files if each.written_at > contents.written_at + _MOST_SKEW]
        self._warnings = [_NEWER.format(found.folder, listed(newer))] if newer else []
        self._boxes: dict[str, list[Box]] = {}
        self._file_of: dict[str, str] = {}
        for number, (file, items) in enumerate(zip(files, contents.files.values(), strict=True)):
            for item, byte_offset in zip(items, file.byte_offsets, strict=True):
                self._file_of.setdefault(item.name, os.path.basename(file.path))
                if item.sizes is not None and 0 not in item.sizes:
                    box = Box(item.offsets, item.sizes, number, byte_offset)
                    self._boxes.setdefault(item.name, []).append(box)
        self._scalars: dict[str, dict[str, Any]] = {}
        self._replicated_keys = _replicated_keys(entries, contents, options.states)
        self._replicated: dict[str, list[ReplicatedState]] = {}

    def of_entries(self) -> CheckpointMetadata:
        """The metadata; which of the untrained weights are buffers, the live model tells."""
        weights = self._entries.weights
        states = self._entries.states
        members, groups = self._groups()
        for name, entry in weights.items():
            key = MASTER if name in members else FROZEN
            if key == MASTER:
                check_master(self._path_of(entry), *self._contents.tensors[entry], name)
            self.tensors.add({(name, key): self._tensor(name, key, entry)})
        known = {place: entry for place, entry in states.items() if place[0] in members and place[1] not in self._fresh}
        self._check_states({place: entry for place, entry in known.items() if self._with_states or place[1] == _STEP})
        for (name, key), entry in known.items():
            self._add_state(name, key, entry)
        if self._common.step is not None:
            step = TensorValue("float32", (), (self._common.step,))
            self._scalars = {name: {_STEP: step} for name, _ in states}
        for name, group in members.items():
            shape = self._shape_of(name)
            scalars = self._scalars.get(name, {})
            replicated = tuple(self._replicated.get(name, ()))
            self.parameters[name] = SavedParameter(shape, group, tuple(sorted(scalars.items())), replicated)
        # of weights alone, which are trained is not known
        dtypes = {self._contents.tensors[weights[name]][0] for name in members or weights}
        self.notes += self._notes(set(filter(is_floating, dtypes)))
        facts = self._found.source(0, 1, files=len(self._files))
        metadata = self.metadata(facts, groups, self._warnings, run=self._common.run)
        return replace(metadata, states=replace(metadata.states, fresh=self._fresh))

    def training_state(self) -> TrainingState:
        """Counters by the optimizer's step, and objects without a home. After :meth:`of_entries`."""
        steps = max((float(scalars.get(_STEP, 0)) for scalars in self._scalars.values()), default=0)
        common = self._common
        client: dict[str, Any] = {**common.others} if self._with_client_state else {}
        for entry in self._entries.others:
            if entry in self._values and not isinstance(self._values[entry], ElasticCkptError):
                *above, last = self._contents.paths[entry]
                inside: dict[Any, Any] = client
                for key in above:
                    inside = inside.setdefault(key, {})
                inside[last] = self._values[entry]
        state = TrainingState.after(common.iteration or steps, checkpoint={CLIENT_KEY: client} if client else {})
        samples = {} if common.samples is None else {"global_samples": common.samples}
        return replace(state, counters={**state.counters, **samples})

    def _groups(self) -> tuple[dict[str, int], list[Mapping[str, Any]]]:
        """:meth:`_groups_of`; without states, the names of states are enough."""
        try:
            return self._groups_of(self._entries.groups)
        except ElasticCkptError:
            if self._with_states:
                raise
        return self._groups_of({})

    def _groups_of(self, saved: Mapping[GroupKey, Mapping[str, str]]) -> tuple[dict[str, int], list[Mapping[str, Any]]]:
        """The param group of each trained parameter, and their hyperparameters; those saved by parameter are merged."""
        weights = self._entries.weights
        members = dict[str, int]()
        groups = list[Mapping[str, Any]]()
        by_text: dict[str, int] = {}  # numbers of groups; what is equal has one text: not each is compared with all
        for (_, key), entries in saved.items():
            for value in map(self._values.__getitem__, entries.values()):
                if isinstance(value, ElasticCkptError):
                    raise value
            values = {name: value for name, entry in entries.items() for value in self._values[entry].values()}
            names = values.pop("params", None if isinstance(key, int) else [key])
            if not isinstance(names, list) or not all(type(name) is str and name in weights for name in names):
                problem = "a param group of a torch.distributed.checkpoint folder does not list its parameters by name"
                both = "names of the model's parameters, as get_state_dict saves them", f"{names!r}"[:200]
                remedy = Remedy("save the state dict of get_state_dict"), WITHOUT_STATES
                raise UnsupportedError(problem, self._found.folder, *both, remedy=remedy)
            number = (
                len(groups) if isinstance(key, int) else by_text.setdefault(repr(sorted(values.items())), len(groups))
            )
            if number == len(groups):
                groups.append(values)
            if twice := sorted(members.keys() & set(names)):
                problem = "two param groups of this torch.distributed.checkpoint folder have one parameter"
                where = self._found.folder, "each parameter in one of them"
                raise MismatchError(problem, *where, parameter=twice, remedy=SAVE_ALONE)
            members |= dict.fromkeys(names, number)
        stateful = [name for name, _ in self._entries.states if name not in members]
        alone = self._common.groups if len(self._common.groups) == 1 else [{}] * bool(stateful)
        return members | dict.fromkeys(stateful, len(groups)), [*groups, *alone]

    def _tensor(self, name: str, key: str, entry: str, has_own_shape: bool = False) -> TensorMetadata:
        dtype, shape = self._contents.tensors[entry]
        source = boxed(shape, ITEMSIZE[dtype], tuple(self._boxes.get(entry, ())))
        return TensorMetadata(name, key, shape, dtype, (source,), has_own_shape)

    def _add_state(self, name: str, key: str, entry: str) -> None:
        """A tensor of the parameter's shape (or planes of it), a number, or a tensor of another shape."""
        dtype, shape = self._contents.tensors.get(entry, ("", None))
        own = self._shape_of(name)
        if key in self._replicated_keys and shape:
            self._add_replicated(name, key, entry)
        elif shape is None or (shape == () and (own or key == _STEP)):
            value = self._values[entry]
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number or value is None:  # None: a buffer that is not used
                self._scalars.setdefault(name, {})[key] = TensorValue(dtype, (), (value,)) if dtype else value
            else:
                self.opaque[key] = f"an object of type {type(value).__name__}"
        elif key in WEIGHTS or not is_floating(dtype):
            self.opaque[key] = f"{dtype} of shape {shape}"
        else:
            tensor = self._tensor(name, key, entry, has_own_shape=own not in (shape, shape[1:]))
            self.tensors.add({(name, key): tensor})

    def _check_states(self, states: Mapping[tuple[str, str], str]) -> None:
        """Raise :class:`DamagedError` for states that no optimizer keeps."""
        moments: dict[str, dict[str, Shape]] = {}
        for (name, key), entry in states.items():
            self._check_state(name, key, entry)
            if entry in self._contents.tensors and key in MOMENTS and key not in self.opaque:
                moments.setdefault(name, {})[key] = self._contents.tensors[entry][1]
        for name, shapes in moments.items():
            path = self._path_of(states[name, next(iter(shapes))])
            check_shapes(path, shapes, self._shape_of(name), self._options, name)

    def _check_state(self, name: str, key: str, entry: str) -> None:
        """Raise :class:`DamagedError` for what no optimizer keeps under such a name."""
        path = self._path_of(entry)
        options = self._options
        value = self._values.get(entry)
        if isinstance(value, ElasticCkptError):
            raise value
        check_key(path, key, options, name)
        if entry not in self._contents.tensors:
            check_value(path, key, value, options, name)
            return
        dtype, shape = self._contents.tensors[entry]
        check_tensor(path, key, dtype, shape, options, name)
        if shape == () and value is not None:
            check_value(path, key, TensorValue(dtype, (), (value,)), options, name)
            if self._shape_of(name):
                check_scalars(path, [(key, value)], options, name)

    def _shape_of(self, name: str) -> Shape:
        """The shape of a parameter."""
        return self._contents.tensors[self._entries.weights[name]][1]

    def _path_of(self, entry: str) -> str:
        """The file of an entry, the first one of several."""
        return self._found.path(self._file_of.get(entry, DCP_METADATA))

    def _add_replicated(self, name: str, key: str, entry: str) -> None:
        """A state that is never sharded, which one file has whole."""
        import torch  # noqa: PLC0415  for these alone

        (dtype, shape) = self._contents.tensors[entry]
        value = self._values.get(entry)
        boxes = self._boxes.get(entry, [])
        if len(boxes) != 1 or not isinstance(value, torch.Tensor):
            self.opaque[key] = f"{dtype} of shape {shape} in {len(boxes)} parts, for a state that is never sharded"
            return
        crc32 = zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        found = ReplicatedState(key, dtype, shape, boxes[0].file, boxes[0].byte_offset, crc32)
        self._replicated.setdefault(name, []).append(found)

    def _notes(self, dtypes: set[str]) -> Iterator[str]:
        others = self._entries.others
        values = self._values
        unread = {entry: values[entry] for entry in others if isinstance(values.get(entry), ElasticCkptError)}
        yield from (f"not read: {entry} ({error.problem}: {error.found})" for entry, error in unread.items())
        client = f"in the client state under {CLIENT_KEY!r}"
        lists = {
            f"no part of a DeepSpeed engine, {client}": {each for each in others if each in values} - unread.keys(),
            "tensors of neither model nor optimizer, not restored": set(others) & self._contents.tensors.keys(),
            "extra states of modules, not restored": {entry for entry in others if _EXTRA_STATE in entry},
            f"of common.pt, {client}": self._common.others,
            "the optimizer's masters are the model's weights, in": dtypes - {"float32"},
        }
        yield from (f"{what}: {listed(names)}" for what, names in lists.items() if names)
        if not self._scalars:
            yield "no optimizer's step is recorded: the counters start from zero"
        if len(self._common.groups) > 1:
            yield "common.pt does not record the members of its param groups, whose hyperparameters are not restored"

"""Checkpoints without ZeRO partitions -> CheckpointMetadata.

The optimizer numbers its parameters and names none: :mod:`elastic_ckpt.formats.zero0_names` finds the names. Where
masters lie beside the weights, their values are compared too (:mod:`elastic_ckpt.formats.spot_check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    MASTER,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    StorageChunk,
    TensorMetadata,
)
from elastic_ckpt.core.state_kinds import COMPANIONS, ELEMENTWISE, REPLICATED, Codebook, StateOptions
from elastic_ckpt.errors import MismatchError, UnsupportedError
from elastic_ckpt.formats.base import Found, MetadataOptions, source_file
from elastic_ckpt.formats.classify import DAMAGED, ELEMENTWISE_NAMES, FRESH, OPAQUE, Held, SavedKind, classify
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.module_tensors import module_tensors
from elastic_ckpt.formats.pickled import TensorRef
from elastic_ckpt.formats.saved_groups import normal_groups, with_group_step
from elastic_ckpt.formats.saved_states import StatesOfOne, block_code, kind_notes, resolve_codebooks, unmatched_names
from elastic_ckpt.formats.zero0_index import FUSED, PLAIN, UnpartitionedState
from elastic_ckpt.formats.zero0_names import member_names

Shape = tuple[int, ...]


def unpartitioned_metadata(found: Found, model: ModelShard, options: MetadataOptions) -> CheckpointMetadata:
    """The metadata of a checkpoint whose optimizer state is whole; without a live engine, of its weights if need be.

    Args:
        found: the folder.
        model: its model-states file.
        options: how to read, live names among them.

    Raises:
        MismatchError: it cannot be told which parameter is which, and there are live groups, or states are asked for.
    """
    state = model.optimizer
    assert state is not None
    try:
        names, note = member_names(model, state, options)
    except MismatchError:
        if options.with_states or options.live_groups:
            raise
        return weights_alone(found, model)
    codebooks, map_notes = resolve_codebooks((model.path, states) for states in state.states.values())
    builder = _Builder(model, state, codebooks, options.states)
    for number, members in enumerate(names):
        builder.add_group(number, members)
    whole, notes = module_tensors([model], 0, frozenset(builder.parameters))
    return CheckpointMetadata(
        source=SourceFacts(
            "native", found.folder, found.tag, 0, int(model.counters["dp_world_size"]), model.ds_version
        ),
        files=(source_file(model),),
        parameters=builder.parameters,
        tensors={**builder.tensors, **whole},
        groups=normal_groups(state.groups, is_bitsandbytes=bool(codebooks)),
        aliases=model.shared,
        opaque_states=builder.opaque,
        damaged_states=builder.damaged,
        fresh_states=frozenset(key for key, kind in builder.kinds.items() if kind.kind == FRESH),
        scalar_forms=builder.scalar_forms,
        frozen_recorded=model.frozen_recorded,
        notes=(*found.notes, *notes, *note, *map_notes, *kind_notes(builder.kinds)),
        warnings=unmatched_names(builder.kinds, options.states),
    )


def weights_alone(found: Found, model: ModelShard) -> CheckpointMetadata:
    """The metadata of the weights as the module has them; those of a pipeline lie in the files of its layers."""
    dp = int(model.counters["dp_world_size"])
    tensors, notes = module_tensors([model], 0, frozenset())
    return CheckpointMetadata(
        source=SourceFacts("native", found.folder, found.tag, 0, dp, model.ds_version),
        files=(source_file(model),),
        parameters={},
        tensors=tensors,
        groups=(),
        aliases=model.shared,
        frozen_recorded=False,
        notes=found.notes + notes,
    )


class _Builder:
    """Collects parameters and logical tensors, group by group."""

    def __init__(
        self, model: ModelShard, state: UnpartitionedState, codebooks: Mapping[str, Codebook], options: StateOptions
    ) -> None:
        self._model = model
        self._state = state
        self._codebooks = codebooks
        self._options = options
        self.parameters: dict[str, SavedParameter] = {}
        self.tensors: dict[tuple[str, str], TensorMetadata] = {}
        self.opaque: dict[str, str] = {}
        self.damaged: dict[str, str] = {}
        self.scalar_forms: dict[str, str] = {}
        self.kinds: dict[str, SavedKind] = {}

    def add_group(self, group: int, members: Sequence[str | None]) -> None:
        offset = 0
        for position, name in enumerate(members):
            if name is None:
                continue
            shape = self._model.weights[name].shape
            if self._state.kind == FUSED:
                number, base = self._state.members[group][0], offset
                master = self._state.masters[group][0]
                held = master.shape
            else:
                number, base, held = self._state.members[group][position], 0, shape
                plain = self._state.kind == PLAIN
                master = self._model.weights[name] if plain else self._state.masters[group][position]
            self._add_tensor(name, MASTER, shape, master, base)
            states = self._state.states.get(number, StatesOfOne({}))
            self.parameters[name] = self._parameter(name, group, shape, states, base, held)
            offset += math.prod(shape)
        if self._state.kind == PLAIN and _is_fused_adam(self._state.groups[group]):
            self._use_last_step([name for name in members if name is not None])

    def _use_last_step(self, members: Sequence[str]) -> None:
        """FusedAdam counts the steps of a whole group in the state of its last tensor alone (fused_adam.py)."""
        stateful = [name for name in members if self.parameters[name].scalars]
        counts = self.parameters[stateful[-1]].scalars if stateful else ()
        for name in stateful:
            saved = self.parameters[name]
            self.parameters[name] = replace(saved, scalars=counts, own_step=dict(saved.scalars).get("step"))

    def _parameter(
        self, name: str, group: int, shape: Shape, states: StatesOfOne, base: int, held: Shape
    ) -> SavedParameter:
        """Adds the states of one parameter, inside tensors of shape ``held``."""
        skipped = {key for key, word in self._options.schema.items() if word == FRESH}
        self.opaque.update({key: what for key, what in states.opaque.items() if key not in skipped})
        scalars = dict(states.scalars)
        if held == ():
            for key in ELEMENTWISE_NAMES & set(states.points):
                del scalars[key]
                self._add_tensor(name, key, shape, states.points[key], base)
        replicated = []
        for key, kind in self._classify(states, held).items():
            ref = states.tensors[key]
            if kind.kind == REPLICATED:
                digest = states.digests.get(key)
                crc32 = 0 if digest is None else digest.crc32
                replicated.append(ReplicatedState(key, ref.dtype, ref.shape, 0, ref.byte_offset, crc32, digest is None))
            elif kind.kind == OPAQUE and self._state.kind != FUSED and key not in COMPANIONS:
                self._add_tensor(name, key, ref.shape, ref, 0, is_whole=True)
            elif kind.kind == OPAQUE:
                self.opaque[key] = kind.why
            elif kind.kind == DAMAGED:
                self.damaged[key] = f"{kind.why} ({name})"
            elif kind.kind == ELEMENTWISE:
                self._add_elementwise(name, key, shape, states, kind, base, math.prod(held))
        self.scalar_forms.update(states.scalar_forms)
        counted = with_group_step(tuple(sorted(scalars.items())), bool(states.tensors), self._state.groups[group])
        return SavedParameter(shape, group, counted, tuple(replicated))

    def _classify(self, states: StatesOfOne, held: Shape) -> dict[str, SavedKind]:
        numel = math.prod(held)
        flat = {key: _Flat(_flattened(ref.shape, held), ref.dtype) for key, ref in states.tensors.items()}
        kinds = classify([Held(self._model.path, numel, -1, flat, states.digests)], self._options)
        self.kinds.update(kinds)
        return kinds

    def _add_elementwise(
        self, name: str, key: str, shape: Shape, states: StatesOfOne, kind: SavedKind, base: int, held_numel: int
    ) -> None:
        """A state of ``rows`` rows of ``held_numel`` elements, in each of which the parameter starts at ``base``."""
        ref = states.tensors[key]
        if kind.rows == 1 and not kind.block_numel:
            self._add_tensor(name, key, shape, ref, base)
            return
        self._refuse_view(name, key, ref)
        numel, chunks = math.prod(shape), []
        for row in range(kind.rows):
            offset = ref.byte_offset + (row * held_numel + base) * ITEMSIZE[ref.dtype]
            code = block_code(key, kind, states, self._codebooks, row, held_numel, base)
            chunks.append(StorageChunk(FlatRange(row * numel, (row + 1) * numel), 0, offset, code))
        rows = (kind.rows,) if kind.rows > 1 else ()
        self.tensors[name, key] = TensorMetadata(name, key, rows + shape, ref.dtype, tuple(chunks) if numel else ())

    def _add_tensor(self, name: str, key: str, shape: Shape, ref: TensorRef, base: int, is_whole: bool = False) -> None:
        self._refuse_view(name, key, ref)
        numel = math.prod(shape)
        offset = ref.byte_offset + base * ITEMSIZE[ref.dtype]
        chunks = (StorageChunk(FlatRange(0, numel), 0, offset),) if numel else ()
        self.tensors[name, key] = TensorMetadata(name, key, shape, ref.dtype, chunks, is_whole)

    def _refuse_view(self, name: str, key: str, ref: TensorRef) -> None:
        if not ref.is_contiguous:
            raise UnsupportedError(
                f"{key} of this parameter was saved as a view that is not contiguous, which is not supported yet",
                parameter=name,
                file=self._model.path,
                expected="a contiguous tensor",
                found=f"shape {ref.shape}, strides {ref.stride}",
                remedy="load at the topology it was saved with",
            )


@dataclass(frozen=True, slots=True)
class _Flat:
    """A state's tensor as classification sees it: of a flattened parameter."""

    shape: Shape
    dtype: str


def _flattened(shape: Shape, held: Shape) -> Shape:
    """The shape of a state beside a flattened parameter of shape ``held``."""
    if shape == held:
        return (math.prod(held),)
    if len(held) > 0 and shape[1:] == held:
        return (shape[0], math.prod(held))
    # its last dimension may be as long as the parameter by chance, and it is another tensor all the same
    return (*shape, 1) if len(shape) > 1 else shape


def _is_fused_adam(group: Mapping[str, object]) -> bool:
    """DeepSpeed's FusedAdam, by its hyperparameters: the checkpoint does not name the class.

    It alone keeps a ``step`` of 0 in each group beside those of its tensors; its Lamb uses the step of each tensor.
    """
    return "bias_correction" in group and not {"amsgrad", "max_coeff"} & group.keys() and group.get("step") == 0

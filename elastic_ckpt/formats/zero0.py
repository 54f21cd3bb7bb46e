"""Checkpoints without ZeRO partitions -> Catalog.

The optimizer numbers its parameters and names none: :mod:`elastic_ckpt.formats.zero0_names` finds the names. Where
masters lie beside the weights, their values are compared too (:mod:`elastic_ckpt.formats.spot_check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic_ckpt.catalog import MASTER, Catalog, Extent, LogicalTensor, SavedParameter, SourceFacts
from elastic_ckpt.dtypes import ITEMSIZE
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.base import Found, ReadOptions, source_file
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.module_tensors import module_tensors
from elastic_ckpt.formats.pickled import TensorRef
from elastic_ckpt.formats.zero0_index import FUSED, PLAIN, STEP, UnpartitionedState
from elastic_ckpt.formats.zero0_names import member_names
from elastic_ckpt.geometry import FlatRange


def unpartitioned_catalog(found: Found, model: ModelShard, options: ReadOptions) -> Catalog:
    """The catalog of a checkpoint whose optimizer state is whole.

    Args:
        found: the folder.
        model: its model-states file.
        options: how to read, live names among them.

    Raises:
        MismatchError: it cannot be told which parameter is which.
    """
    state = model.optimizer
    assert state is not None
    names, note = member_names(model, state, options)
    builder = _Builder(model, state)
    for number, members in enumerate(names):
        builder.add_group(number, members)
    whole, notes = module_tensors([model], 0, frozenset(builder.parameters))
    return Catalog(
        source=SourceFacts(
            "native", found.folder, found.tag, 0, int(model.counters["dp_world_size"]), model.ds_version
        ),
        files=(source_file(model),),
        parameters=builder.parameters,
        tensors={**builder.tensors, **whole},
        groups=state.groups,
        aliases=model.shared,
        opaque_states=builder.opaque,
        frozen_recorded=model.frozen_recorded,
        notes=(*found.notes, *notes, *note),
    )


class _Builder:
    """Collects parameters and logical tensors, group by group."""

    def __init__(self, model: ModelShard, state: UnpartitionedState) -> None:
        self._model = model
        self._state = state
        self.parameters: dict[str, SavedParameter] = {}
        self.tensors: dict[tuple[str, str], LogicalTensor] = {}
        self.opaque: dict[str, str] = dict(state.opaque)

    def add_group(self, group: int, members: Sequence[str | None]) -> None:
        offset = 0
        for position, name in enumerate(members):
            if name is None:
                continue
            shape = self._model.weights[name].shape
            numel = math.prod(shape)
            if self._state.kind == FUSED:
                number, base, held = self._state.members[group][0], offset, self._state.masters[group][0].shape
                master = self._state.masters[group][0]
            else:
                number, base, held = self._state.members[group][position], 0, shape
                plain = self._state.kind == PLAIN
                master = self._model.weights[name] if plain else self._state.masters[group][position]
            self._add_tensor(name, MASTER, shape, master, base)
            scalars = self._add_states(name, shape, number, base, held)
            self.parameters[name] = SavedParameter(shape, group, tuple(sorted(scalars.items())))
            offset += numel
        if self._state.kind == PLAIN and _is_fused_adam(self._state.groups[group]):
            self._use_last_step([name for name in members if name is not None])

    def _use_last_step(self, members: Sequence[str]) -> None:
        """FusedAdam counts the steps of a whole group in the state of its last tensor alone (fused_adam.py)."""
        stateful = [name for name in members if self.parameters[name].scalars]
        for name in stateful:
            self.parameters[name] = replace(self.parameters[name], scalars=self.parameters[stateful[-1]].scalars)

    def _add_states(
        self, name: str, shape: tuple[int, ...], number: int, base: int, held: tuple[int, ...]
    ) -> Mapping[str, float]:
        """States of one parameter, inside a tensor of shape ``held``; returns the scalar ones."""
        scalars = dict(self._state.scalars.get(number, {}))
        for key, ref in self._state.tensors.get(number, {}).items():
            if ref.shape == held and key != STEP:
                scalars.pop(key, None)
                self._add_tensor(name, key, shape, ref, base)
            elif ref.shape:
                self.opaque[key] = f"{ref.dtype} of shape {ref.shape} for {name} of shape {shape}"
        return scalars

    def _add_tensor(self, name: str, key: str, shape: tuple[int, ...], ref: TensorRef, base: int) -> None:
        if not ref.is_contiguous:
            raise UnsupportedError(
                f"{key} of this parameter was saved as a view that is not contiguous, which is not supported yet",
                parameter=name,
                file=self._model.path,
                expected="a contiguous tensor",
                found=f"shape {ref.shape}, strides {ref.stride}",
                remedy="load at the topology it was saved with",
            )
        numel = math.prod(shape)
        offset = ref.byte_offset + base * ITEMSIZE[ref.dtype]
        extents = (Extent(FlatRange(0, numel), 0, offset),) if numel else ()
        self.tensors[name, key] = LogicalTensor(name, key, shape, ref.dtype, extents)


def _is_fused_adam(group: Mapping[str, object]) -> bool:
    """DeepSpeed's FusedAdam, told by its hyperparameters: the checkpoint does not name the class."""
    return "bias_correction" in group and "amsgrad" not in group

"""Counters, scheduler and client state of a native checkpoint: from the rank that opened a file to those in need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ckpt import distributed
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.training_state import HostState, LossScale
from elastic_ckpt.formats.assembling import Assembled, Kind
from elastic_ckpt.formats.base import opener_of
from elastic_ckpt.formats.host_state import loss_scale_from, loss_scale_of, read_host_state
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.shards import OptimizerShard


@dataclass(frozen=True)
class Wanted:
    """What one rank tells the others of host states.

    Attributes:
        position: of the model-states file that holds what belongs to it.
        packed: what that file says, from the rank that opened it, where all ranks want the same one.
    """

    position: int
    packed: bytes | None = None


class HostStates:
    """Gives each rank the host state of the model-states file that it wants, whichever rank has opened it.

    Args:
        files: what the checkpoint comes to.
        kinds: what each file is of.
        opened: the files that this rank opened.
        place: where it stands.
    """

    def __init__(
        self, files: Assembled, kinds: Sequence[Kind], opened: Mapping[int, PickledFile], place: RankCoordinates
    ) -> None:
        self._files = files
        self._kinds = kinds
        self._opened = opened
        self._place = place
        self._same_ranks = files.grid.has_ranks_of(place)
        self._known: dict[int, HostState] = {}

    def wanted(self) -> Wanted:
        """What this rank wants: its own file's where the topology allows, else the first rank's. Local."""
        place, grid = self._place, self._files.grid
        same_model = (grid.tp, grid.pp) == (place.tp, place.pp)
        models = list(self._files.ranks[place.mp_rank if same_model else 0].models)
        own = self._files.grid.own_file(place) if len(models) > 1 else None
        position = models[own or 0]
        if position not in self._opened:
            return Wanted(position)
        state = self._read(position)
        of_all = own is None and (not same_model or place.tp * place.pp == 1)
        return Wanted(position, distributed.pack(state) if of_all else None)

    def exchanged(self, everybody: Sequence[Wanted]) -> HostState:
        """The host state of the file that this rank wants. Collective where a rank still lacks its own.

        Args:
            everybody: by rank, what it wants.
        """
        packed = {each.position: each.packed for each in everybody if each.packed is not None}
        lacking = {
            each.position
            for rank, each in enumerate(everybody)
            if each.position not in packed and opener_of(each.position) != rank
        }
        if lacking:  # on all ranks alike

            def read() -> dict[int, bytes]:
                return {at: distributed.pack(self._read(at)) for at in sorted(lacking & set(self._opened))}

            for part in distributed.gathered("read counters, scheduler and client state", read):
                packed.update(part)
        own = everybody[distributed.rank()].position
        return self._known[own] if own in self._known else distributed.unpack(packed[own])

    def _read(self, position: int) -> HostState:
        if position not in self._known:
            rank = self._files.ranks[self._kinds[position][0]]
            models, optimizers = list(rank.models.values()), list(rank.optimizers.values())
            overflow = optimizers[0].overflow if optimizers else False
            scale, sequence = _loss_scale(models, optimizers), self._files.grid.sequence
            self._known[position] = read_host_state(self._opened[position], scale, overflow, self._same_ranks, sequence)
        return self._known[position]


def _loss_scale(models: Sequence[ModelShard], optimizers: Sequence[OptimizerShard]) -> LossScale | None:
    if optimizers:
        return loss_scale_of(optimizers[0].loss_scaler)
    return None if models[0].optimizer is None else loss_scale_from(models[0].optimizer.scaler)

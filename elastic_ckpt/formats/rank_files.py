"""The files of each model-parallel rank of a native checkpoint, and what of them depends on which rank loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ckpt.core.extra_states import SavedExtraState
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.formats.extra_states import copies_in, settle
from elastic_ckpt.formats.grid import Grid
from elastic_ckpt.formats.merging import ExpertShard, LayerShard
from elastic_ckpt.formats.model_states import ModelShard, UnpartitionedState
from elastic_ckpt.formats.shards import OptimizerShard


@dataclass
class RankFiles:
    """The files of one model-parallel rank, in rank order."""

    models: list[ModelShard] = field(default_factory=list)
    optimizers: list[OptimizerShard] = field(default_factory=list)
    expert_optimizers: list[UnpartitionedState] = field(default_factory=list)
    experts: list[ExpertShard] = field(default_factory=list)

    @property
    def model(self) -> ModelShard:
        return self.models[0]


def extra_states_of(
    models: Mapping[int, Sequence[ModelShard]],
    grid: Grid,
    at: RankCoordinates,
    experts: Mapping[int, Sequence[ExpertShard]] | None = None,
    layers: Sequence[LayerShard] = (),
    known: frozenset[str] = frozenset(),
) -> dict[str, SavedExtraState]:
    """What modules keep beside parameters and buffers, for the live rank ``at``; files are by model-parallel rank.

    ``known``: names of parameters and buffers, some of which the files of ``layers`` have.
    """
    copies = []
    for mp, files in models.items():
        for dp_rank, model in enumerate(files):
            copies += copies_in(model, dp_rank if len(files) > 1 else None, mp % grid.tp)
    for mp, of_rank in (experts or {}).items():
        for expert in of_rank:
            copies += copies_in(expert, None, mp % grid.tp)
    for layer in layers:
        copies += copies_in(layer, None, layer.tp_rank, layer.named_extra_states(known))
    return settle(copies, grid.own_file(at), at.tp_rank if grid.tp == at.tp else None)

"""The grid of a checkpoint: which model-parallel file is of which pipeline stage and tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby

from elastic_ckpt.core.local_state import NO_SEQUENCE_PARALLEL, RankCoordinates, SequenceParallel
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import DamagedError, LayoutError, MissingFilesError, UnknownLayoutError, UnsupportedError
from elastic_ckpt.formats.base import refuse_other_saves
from elastic_ckpt.formats.model_states import ModelShard


@dataclass(frozen=True)
class Grid:
    """Which model-parallel file is of which pipeline stage and tensor-parallel rank.

    DeepSpeed numbers them together: ``mp_rank = stage * tp + tensor-parallel rank`` (``PipelineParallelGrid``,
    topology.py). Since 0.17 files state both degrees (``checkpoint_parallel_dimensions``); in older ones, ranks of one
    stage list the same parameters. File names are not used: gpt-neox's would suggest another topology.
    """

    stages: tuple[tuple[int, ...], ...]  # model-parallel ranks, in tensor-parallel order
    partition_degree: int = 1  # ranks over which ZeRO partitioned each
    sequence: SequenceParallel = NO_SEQUENCE_PARALLEL  # how it divided these

    @property
    def tp(self) -> int:
        return len(self.stages[0])

    @property
    def pp(self) -> int:
        return len(self.stages)

    def has_ranks_of(self, coordinates: RankCoordinates) -> bool:
        """Whether the live job has the data-, tensor- and pipeline-parallel ranks of the save.

        Rank-local state (random states, data positions) then keeps its rank. Ranks of one sequence-parallel group share
        their samples, so their number does not matter.
        """
        saved = (self.tp, self.pp, self.sequence.data_degree(self.partition_degree))
        is_known = self.partition_degree == coordinates.partition_degree or not coordinates.sequence.strided
        return saved == (coordinates.tp, coordinates.pp, coordinates.data_degree) and is_known

    def own_file(self, coordinates: RankCoordinates) -> int | None:
        """The data-parallel rank whose file belongs to this rank; ``None``: the job has other ranks than the save.

        In a sequence-parallel group of another size, each rank gets the file of the group's first rank.
        """
        if not self.has_ranks_of(coordinates):
            return None
        saved = self.sequence.ranks_per_sample
        live = coordinates.sequence.ranks_per_sample
        if self.partition_degree == coordinates.partition_degree and saved == live:
            return coordinates.partition_rank
        data_rank = coordinates.partition_rank // live  # shared by the ranks of a sequence-parallel group
        return data_rank * saved + (coordinates.sp_rank if saved == coordinates.sequence.degree else 0)


def grid_of(
    models: Mapping[int, ModelShard],
    folder: str,
    coordinates: RankCoordinates | None = None,
    tp_of_layers: int = 0,
) -> Grid:
    """The grid of ``models``, one model-states file per model-parallel rank, in ``folder``.

    ``coordinates``, of this rank in the live topology, can settle a sequence-parallel degree that no file states;
    ``tp_of_layers``, the tensor-parallel degree in the names of layers' files, settles one that no parameters show.
    Raises :class:`LayoutError` for missing ranks, :class:`UnsupportedError` if it is unknown which rank is which.
    """
    ranks = sorted(models)
    first = models[ranks[0]]
    last = models[ranks[-1]]
    stated = first.stated
    what = "tensor- and pipeline-parallel degree differ"
    refuse_other_saves([models[rank] for rank in ranks], lambda model: {what: model.stated.dimensions})
    tp, pp, sequence = stated.borne_out(len(ranks))
    if not tp and not any(models[rank].param_shapes or models[rank].weights for rank in ranks):
        tp = tp_of_layers
    expected = tp * pp or max(ranks) + 1
    if len(ranks) != expected or ranks[-1] != expected - 1:
        kind: type[DamagedError] = LayoutError
        problem = "there are files of more ranks than were saved"
        file = last.path
        wanted = counted(expected, "rank")
        if stated.dimensions is not None and stated.mp not in (None, stated.dimensions[0]):
            kind = UnknownLayoutError
            file = first.path
            problem = "two entries of a model-states file contradict each other, and the files fit neither"
            degrees = dict(zip(("tp_degree", "pp_degree"), stated.dimensions, strict=True))
            wanted = f"as many ranks as mp_world_size {stated.mp} and checkpoint_parallel_dimensions {degrees} say"
        elif len(ranks) < expected:
            kind = MissingFilesError
            file = folder
            problem = "files of model-parallel ranks are missing"
        remedy = "restore the missing files, or remove those of another save; or use another tag"
        raise kind(problem, file, wanted, f"{len(ranks)}: {', '.join(map(str, ranks[:16]))}", remedy=remedy)
    stages = [ranks[at : at + tp] for at in range(0, len(ranks), tp or 1)]
    names = []
    if not tp:  # neighbours with the same names form a stage
        for each in (models[rank] for rank in ranks):
            listed = frozenset(name for name, _ in chain.from_iterable(each.param_shapes))
            names.append(listed or frozenset(each.weights))
        stages = [[rank for rank, _ in stage] for _, stage in groupby(enumerate(names), key=lambda named: named[1])]
    if (len(ranks) > 1 and not all(names)) or len({len(stage) for stage in stages}) > 1:
        problem = "it is not known which model-parallel file is of which pipeline stage and tensor-parallel rank"
        wanted = "checkpoint_parallel_dimensions, or parameters that are the same within a stage"
        raise UnsupportedError(problem, first.path, wanted, counted(len(ranks), "model-parallel rank"))
    grid = Grid(tuple(map(tuple, stages)), int(first.counters.get("dp_world_size", 1)), sequence)
    if coordinates is None or stated.sequence is not None or grid.sequence != NO_SEQUENCE_PARALLEL:
        return grid
    # an unstated degree is the live one only if ranks and counted samples both agree: counters alone may stem from
    # earlier runs with other batches
    same_ranks = (grid.tp, grid.pp) == (coordinates.tp, coordinates.pp)
    same_ranks = same_ranks and grid.partition_degree == coordinates.partition_degree
    agrees = coordinates.sequence.partitioned and coordinates.sequence.degree in stated.possible
    return replace(grid, sequence=coordinates.sequence) if same_ranks and agrees else grid

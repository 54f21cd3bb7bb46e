"""Which model-parallel file is of which pipeline stage and tensor-parallel rank.

DeepSpeed numbers them together: ``mp_rank = stage * tp + tensor-parallel rank`` (``PipelineParallelGrid``,
topology.py). Since 0.17 the files say how many of each there are (``checkpoint_parallel_dimensions``); older ones are
told apart by the parameters they list: ranks of one stage list the same names. File names are not asked: gpt-neox's
would suggest another topology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.model_states import ModelShard


@dataclass(frozen=True)
class Grid:
    """Model-parallel ranks by pipeline stage, each stage's in tensor-parallel order."""

    stages: tuple[tuple[int, ...], ...]

    @property
    def tp(self) -> int:
        return len(self.stages[0])

    @property
    def pp(self) -> int:
        return len(self.stages)


def grid_of(models: Mapping[int, ModelShard], folder: str) -> Grid:
    """Sort model-parallel ranks, of each of which one model-states file is given.

    Raises:
        DamagedError: there are ranks missing.
        UnsupportedError: neither their files nor their parameters tell which rank is which.
    """
    ranks = sorted(models)
    first = models[ranks[0]]
    said = first.degrees
    for model in models.values():
        if model.degrees != said:
            raise DamagedError(
                f"this file belongs to another save than {first.path}: tensor- and pipeline-parallel degree differ",
                file=model.path,
                expected=said,
                found=model.degrees,
                remedy="remove the foreign files, or take another tag",
            )
    expected = said[0] * said[1] if said else max(ranks) + 1
    if len(ranks) != expected or ranks[-1] != expected - 1:
        fewer = len(ranks) < expected
        raise DamagedError(
            "files of model-parallel ranks are missing" if fewer else "there are files of more ranks than were saved",
            file=models[ranks[-1]].path if not fewer else folder,
            expected=f"{expected} model-parallel ranks, 0 to {expected - 1}",
            found=f"{len(ranks)}: {', '.join(map(str, ranks[:16]))}",
            remedy="restore the missing files, or remove those of another save; or take another tag",
        )
    stages = _as_said(ranks, said[0]) if said else _by_names([models[rank] for rank in ranks])
    if stages is None or len({len(stage) for stage in stages}) > 1:
        raise UnsupportedError(
            "it cannot be told which model-parallel file is of which pipeline stage and tensor-parallel rank",
            file=first.path,
            expected="checkpoint_parallel_dimensions, or parameters that are the same within a stage",
            found=f"{len(ranks)} model-parallel ranks",
        )
    return Grid(stages)


def _as_said(ranks: Sequence[int], tp: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ranks[start : start + tp]) for start in range(0, len(ranks), tp))


def _by_names(models: Sequence[ModelShard]) -> tuple[tuple[int, ...], ...] | None:
    """Neighbours with the same names are of one stage; ``None``: files without names."""
    names = [frozenset(name for group in model.param_shapes for name, _ in group) for model in models]
    names = [mine or frozenset(model.weights) for mine, model in zip(names, models, strict=True)]
    if len(models) > 1 and not all(names):
        return None
    stages: list[list[int]] = []
    for rank, mine in enumerate(names):
        if stages and names[stages[-1][-1]] == mine:
            stages[-1].append(rank)
        else:
            stages.append([rank])
    return tuple(map(tuple, stages))

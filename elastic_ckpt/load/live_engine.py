"""The live engine as all ranks describe it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from elastic_ckpt import distributed
from elastic_ckpt.core.local_state import LiveStage, LocalState, ModelLayout
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.coordinates import model_of_all
from elastic_ckpt.engines.zero import select_adapter
from elastic_ckpt.errors import MismatchError


class _Described(NamedTuple):
    """What other ranks need to know of a rank."""

    model: ModelLayout
    stage: LiveStage | None  # on the first rank of each pipeline stage


def adapter_of(engine: Any, with_states: bool) -> EngineAdapter:
    """The adapter of a live engine, which must not hold gradients of the old weights. Local."""
    adapter = select_adapter(engine, with_states=with_states)
    if compat.holds_gradients(engine):  # which would enter the next step
        problem = "the engine holds gradients that no step has used yet; they would be mixed into the restored run"
        expected = "a load right after engine.step(), or before the first backward"
        remedy = "finish the step with engine.step() (its result is overwritten), then load"
        raise MismatchError(problem, expected=expected, remedy=remedy)
    return adapter


def describe(select: Callable[[], EngineAdapter]) -> tuple[EngineAdapter, LocalState]:
    """The adapter that ``select`` returns on this rank, and its LocalState. Collective."""
    described: list[tuple[EngineAdapter, LocalState]] = []

    def describe_mine() -> _Described | None:
        adapter = select()
        local_state = adapter.local_state()
        described.append((adapter, local_state))
        at = local_state.model.coordinates
        if at.tp * at.pp * at.ep == 1:
            return None
        is_first_of_stage = at.pp > 1 and at.partition_rank == at.tp_rank == 0
        return _Described(replace(local_state.model, run={}), _stage_of(local_state) if is_first_of_stage else None)

    gathered = distributed.all_gather("describe the live engine", describe_mine)
    adapter, local_state = described[0]
    everybody = [each for each in gathered if each is not None]
    model = model_of_all(local_state.model, [each.model for each in everybody])
    return adapter, replace(local_state, model=model, stages=_stages(everybody))


def _stage_of(local_state: LocalState) -> LiveStage:
    """The pipeline stage of this rank."""
    groups = tuple(group.names for group in local_state.groups)
    return LiveStage(frozenset(local_state.model.layouts), groups)


def _stages(everybody: Sequence[_Described]) -> tuple[LiveStage, ...]:
    """All pipeline stages, in order; none without a pipeline of several."""
    stages = {each.model.coordinates.pp_rank: each.stage for each in everybody if each.stage is not None}
    return tuple(stages[rank] for rank in sorted(stages))

"""The live param groups as those of the save, for schedulers that ``load_checkpoint`` does not restore."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.read_plan import LoadPlan, SavedRate
from elastic_ckpt.engines.schedule_states import check_fit, fit_scheduler, fits_as_it_is
from elastic_ckpt.engines.schedules import apply_schedule
from elastic_ckpt.errors import MismatchError

logger = logger_of(__name__)
#: For what only the groups of the save fit.
AS_SAVED = "build the param groups as they were saved, or let the framework restart its scheduler"


@dataclass(frozen=True)
class GroupMapping:
    """The saved param groups of which the live ones consist.

    Attributes:
        sources: per live group, the saved ones of its members.
        saved_groups: number of param groups in the checkpoint, 0 if it records none.
        saved_rates: per live group, what its members were trained with.
        is_other: whether groups are known to be more, fewer, or in another order than at the save.
        keeps_live: whether live groups keep their values, so that the live schedule's stand for merged ones.
    """

    sources: Sequence[Sequence[int]]
    saved_groups: int
    saved_rates: Sequence[SavedRate | None]
    is_other: bool
    keeps_live: bool

    @classmethod
    def of(cls, plan: LoadPlan) -> GroupMapping:
        """That of a load."""
        return cls(plan.member_groups, plan.saved_groups, plan.saved_rates, plan.regroups, plan.keeps_live)

    def concerns(self, state: Any) -> bool:
        """Whether a scheduler's saved state has to be put in the order of the live groups."""
        return self.is_other and not fits_as_it_is(state, len(self.sources), self.saved_groups)

    def fit(self, state: Any, before: Any) -> Any:
        """A copy of a saved state in the order of the live groups; ``before``: the scheduler's own, for new groups.

        Raises :class:`MismatchError` if no such order is known.
        """
        with _own_remedy():
            return fit_scheduler(copy.deepcopy(state), before, self.sources, self.saved_groups, self.keeps_live)

    def check(self, state: Any) -> None:
        """Raise :class:`MismatchError` if :meth:`fit` will, whatever the live scheduler has for new groups."""
        if self.concerns(state):
            with _own_remedy():
                check_fit(state, self.sources, self.saved_groups, self.keeps_live)

    def say_what_is_kept(self) -> None:
        """Log which live groups, merged of several, go on with the live schedule's own values. Rank 0."""
        merged = [number for number, sources in enumerate(self.sources) if len(sources) > 1]
        if self.keeps_live and merged and distributed.rank() == 0:
            text = "param groups %s were several at the save, and keep their live values: where the saved ones differ, "
            text += "the restored lr schedule continues from the live ones"
            logger.info(f"elastic_ckpt: {text}", ", ".join(map(str, merged)))

    def set_new_groups(self, scheduler: Any, state: Any, before: Any) -> None:
        """Set the rates of groups of which the checkpoint has nothing to those of the restored position.

        ``state``: what was saved of the scheduler; ``before``: its own state before that was restored.
        """
        new = [number for number, sources in enumerate(self.sources) if not sources]
        groups = scheduler.optimizer.param_groups
        unknown = apply_schedule(scheduler, groups, new, (state, before), self.saved_rates)
        if unknown and distributed.rank() == 0:
            rates = ", ".join(f"{groups[number]['lr']:g}" for number in unknown)
            text = "the lr schedule so far was not applied to param groups %s, which continue from lr %s"
            logger.warning(f"elastic_ckpt: {text}", ", ".join(map(str, unknown)), rates)


@contextmanager
def _own_remedy() -> Iterator[None]:
    """Give a :class:`MismatchError` of the body the remedy of a scheduler that ``load_checkpoint`` does not restore."""
    try:
        yield
    except MismatchError as error:
        error.remedy = AS_SAVED
        raise

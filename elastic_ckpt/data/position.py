"""One number for the position in the data: the samples that optimizer steps have used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from elastic_ckpt.core.kinds import LARGEST_COUNT, MAPPING, described, is_count
from elastic_ckpt.errors import WEIGHTS_ALONE, ConfigError, MismatchError, Remedy

#: Entry of a position: samples, of all ranks and epochs, that optimizer steps have used.
SAMPLES = "samples_consumed"
#: Of a number in it; seeds have as many.
_FACT_BITS = 64


@dataclass(frozen=True)
class Trained:
    """What an engine has trained on, as it counts itself; short batches at the end of an epoch count as full ones."""

    samples: int  # of all ranks, in the optimizer steps so far
    micro_batch: int  # samples of all ranks
    #: Micro-batches since the last step; ``None`` where a step fetches them itself (``PipelineEngine.train_batch``).
    in_flight: int | None = 0
    micro_batches: int = 1  # of a step


def refuse_strange_position(state: Any) -> None:
    """Raise :class:`MismatchError` for what is no position in any data."""
    if not isinstance(state, Mapping):
        raise _no_position(f"{MAPPING} with {SAMPLES!r}", state, "data position")
    refuse_strange_count(SAMPLES, state.get(SAMPLES))


def refuse_strange_count(name: str, value: Any) -> None:
    """Raise :class:`MismatchError` for an entry of a position that is no count."""
    if not is_count(value):
        raise _no_position(f"an integer from 0 to {LARGEST_COUNT}", value, name)


def _is_fact(value: Any) -> bool:
    """Whether a value of a file can be compared with one of :meth:`DataPosition.facts`, and printed."""
    if isinstance(value, int):
        return value.bit_length() <= _FACT_BITS
    return value is None or isinstance(value, (str, float, np.integer, np.bool_))


def _no_position(expected: str, found: Any, name: str) -> MismatchError:
    remedy = Remedy("use another tag"), WEIGHTS_ALONE
    problem = "this is not a data position"
    return MismatchError(problem, None, expected, described(found), parameter=name, remedy=remedy)


class _Anchor(NamedTuple):
    """A position, and what the engine had trained on (its count of samples) when the data was there."""

    consumed: int
    trained: int


class DataPosition:
    """What samplers and streams have in common: their share of the samples, and a position that the engine counts."""

    def __init__(self, num_replicas: int | None, rank: int | None) -> None:
        if (num_replicas is None) != (rank is None) or (rank is not None and not 0 <= rank < (num_replicas or 0)):
            raise ValueError(f"num_replicas={num_replicas}, rank={rank}: give both, with 0 <= rank < num_replicas")
        self._replicas = None if num_replicas is None or rank is None else (num_replicas, rank)
        self._count: Callable[[], Trained] | None = None
        self._anchors = [_Anchor(0, 0)]
        self.loads = 0  # iterators from before the last load are stale

    @property
    def replicas(self) -> tuple[int, int]:
        """How many ranks divide the samples, and which of them this is: as given, of the engine, or of the job."""
        if self._replicas is not None:
            return self._replicas
        dist = torch.distributed
        has_group = dist.is_available() and dist.is_initialized()
        return (dist.get_world_size(), dist.get_rank()) if has_group else (1, 0)

    def bind(self, count: Callable[[], Trained], replicas: tuple[int, int] | None) -> None:
        """Take the count of an engine, and its data-parallel ranks unless others were given. For ``register``."""
        consumed = self.samples_consumed
        self._replicas = self._replicas or replicas
        if self._replicas is None:
            problem = "which ranks share their samples is not known: sequence-parallel ranks are not adjacent"
            raise ConfigError(problem, remedy="give the sampler num_replicas and rank")
        self._count = count
        self.move_to(consumed)

    @property
    def samples_consumed(self) -> int:
        """Samples, of all ranks and epochs, that optimizer steps have used."""
        return self.position_at(self._trained().samples)

    def state_dict(self) -> dict[str, Any]:
        """The position, and facts that tell whether it is of the same data."""
        return {SAMPLES: self.samples_consumed, **self.facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position; a :class:`MismatchError` if it is of other data, or of another order.

        A position without these facts (``{"samples_consumed": 4096}``) is not compared.
        """
        self.check(state)
        self.move_to(state[SAMPLES])

    def check(self, state: Any) -> None:
        """Raise the error of :meth:`load_state_dict`, if there is one."""
        refuse_strange_position(state)
        consumed = state[SAMPLES]
        facts = self.facts()
        for key in sorted(facts.keys() & state.keys()):
            if not _is_fact(state[key]):
                raise _no_position("a text, a flag or a number of 64 bits", state[key], key)
        differ = sorted(key for key in facts if state.get(key, facts[key]) != facts[key])
        if differ and consumed != self.samples_consumed:
            problem = f"the data position belongs to other data or another order: {', '.join(differ)}"
            saved, found = ({key: each[key] for key in differ} for each in (state, facts))
            remedy = f'to continue in this data, call its load_state_dict({{"samples_consumed": {consumed}}}) before'
            raise MismatchError(problem, None, f"{saved}, as saved", found, remedy=remedy)

    def refuse_uncounted(self, state: Mapping[str, Any], counted: int) -> None:
        """Raise :class:`MismatchError` for a position that takes time to reach and that the counters do not show.

        ``counted``: samples that the run which saved it had trained on. By default no position takes time.
        """

    def facts(self) -> dict[str, Any]:
        """What tells whether a position is one in the same data."""
        return {}

    def _trained(self) -> Trained:
        return Trained(0, 1) if self._count is None else self._count()

    def _anchor(self, trained: int) -> _Anchor:
        return next((each for each in reversed(self._anchors) if each.trained <= trained), self._anchors[0])

    def position_at(self, trained: int) -> int:
        """The position when the engine has counted so many samples."""
        anchor = self._anchor(trained)
        return anchor.consumed + max(trained - anchor.trained, 0)

    def refuse_if_older(self, loads: int) -> None:
        """Raise :class:`MismatchError` for an iterator of so many loads before, if there were more."""
        if loads != self.loads:
            problem = "a data loader's iterator is older than the position that was loaded, and gives other samples"
            raise MismatchError(problem, remedy="call iter(loader) after load_checkpoint, RepeatingLoader(loader) too")

    def move_to(self, consumed: int) -> None:
        """Go on after so many samples, whatever the engine's counters were before."""
        self._anchors = [_Anchor(consumed, self._trained().samples)]
        self.loads += 1

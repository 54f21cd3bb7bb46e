"""Flows: their axes, how one is drawn, and how a failing one is reduced. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True)
class Flow:
    """A run that is saved and resumed at its own topology. The defaults are the plainest choice of each axis.

    Attributes:
        ranks, stage, precision: a precision is a key of ``tests.distributed.model.PRECISIONS``.
        optimizer: a key of ``tests.flows.parts.OPTIMIZERS``.
        scheduler, client, model, zero, config: keys of the tables of that name there.
        groups: as ``tests.distributed.model.param_groups`` has them.
        loads: a key of ``tests.flows.parts.LOADS``: arguments of ``load_checkpoint``.
        trained: steps of the engine before it loads.
        pending: micro-batches that wait for a step when it is saved.
    """

    ranks: int = 2
    stage: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw"
    scheduler: str = "step"
    client: str = "none"
    model: str = "TinyLM"
    zero: str = "plain"
    config: str = "plain"
    groups: str = "one"
    loads: str = "all"
    trained: int = 0
    pending: int = 0

    def as_json(self) -> str:
        """What :func:`flow_of` reads: the choices that are not the default."""
        return json.dumps({axis: choice for axis, choice in asdict(self).items() if choice != getattr(Flow(), axis)})


Choices = Mapping[str, tuple[int | str, ...]]


def flow_of(text: str) -> Flow:
    """The flow that :meth:`Flow.as_json` has written."""
    read = json.loads(text)
    assert read.keys() <= {field.name for field in fields(Flow)}, text
    return Flow(**read)


def random_flow(rng: random.Random, choices: Choices, is_possible: Callable[[Flow], bool]) -> Flow:
    """A flow of the choices on each axis; half of the axes keep the default, so that odd choices meet in twos and threes."""
    while True:
        drawn = {axis: rng.choice(some) for axis, some in choices.items()}
        kept = {
            axis: getattr(Flow(), axis) for axis in drawn if axis not in ("stage", "optimizer") and rng.random() < 0.5
        }
        flow = Flow(**{**drawn, **kept})  # type: ignore[arg-type]
        if is_possible(flow):
            return flow


def simpler(flow: Flow) -> Iterator[Flow]:
    """The flow with one axis at its default."""
    for field in fields(Flow):
        if getattr(flow, field.name) != field.default:
            yield replace(flow, **{field.name: field.default})


def reduced(flow: Flow, fails: Callable[[Flow], bool]) -> Flow:
    """The flow with as few choices as it needs to fail."""
    while True:
        for candidate in simpler(flow):
            if fails(candidate):
                flow = candidate
                break
        else:
            return flow

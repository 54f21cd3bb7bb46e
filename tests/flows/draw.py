"""Flows: their axes, how one is drawn, and how a failing one is reduced. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True)
class Flow:
    """A choice on each axis; the defaults are the plainest."""

    ranks: int = 2

    def as_json(self) -> str:
        """What :func:`flow_of` reads: the kind, and the choices that are not the default."""
        plain = type(self)()
        changed = {axis: choice for axis, choice in asdict(self).items() if choice != getattr(plain, axis)}
        return json.dumps({"kind": type(self).__name__, **changed})


@dataclass(frozen=True)
class EngineFlow(Flow):
    """A training script that is saved and resumed at its own topology.

    Attributes:
        stage, precision: a precision is a key of ``tests.distributed.model.PRECISIONS``.
        optimizer: a key of ``tests.flows.parts.OPTIMIZERS``.
        scheduler, client, model, zero, config: keys of the tables of that name there.
        groups: as ``tests.distributed.model.param_groups`` has them.
        loads: a key of ``tests.flows.parts.LOADS``: arguments of ``load_checkpoint``.
        trained: steps of the engine before it loads.
        pending: micro-batches that wait for a step when it is saved.
    """

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


@dataclass(frozen=True)
class TrainerFlow(Flow):
    """A script with the Trainer of Transformers; optim and scheduler are its names for them.

    Attributes:
        best: whether the best checkpoint is loaded in the end.
        config: who makes optimizer and scheduler: ``trainer``, or DeepSpeed with what the Trainer fills in (``auto``).
        others as of ``transformers.TrainingArguments``, and ZeRO's stage.
    """

    stage: int = 2
    optim: str = "adamw_torch"
    scheduler: str = "linear"
    accumulation: int = 1
    best: bool = False
    config: str = "trainer"
    bf16: bool = False
    lora: bool = False


KINDS = {kind.__name__: kind for kind in (EngineFlow, TrainerFlow)}
#: Axis -> what may be chosen.
Choices = Mapping[str, tuple[int | str, ...]]


def flow_of(text: str) -> Flow:
    """The flow that :meth:`Flow.as_json` has written."""
    read = json.loads(text)
    return KINDS[read.pop("kind")](**read)


def random_flow(rng: random.Random, kind: type[Flow], choices: Choices, is_possible: Callable[[Flow], bool]) -> Flow:
    """A flow of the choices on each axis; half of them keep the default, so that odd choices meet in twos and threes."""
    while True:
        drawn = {axis: rng.choice(some) for axis, some in choices.items()}
        kept = [axis for axis in drawn if axis not in ("ranks", "stage", "optimizer", "optim") and rng.random() < 0.5]
        flow = kind(**{axis: choice for axis, choice in drawn.items() if axis not in kept})
        if is_possible(flow):
            return flow


def simpler(flow: Flow) -> Iterator[Flow]:
    """The flow with one axis at its default."""
    for field in fields(flow):
        if getattr(flow, field.name) != field.default:
            yield replace(flow, **{field.name: field.default})

"""What jobs find out and return to the tests, which say what it has to be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from elastic_ckpt.errors import ElasticCkptError, Remedy
from elastic_ckpt.report import LoadReport
from tests.distributed.truth import fingerprint

OWN_LOADER = "elastic_ckpt leaves this load to DeepSpeed's own loader: "


@dataclass(frozen=True)
class Loaded:
    """A load on one rank.

    Attributes:
        case: what the test asked for.
        where: rank, source and target, for the test's messages.
        report: of the load; ``None`` where DeepSpeed's own loader ran.
        differences: what is not bit-equal to what was saved, by kind and name, and how; and what was read of files with
            checksums and not compared with them.
        loss_gap: the largest difference between a loss of the run that goes on and of the uninterrupted one; 0 where
            the run does not go on.
        client_state: what the load returned.
        lines: what elastic_ckpt logged on this rank, from warnings up.
    """

    case: Any
    where: str
    report: LoadReport | None
    differences: dict[str, str]
    loss_gap: float = 0.0
    client_state: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.report is not None and self.report.verified is not None and self.report.verified.incomplete_nbytes:
            self.differences["verified"] = str(self.report.verified)

    @property
    def format(self) -> str:
        """Of the checkpoint, as the report names it."""
        return self.report.source.format if self.report else "left to DeepSpeed"

    @property
    def text(self) -> str:
        """The report on one line, without its frame."""
        return " ".join(str(self.report).replace("│", " ").split())


@dataclass(frozen=True)
class Resumes:
    """What is expected of most loads: everything came back bit by bit.

    Attributes:
        format: of the checkpoint, as the report names it.
        loss_gap: by how much a loss of the run that goes on may differ from the uninterrupted run's, where other ranks
            add gradients up in another order.
        says: what the report says.
    """

    format: str = "native"
    loss_gap: float = 0.0
    says: tuple[str, ...] = ()

    def check(self, loads: Sequence[Loaded]) -> None:
        """Hold against what the ranks found."""
        for load in loads:
            assert load.format == self.format and load.differences == {}, (load.where, load.differences)
            assert load.loss_gap <= self.loss_gap, (load.where, load.loss_gap)
            assert [words for words in self.says if words not in load.text] == [], (load.where, load.text)


@dataclass(frozen=True)
class Refused:
    """A load that was tried on all ranks.

    Attributes:
        case: what the test asked for.
        kinds: class and base classes of the error, by name; empty: there was none.
        texts: the errors of all ranks, which should be one.
        changed: what of the engine is not as before, on any rank.
        lines: what elastic_ckpt logged, from warnings up.
        remedies: the ways out that the error names.
    """

    case: Any
    kinds: tuple[str, ...]
    texts: frozenset[str]
    changed: frozenset[str]
    lines: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True)
class Refuses:
    """What is expected of a load that must fail: one error on all ranks, and an engine that is as it was.

    Attributes:
        error: its class, or a base class.
        words: what it says.
    """

    error: str
    words: tuple[str, ...] = ()

    def check(self, refusals: Sequence[Refused]) -> None:
        """Hold against what the ranks found."""
        for refusal in refusals:
            (text,) = refusal.texts
            assert self.error in refusal.kinds, text
            assert [words for words in self.words if words not in text] == [], text
            assert refusal.changed == set()


def attempt(case: Any, engine: Any, load: Callable[[], Any], skipped: Sequence[str] = ()) -> Refused:
    """Try a load; what is left of elastic_ckpt's errors and of the engine. Collective.

    Args:
        case: noted in the facts.
        engine: the live engine.
        load: raises the error.
        skipped: states that are not looked at.
    """
    before = fingerprint(engine, skipped)
    kinds, text, remedies = (), "loaded without an error", ()
    with log_lines() as lines:
        try:
            load()
        except ElasticCkptError as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            text, remedies = f"{type(error).__name__}: {error}", error.remedies
    after = fingerprint(engine, skipped)
    changed = {part for part in before if before[part] != after[part]}
    changed |= {"report"} if kinds and engine.elastic_report is not None else set()
    everyone = on_all_ranks((text, changed, lines))
    texts, changes, logs = zip(*everyone, strict=True)
    return Refused(
        case,
        kinds,
        frozenset(texts),
        frozenset().union(*changes),
        tuple(line for log in logs for line in log),
        remedies,
    )


def loss_gap(losses: Sequence[float], truth: Any) -> float:
    """How far losses are from those of the uninterrupted run."""
    return max(abs(a - b) for a, b in zip(losses, truth["losses"], strict=True))


def on_all_ranks(item: Any) -> list[Any]:
    """What each rank has. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, item)
    return everyone


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """What elastic_ckpt logs meanwhile on this rank, from warnings up."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("elastic_ckpt")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)

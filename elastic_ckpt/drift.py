"""Have copies of one tensor drifted apart? Reads what a plan lists to be compared."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER
from elastic_ckpt.coded import clip
from elastic_ckpt.errors import MismatchError, listed
from elastic_ckpt.plan import Comparison, Piece, Plan, Recode, Slot
from elastic_ckpt.reader import ReadOptions, execute
from elastic_ckpt.rules.resolve import FIRST, MEAN

_CHUNK_NUMEL = 1 << 19
#: Wide enough for every value of every dtype that is saved.
_WIDEST = "float64"
_SHOWN = 6


@dataclass(frozen=True)
class Drift:
    """Copies that differ.

    Attributes:
        name, key: what it is.
        largest, mean: of the differences from the first copy.
        copies: how many there are.
        taken: what is made of them: the ``first`` or the ``mean``.
        is_guess: whether only shapes say that these are copies.
    """

    name: str
    key: str
    largest: float
    mean: float
    copies: int
    taken: str
    is_guess: bool = False

    def __str__(self) -> str:
        what = "" if self.key in (MASTER, BUFFER, FROZEN) else f" {self.key}"
        return (
            f"{self.name}{what}: {self.copies} copies, at most {self.largest:.3g} and in the mean {self.mean:.3g} apart"
        )


def find_drift(plan: Plan, options: ReadOptions) -> list[Drift]:
    """Read this rank's share of the copies and compare them with the first one. Local.

    Raises:
        DamagedError: a file cannot be read.
    """
    return [drift for comparison in plan.comparisons for drift in _compare(plan, comparison, options)]


def _compare(plan: Plan, comparison: Comparison, options: ReadOptions) -> Iterator[Drift]:
    largest = total = 0.0
    differs = False
    for start in range(0, comparison.numel, _CHUNK_NUMEL):
        stop = min(start + _CHUNK_NUMEL, comparison.numel)
        first = _read(plan, comparison.copies[0], start, stop, options)
        for pieces in comparison.copies[1:]:
            other = _read(plan, pieces, start, stop, options)
            if not torch.allclose(first, other, rtol=0, atol=0, equal_nan=True):
                differs = True
                same = (first == other) | (first.isnan() & other.isnan())
                apart = (first - other).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)
                largest, total = max(largest, apart.max().item()), total + apart.sum().item()
    if differs:
        mean = total / comparison.numel / (len(comparison.copies) - 1)
        yield Drift(
            comparison.name,
            comparison.key,
            largest,
            mean,
            len(comparison.copies),
            comparison.taken,
            comparison.is_guess,
        )


def _read(plan: Plan, pieces: Iterable[Piece], start: int, stop: int, options: ReadOptions) -> torch.Tensor:
    """Elements ``[start, stop)`` of one copy, quantized ones decoded."""
    clipped = (clip(piece, start, stop) for piece in pieces)
    inside = tuple(replace(piece, start=piece.start - start) for piece in clipped if piece.numel > 0)
    values = torch.zeros(stop - start, dtype=torch.float64)
    slot = Slot("", 0, "", stop - start, _WIDEST)
    recode = Recode(0, 0, stop - start, None, -1, 0, inside)
    execute(Plan(plan.files, (slot,), (), recodes=(recode,)), [values], options, show_progress=False)
    return values


def judge_drift(found: Iterable[Drift], averaged: frozenset[str], policy: str) -> tuple[str, ...]:
    """What becomes of copies that differ: notes for the report.

    Args:
        found: of all ranks.
        averaged: names of which a rule says that they may.
        policy: ``strict``, ``first`` or ``mean``.

    Raises:
        MismatchError: some differ, and the policy is ``strict``.
    """
    drifts = sorted({(drift.name, drift.key): drift for drift in found}.values(), key=lambda drift: -drift.largest)
    asked = [drift for drift in drifts if drift.name not in averaged]
    guessed = [drift for drift in asked if drift.is_guess]
    if guessed:
        raise _no_copies(guessed)
    if asked and policy not in (FIRST, MEAN):
        more = f"; and {len(asked) - _SHOWN} more" if len(asked) > _SHOWN else ""
        raise MismatchError(
            "copies of replicated parameters differ between the ranks that saved them, and only one can be kept",
            parameter=listed(dict.fromkeys(drift.name for drift in asked)),
            expected="equal copies on every tensor-parallel rank and pipeline stage",
            found="; ".join(map(str, asked[:_SHOWN])) + more,
            remedy=(
                '"elastic_checkpoint": {"replicated_params": "first"} keeps the copy of the first rank, '
                '{"replicated_params": "mean"} takes the mean of all tensor-parallel ranks'
            ),
        )
    notes = []
    for drift in drifts[:_SHOWN]:
        notes.append(f"replicated, but different when saved: {drift}; the {drift.taken} was taken")
    if len(drifts) > _SHOWN:
        notes.append(f"and {len(drifts) - _SHOWN} more replicated tensors that were different when saved")
    return tuple(notes)


def _no_copies(guessed: Sequence[Drift]) -> MismatchError:
    """Tensors of equal shape on every rank that have other values: most likely each rank's own part."""
    names = listed(dict.fromkeys(drift.name for drift in guessed))
    pattern = re.escape(guessed[0].name)
    return MismatchError(
        "tensors that by their shapes alone would be copies are not the same on the tensor-parallel ranks",
        parameter=names,
        expected="equal copies, or a word on how it is cut",
        found="; ".join(map(str, guessed[:_SHOWN])),
        remedy=(
            f'"elastic_checkpoint": {{"tp_rules": [{{"pattern": {json.dumps(pattern)}, "kind": "vocabulary"}}]}} (or '
            'column, row; replicated only for copies that drifted apart, together with "replicated_params")'
        ),
    )

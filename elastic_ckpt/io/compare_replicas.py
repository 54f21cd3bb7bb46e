"""Have copies of one tensor drifted apart? Reads what a plan lists to be compared."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.core.read_plan import Piece, ReadItem, ReadPlan, ReplicaCheck, RequantizeItem, Slot, clip
from elastic_ckpt.errors import MismatchError, listed
from elastic_ckpt.io.reader import ReadOptions, execute
from elastic_ckpt.sharding.resolve import FIRST, MEAN

#: Elements that are told apart at a time: bounds the memory for their values.
_STEP_NUMEL = 1 << 18
#: Wide enough for every value of every dtype that is saved.
_WIDEST = "float64"
_WORD_NBYTES = 8
_LEAST_NBYTES = 1 << 16
_SHOWN = 6


@dataclass(frozen=True)
class ReplicaDifference:
    """What one rank found in its piece of some copies that differ.

    Attributes:
        comparison: the piece; without its copies.
        copies: how many there are.
        largest, total: the largest difference from the first copy, and the sum of all differences.
    """

    comparison: ReplicaCheck
    copies: int
    largest: float
    total: float


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


def find_drift(plan: ReadPlan, options: ReadOptions) -> list[ReplicaDifference]:
    """Read this rank's share of the copies and compare them with the first one. Local.

    Raises:
        DamagedError: a file cannot be read.
    """
    arena = torch.empty(0, dtype=torch.uint8)
    found: dict[int, ReplicaDifference] = {}
    most_nbytes = max(options.staging_nbytes // 2, _LEAST_NBYTES)  # the other half is for what has to be decoded
    options = replace(options, chunk_nbytes=min(options.chunk_nbytes, max(most_nbytes // options.threads, 1)))
    for parts in _rounds(plan.comparisons, most_nbytes):
        needed = sum(part.nbytes for part in parts)
        if needed > arena.numel():
            arena = torch.empty(needed, dtype=torch.uint8)
        for part, copies in zip(parts, _read(plan, parts, arena, options), strict=True):
            apart = _apart(copies)
            if apart is not None:
                before = found.get(part.index)
                largest, total = (before.largest, before.total) if before else (0.0, 0.0)
                asked = part.comparison
                found[part.index] = ReplicaDifference(
                    replace(asked, copies=()), len(asked.copies), max(largest, apart[0]), total + apart[1]
                )
    return list(found.values())


@dataclass(frozen=True)
class _Part:
    """Elements ``[start, stop)`` of a comparison; ``dtype``: in which its copies are read, see :func:`_dtype_of`."""

    index: int
    comparison: ReplicaCheck
    start: int
    stop: int
    dtype: str

    @property
    def slot_nbytes(self) -> int:
        """Of one copy in memory: whole words."""
        return -(-(self.stop - self.start) * ITEMSIZE[self.dtype] // _WORD_NBYTES) * _WORD_NBYTES

    @property
    def nbytes(self) -> int:
        return len(self.comparison.copies) * self.slot_nbytes


@dataclass(frozen=True)
class _Values:
    """One copy of a part, and its bytes as words, which are compared six times as fast as one by one."""

    words: torch.Tensor
    values: torch.Tensor


def _rounds(comparisons: Iterable[ReplicaCheck], most_nbytes: int) -> Iterator[list[_Part]]:
    """What is read at once: many small comparisons, or a part of a big one."""
    parts: list[_Part] = []
    nbytes = 0
    for index, comparison in enumerate(comparisons):
        dtype = _dtype_of(comparison)
        room = most_nbytes // max(len(comparison.copies), 1) // _WORD_NBYTES * _WORD_NBYTES
        step = max(room // ITEMSIZE[dtype], 1)
        for start in range(0, comparison.numel, step):
            part = _Part(index, comparison, start, min(start + step, comparison.numel), dtype)
            if parts and nbytes + part.nbytes > most_nbytes:
                yield parts
                parts, nbytes = [], 0
            parts.append(part)
            nbytes += part.nbytes
    if parts:
        yield parts


def _dtype_of(comparison: ReplicaCheck) -> str:
    """That of the files, where the copies can be compared byte by byte; else one for the values of all."""
    dtypes = {piece.dtype for pieces in comparison.copies for piece in pieces}
    is_coded = any(piece.code is not None for pieces in comparison.copies for piece in pieces)
    return dtypes.pop() if len(dtypes) == 1 and not is_coded else _WIDEST


def _read(plan: ReadPlan, parts: Sequence[_Part], arena: torch.Tensor, options: ReadOptions) -> Iterator[list[_Values]]:
    """All copies of each part: those of all in one go; quantized ones, and those of several dtypes, decoded."""
    ends = accumulate(part.slot_nbytes for part in parts for _ in part.comparison.copies)
    slots: list[Slot] = []
    read: list[_Values] = []
    copies: list[ReadItem] = []
    recodes: list[RequantizeItem] = []
    for part in parts:
        numel = part.stop - part.start
        for pieces in part.comparison.copies:
            end, number = next(ends), len(slots)
            held = arena[end - part.slot_nbytes : end]
            held[-_WORD_NBYTES:] = 0  # behind the last element
            inside = _clipped(pieces, part)
            if sum(piece.numel for piece in inside) < numel:
                held.zero_()
            slots.append(Slot("", 0, "", numel, part.dtype))
            read.append(_Values(held.view(torch.int64), held.view(getattr(torch, part.dtype))[:numel]))
            if part.dtype == _WIDEST:
                recodes.append(RequantizeItem(number, 0, numel, None, -1, 0, inside))
            else:
                copies += (ReadItem(p.file, p.byte_offset, number, p.start, p.numel, p.dtype) for p in inside)
    copies.sort(key=lambda copy: (copy.file, copy.byte_offset))
    mine = ReadPlan(plan.files, tuple(slots), tuple(copies), recodes=tuple(recodes))
    execute(mine, [each.values for each in read], options, show_progress=False)
    every = iter(read)
    for part in parts:
        yield [next(every) for _ in part.comparison.copies]


def _clipped(pieces: Sequence[Piece], part: _Part) -> tuple[Piece, ...]:
    """Those that lie in the part; they are in order, and there may be one for each row of a matrix."""
    first = max(bisect_right(pieces, part.start, key=lambda piece: piece.start) - 1, 0)
    last = bisect_left(pieces, part.stop, key=lambda piece: piece.start)
    clipped = (clip(piece, part.start, part.stop) for piece in pieces[first:last])
    return tuple(replace(piece, start=piece.start - part.start) for piece in clipped if piece.numel > 0)


def _apart(copies: Sequence[_Values]) -> tuple[float, float] | None:
    """The largest difference from the first copy, and the sum of all; ``None``: all are the same numbers."""
    found = None
    first = copies[0]
    for other in copies[1:]:
        if torch.equal(first.words, other.words):
            continue
        for start in range(0, first.values.numel(), _STEP_NUMEL):
            here = slice(start, start + _STEP_NUMEL)
            pair = first.values[here], other.values[here]
            wide = torch.complex128 if pair[0].is_complex() else torch.float64
            a, b = (values.to(wide) for values in pair)
            same = (a == b) | (a.isnan() & b.isnan())  # zeros of either sign are
            if not (pair[0].is_floating_point() or pair[0].is_complex()):
                same &= pair[0] == pair[1]  # integers beyond 2^53 may be one and the same as floats
            if not same.all():
                apart = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)
                largest, total = found or (0.0, 0.0)
                found = max(largest, apart.max().item()), total + apart.sum().item()
    return found


def united(found: Iterable[ReplicaDifference]) -> list[Drift]:
    """One drift for each tensor, whatever ranks found it, in whatever pieces; the largest difference first.

    The mean is over all elements of the shards that differ. What two ranks have compared counts once.
    """
    tensors: dict[tuple[str, str], list[ReplicaDifference]] = {}
    for each in found:
        tensors.setdefault((each.comparison.name, each.comparison.key), []).append(each)
    drifts = (_one_drift(differences) for differences in tensors.values())
    return sorted(drifts, key=lambda drift: (-drift.largest, drift.name, drift.key))


def _one_drift(differences: Sequence[ReplicaDifference]) -> Drift:
    pieces = sorted(
        differences, key=lambda each: (each.comparison.number, each.comparison.start, each.comparison.numel)
    )
    total, numels, ends = 0.0, dict[int, int](), dict[int, int]()
    for each in pieces:
        asked = each.comparison
        if asked.start >= ends.get(asked.number, 0):
            ends[asked.number] = asked.start + asked.numel
            numels[asked.number] = (asked.whole_numel or asked.numel) * (each.copies - 1)
            total += each.total
    return Drift(
        pieces[0].comparison.name,
        pieces[0].comparison.key,
        max(each.largest for each in pieces),
        total / sum(numels.values()),
        max(each.copies for each in pieces),
        MEAN if any(each.comparison.taken == MEAN for each in pieces) else FIRST,
        any(each.comparison.is_guess for each in pieces),
    )


def judge_drift(found: Iterable[ReplicaDifference], averaged: frozenset[str], policy: str) -> tuple[str, ...]:
    """What becomes of copies that differ: notes for the report.

    Args:
        found: of all ranks.
        averaged: names of which a rule says that they may.
        policy: ``strict``, ``first`` or ``mean``.

    Raises:
        MismatchError: some differ, and the policy is ``strict``.
    """
    drifts = united(found)
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

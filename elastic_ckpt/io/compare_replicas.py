"""Reads the replicas that a plan lists and compares them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from elastic_ckpt.core.metadata import ITEMSIZE, WEIGHTS, SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, ReplicaCheck, RequantizeItem, Slot, in_file_order
from elastic_ckpt.errors import MismatchError, listed
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import execute
from elastic_ckpt.sharding.resolve import FIRST, MEAN

#: Elements whose values are compared at a time, which bounds memory.
_STEP_NUMEL = 1 << 18
#: Holds every value of every saved dtype.
_WIDEST = "float64"
_WORD_NBYTES = 8
_LEAST_NBYTES = 1 << 16
_SHOWN = 6


@dataclass(frozen=True)
class ReplicaDifference:
    """One rank's finding for its range of ``copies`` differing replicas; differences are from the first replica.

    ``files`` are those of the first replica and of the one that is furthest from it, without their folder;
    ``first_is_zero``, ``others_are_zero``: whether that replica, and all others, are zero in that range.
    """

    check: ReplicaCheck
    copies: int
    largest: float
    total: float
    files: tuple[str, ...] = ()
    first_is_zero: bool = False
    others_are_zero: bool = False


@dataclass(frozen=True)
class Drift:
    """Replicas of a tensor that differ.

    Attributes:
        name, key, copies: the tensor, and the number of replicas.
        largest, mean: of the differences from the first replica.
        taken: how they are resolved: ``first`` or ``mean``.
        is_guess: whether only equal shapes suggest that these are replicas.
        names: of all replicas in the checkpoint, where they are not the same.
        files: see :class:`ReplicaDifference`.
    """

    name: str
    key: str
    largest: float
    mean: float
    copies: int
    taken: str
    is_guess: bool = False
    names: tuple[str, ...] = ()
    files: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        what = "" if self.key in WEIGHTS else f" {self.key}"
        return f"{', '.join(self.names or (self.name,))}{what}: {self.copies} copies, {self.apart}"

    @property
    def apart(self) -> str:
        """By how much they differ, and in which files."""
        where = f" ({', '.join(self.files)})" if self.files else ""
        return f"at most {self.largest:.3g} and in the mean {self.mean:.3g} apart{where}"


def find_drift(
    files: tuple[SourceFile, ...], checks: Sequence[ReplicaCheck], options: ReadOptions
) -> list[ReplicaDifference]:
    """Compare this rank's share of the replicas with the first one. Local.

    Raises :class:`DamagedError` if a file cannot be read.
    """
    arena = torch.empty(0, dtype=torch.uint8)
    found = []
    most_nbytes = max(options.staging_nbytes // 2, _LEAST_NBYTES)  # the other half is for decoding
    options = replace(options, chunk_nbytes=min(options.chunk_nbytes, max(most_nbytes // options.threads, 1)))
    for parts in _rounds(checks, most_nbytes):
        needed = sum(part.nbytes for part in parts)
        if needed > arena.numel():
            arena = torch.empty(needed, dtype=torch.uint8)
        replicas = iter(_read(files, parts, arena, options))
        for part in parts:
            raw = [next(replicas) for _ in part.check.replicas]
            apart = _apart(part, raw)
            if apart is not None:
                copies, (largest, total, furthest) = part.check.replicas, apart
                paths = (files[item.file].path for copy in (copies[0], copies[furthest]) for item in copy[:1])
                names = tuple(dict.fromkeys(map(os.path.basename, paths)))
                zero = [not part.values(each).any() for each in raw]
                check = replace(part.check, replicas=())
                found.append(ReplicaDifference(check, len(copies), largest, total, names, zero[0], all(zero[1:])))
    return found


@dataclass(frozen=True)
class _Part:
    """A range of a check, and the dtype in which its replicas are read."""

    check: ReplicaCheck
    dtype: str

    @property
    def replica_nbytes(self) -> int:
        """Bytes of one replica in memory, in whole words."""
        return -(-self.check.numel * ITEMSIZE[self.dtype] // _WORD_NBYTES) * _WORD_NBYTES

    @property
    def nbytes(self) -> int:
        return len(self.check.replicas) * self.replica_nbytes

    def values(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.view(getattr(torch, self.dtype))[: self.check.numel]


def _rounds(checks: Iterable[ReplicaCheck], most_nbytes: int) -> Iterator[list[_Part]]:
    """What is read at once: many small checks, or a range of a large one."""
    parts: list[_Part] = []
    nbytes = 0
    for check in checks:
        dtype = _dtype_of(check)
        room = most_nbytes // max(len(check.replicas), 1) // _WORD_NBYTES * _WORD_NBYTES
        step = max(room // ITEMSIZE[dtype], 1)
        for start in range(0, check.numel, step):
            part = _Part(check.part(start, min(start + step, check.numel)), dtype)
            if parts and nbytes + part.nbytes > most_nbytes:
                yield parts
                parts, nbytes = [], 0
            parts.append(part)
            nbytes += part.nbytes
    if parts:
        yield parts


def _dtype_of(check: ReplicaCheck) -> str:
    """The files' dtype, if replicas can be compared bytewise; else one that holds the values of all."""
    items = [item for replica in check.replicas for item in replica]
    dtypes = {item.dtype for item in items}
    is_quantized = any(item.code is not None for item in items)
    return dtypes.pop() if len(dtypes) == 1 and not is_quantized else _WIDEST


def _read(
    files: tuple[SourceFile, ...], parts: Sequence[_Part], arena: torch.Tensor, options: ReadOptions
) -> list[torch.Tensor]:
    """The bytes of each replica of each part, padded to whole words; decoded where :func:`_dtype_of` says so."""
    slots: list[Slot] = []
    raw: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    items: list[ReadItem] = []
    requantize: list[RequantizeItem] = []
    position = 0
    for part in parts:
        numel = part.check.numel
        for replica in part.check.replicas:
            number, buffer = len(slots), arena[position : position + part.replica_nbytes]
            position += part.replica_nbytes
            if sum(item.numel for item in replica) < numel:
                buffer.zero_()
            buffer[-_WORD_NBYTES:] = 0  # padding after the last element
            sources = tuple(replace(item, slot=number) for item in replica)
            if part.dtype == _WIDEST:
                requantize.append(RequantizeItem(number, 0, numel, None, -1, 0, sources))
            else:
                items += sources
            slots.append(Slot("", 0, "", numel, part.dtype))
            raw.append(buffer)
            values.append(part.values(buffer))
    plan = ReadPlan(files, tuple(slots), in_file_order(items), tuple(requantize))
    execute(plan, values, options, show_progress=False)
    return raw


def _apart(part: _Part, replicas: Sequence[torch.Tensor]) -> tuple[float, float, int] | None:
    """The largest difference from the first replica, the sum of all, and the replica that has the largest.

    ``None`` if all numbers are equal.
    """
    found = None
    first = replicas[0]
    for number, other in enumerate(replicas[1:], 1):
        if torch.equal(first.view(torch.int64), other.view(torch.int64)):  # six times as fast as bytewise
            continue
        left, right = part.values(first), part.values(other)
        for start in range(0, part.check.numel, _STEP_NUMEL):
            here = slice(start, start + _STEP_NUMEL)
            same, apart = differences(left[here], right[here])
            if not same.all():
                largest, total, furthest = found or (0.0, 0.0, number)
                if apart.max().item() > largest:
                    largest, furthest = apart.max().item(), number
                found = largest, total + apart.sum().item(), furthest
    return found


def differences(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per element: whether both are the same number or both NaN, whatever the dtypes; and the absolute difference.

    The difference is infinite if only one is finite.
    """
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())  # zeros of either sign are equal
    if left.dtype == right.dtype and not (left.is_floating_point() or left.is_complex()):
        same &= left == right  # distinct integers beyond 2^53 may be equal as floats
    return same, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)


def united(found: Iterable[ReplicaDifference]) -> list[Drift]:
    """One drift per tensor over all ranks and ranges, largest difference first.

    The mean is over all elements of the shards that differ. Elements compared by two ranks count once.
    """
    tensors: dict[tuple[str, str], list[ReplicaDifference]] = {}
    for each in found:
        tensors.setdefault((each.check.name, each.check.key), []).append(each)
    drifts = map(_one_drift, tensors.values())
    return sorted(drifts, key=lambda drift: (-drift.largest, drift.name, drift.key))


def _one_drift(differences: Sequence[ReplicaDifference]) -> Drift:
    parts = sorted(differences, key=lambda each: (each.check.number, each.check.start, each.check.numel))
    total, numels, ends = 0.0, dict[int, int](), dict[int, int]()
    for each in parts:
        asked = each.check
        if asked.start >= ends.get(asked.number, 0):
            ends[asked.number] = asked.start + asked.numel
            numels[asked.number] = (asked.whole_numel or asked.numel) * (each.copies - 1)
            total += each.total
    return Drift(
        parts[0].check.name,
        parts[0].check.key,
        max(each.largest for each in parts),
        total / sum(numels.values()),
        max(each.copies for each in parts),
        MEAN if any(each.check.taken == MEAN for each in parts) else FIRST,
        any(each.check.is_guess for each in parts),
        tuple(dict.fromkeys(name for each in parts for name in each.check.names)),
        max(parts, key=lambda each: each.largest).files,
    )


def without_untrained(
    found: Sequence[ReplicaDifference], known: frozenset[str]
) -> tuple[list[ReplicaDifference], frozenset[str]]:
    """All but differences of copies that nothing trains, and the names of these.

    They are parameters of tied pipeline modules, on stages after the first.

    A ``TiedLayerSpec`` synchronizes its ``tied_weight_attr`` alone. Whatever else its module has (position embeddings,
    a norm) gets no gradient on the later stages: it is among those ``known``, or all states of the copy are zero, which
    weight decay on gradients prevents.
    """
    of_stages = [each for each in found if each.check.is_of_stages]
    states = [each for each in of_stages if each.check.key not in WEIGHTS]
    zero = {each.check.name for each in states} - {each.check.name for each in states if not each.others_are_zero}
    names = frozenset(zero | {each.check.name for each in of_stages if each.check.name in known})
    return [each for each in found if each.check.name not in names or not each.check.is_of_stages], names


def judge_drift(found: Sequence[ReplicaDifference], may_differ: frozenset[str], policy: str) -> tuple[str, ...]:
    """Notes for the report about replicas that differ on any rank; ``may_differ`` are the names that may, by a rule.

    Raises :class:`MismatchError` if others differ and ``policy`` is ``strict`` (not ``first`` or ``mean``), except for
    copies that nothing trains.
    """
    # whatever a rule or the checkpoint says, another stage trains what is zero on the first
    states = (each for each in found if each.check.is_of_stages and each.check.key not in WEIGHTS)
    idle = {each.check.name for each in states if each.first_is_zero}
    may_differ -= idle
    kept, of_one_stage = without_untrained(found, may_differ)
    drifts = united(kept)
    asked = [drift for drift in drifts if drift.name not in may_differ]
    guessed = [drift for drift in asked if drift.is_guess]
    if guessed:
        raise _no_copies(guessed)
    if asked and policy not in (FIRST, MEAN):
        raise _different(asked, idle)
    notes = [f"only the first pipeline stage trains its copy, which was taken: {listed(sorted(of_one_stage))}"]
    notes = notes if of_one_stage else []
    for drift in drifts[:_SHOWN]:
        notes.append(f"replicated, but different when saved: {drift}; the {drift.taken} was taken")
    if len(drifts) > _SHOWN:
        notes.append(f"and {len(drifts) - _SHOWN} more replicated tensors that were different when saved")
    return tuple(notes)


def _different(drifts: Sequence[Drift], idle: Collection[str]) -> MismatchError:
    """``idle``: names of which the first pipeline stage's copy is not the one that is trained."""
    first = '"elastic_checkpoint": {"replicated_params": "first"} keeps'
    if any(drift.names for drift in drifts):
        problem = "weights that are one in the live model have different values under their names in the checkpoint"
        expected = "equal values under each name of a tied weight"
        remedy = f"build the model as it was saved, without this tie; or {first} the values of the name that is first"
    else:
        problem = "copies of replicated parameters differ between the ranks that saved them, and only one can be kept"
        expected = "equal copies on every tensor-parallel rank and pipeline stage"
        remedy = (
            "a later pipeline stage trains its copy, and the first does not: resume with as many stages as were saved"
            if any(drift.name in idle for drift in drifts)
            else f'{first} the copy of the first rank, {{"replicated_params": "mean"}} takes the mean of all '
            "tensor-parallel ranks"
        )
    more = f"; and {len(drifts) - _SHOWN} more" if len(drifts) > _SHOWN else ""
    names = dict.fromkeys(name for drift in drifts for name in drift.names or (drift.name,))
    found = "; ".join(map(str, drifts[:_SHOWN])) + more
    return MismatchError(problem, parameter=listed(names), expected=expected, found=found, remedy=remedy)


def _no_copies(guessed: Sequence[Drift]) -> MismatchError:
    """Tensors of equal shape but other values on every rank: most likely each rank's own shard."""
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

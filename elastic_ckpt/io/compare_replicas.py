"""Reads the replicas that a plan lists and compares them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from elastic_ckpt.core.metadata import ITEMSIZE, WEIGHTS, SourceFile
from elastic_ckpt.core.read_plan import (
    Part,
    ReadItem,
    ReadPlan,
    ReplicaCheck,
    RequantizeItem,
    TargetTensor,
    in_file_order,
)
from elastic_ckpt.core.text import counted
from elastic_ckpt.distributed import in_buckets
from elastic_ckpt.errors import UNTIE, MismatchError, Remedy, keeps_first, listed
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
#: The number of a layer or an expert, in a name.
_LAYER = re.compile(r"(?<![a-z\d])\d+(?![a-z\d])")


@dataclass(frozen=True)
class Drift:
    """Replicas that differ: of a tensor, or of the range of it that one rank has compared."""

    check: ReplicaCheck  # what was compared, without the items that read it
    copies: int  # number of replicas
    largest: float  # difference from the first replica
    #: Names of the first replica's file and of that furthest from it.
    files: tuple[str, ...] = field(default=(), compare=False)
    first_is_zero: bool = False
    others_are_zero: bool = False  # all of them

    def __or__(self, other: Drift) -> Drift:
        """Both ranges, or shards, of one tensor."""
        one = self.check
        two = other.check
        taken = MEAN if MEAN in (one.taken, two.taken) else FIRST
        names = tuple(dict.fromkeys(one.names + two.names))
        check = replace(one, taken=taken, is_guess=one.is_guess or two.is_guess, names=names)
        furthest = max(self, other, key=lambda each: each.largest)
        return replace(furthest, check=check, copies=max(self.copies, other.copies))

    def __str__(self) -> str:
        what = "" if self.check.key in WEIGHTS else f" {self.check.key}"
        return (
            f"{', '.join(self.check.names or (self.check.name,))}{what}: {counted(self.copies, 'copy')}, {self.apart}"
        )

    @property
    def apart(self) -> str:
        """By how much they differ, and in which files."""
        return f"at most {self.largest:.3g} apart" + (f" ({', '.join(self.files)})" if self.files else "")


def find_drift(files: tuple[SourceFile, ...], checks: Sequence[ReplicaCheck], options: ReadOptions) -> list[Drift]:
    """Compare this rank's share of the replicas with the first one. Local.

    Raises :class:`DamagedError` if a file cannot be read.
    """
    found: list[Drift] = []
    for plan, copies in comparisons(files, checks, options, found):
        execute(plan, copies, options_of_comparisons(options))
    return found


def options_of_comparisons(options: ReadOptions) -> ReadOptions:
    """How to read replicas: within half of the memory, of which the other half is for decoding."""
    return replace(options, chunk_nbytes=min(options.chunk_nbytes, max(_most_nbytes(options) // options.threads, 1)))


def _most_nbytes(options: ReadOptions) -> int:
    return max(options.staging_nbytes // 2, _LEAST_NBYTES)


def comparisons(
    files: tuple[SourceFile, ...], checks: Sequence[ReplicaCheck], options: ReadOptions, found: list[Drift]
) -> Iterator[Part]:
    """Yield what is to be read of replicas, part by part, and add to ``found`` which differ. Local.

    Whoever asks for the next part has read the one before.
    """
    most_nbytes = _most_nbytes(options)
    parts: list[ReplicaCheck] = []
    for check in checks:
        step = max(most_nbytes // max(len(check.replicas), 1) // ITEMSIZE[_dtype_of(check)], 1)
        parts += [check.part(start, min(start + step, check.numel)) for start in range(0, check.numel, step)]
    sizes = [len(part.replicas) * part.numel * ITEMSIZE[_dtype_of(part)] for part in parts]
    for at_once in in_buckets(parts, sizes, most_nbytes):
        plan, values = _part_of(files, at_once)
        yield plan, [*chain.from_iterable(values)]
        for part, copies in zip(at_once, values, strict=True):
            if (apart := _apart(copies)) is not None:
                largest, furthest = apart
                paths = (files[item.file].path for at in (0, furthest) for item in part.replicas[at][:1])
                names = tuple(dict.fromkeys(map(os.path.basename, paths)))
                zero = [not copy.any() for copy in copies]
                found.append(Drift(replace(part, replicas=()), len(copies), largest, names, zero[0], all(zero[1:])))


def _dtype_of(check: ReplicaCheck) -> str:
    """The files' dtype, if replicas can be compared bytewise; else one that holds the values of all."""
    items = chain.from_iterable(check.replicas)
    dtypes = {item.dtype if item.code is None else _WIDEST for item in items}
    return dtypes.pop() if len(dtypes) == 1 else _WIDEST


def _part_of(
    files: tuple[SourceFile, ...], checks: Sequence[ReplicaCheck]
) -> tuple[ReadPlan, list[list[torch.Tensor]]]:
    """What to read for each replica of each check, and where to; decoded where :func:`_dtype_of` says so."""
    targets: list[TargetTensor] = []
    found: list[list[torch.Tensor]] = []
    items: list[ReadItem] = []
    requantize: list[RequantizeItem] = []
    for check in checks:
        numel = check.numel
        dtype = _dtype_of(check)
        found.append([])
        for replica in check.replicas:
            sources = tuple(replace(item, target=len(targets)) for item in replica)
            if dtype == _WIDEST:
                requantize.append(RequantizeItem(len(targets), 0, numel, None, -1, 0, sources))
            else:
                items += sources
            targets.append(TargetTensor("", 0, "", numel, dtype))
            is_full = sum(item.numel for item in replica) >= numel
            found[-1].append((torch.empty if is_full else torch.zeros)(numel, dtype=getattr(torch, dtype)))
    return ReadPlan(files, tuple(targets), in_file_order(items), tuple(requantize)), found


def _apart(copies: Sequence[torch.Tensor]) -> tuple[float, int] | None:
    """The largest difference from the first copy, and the copy that has it; ``None`` if all numbers are equal."""
    found = None
    first = copies[0]
    for number, other in enumerate(copies[1:], 1):
        a, b = (each.view(torch.uint8) for each in (first, other))
        words = a.numel() // _WORD_NBYTES * _WORD_NBYTES  # compared six times as fast as bytes
        if a[:words].view(torch.int64).equal(b[:words].view(torch.int64)) and a[words:].equal(b[words:]):
            continue
        for start in range(0, first.numel(), _STEP_NUMEL):
            here = slice(start, start + _STEP_NUMEL)
            same, apart = differences(first[here], other[here])
            if not same.all():
                found = max(found or (0.0, number), (apart.max().item(), number), key=lambda each: each[0])
    return found


def differences(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per element: whether both are the same number or both NaN, whatever the dtypes; and the absolute difference.

    The difference is infinite if only one is finite.
    """
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    a = left.to(wide)
    b = right.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())  # zeros of either sign are equal
    if left.dtype == right.dtype and not (left.is_floating_point() or left.is_complex()):
        same &= left == right  # distinct integers beyond 2^53 may be equal as floats
    return same, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)


def united(found: Iterable[Drift]) -> list[Drift]:
    """One drift per tensor over all ranks and ranges, largest difference first."""
    tensors: dict[tuple[str, str], Drift] = {}
    for each in found:
        place = each.check.name, each.check.key
        tensors[place] = tensors[place] | each if place in tensors else each
    return sorted(tensors.values(), key=lambda drift: (-drift.largest, drift.check.name, drift.check.key))


def without_untrained(found: Sequence[Drift], known: frozenset[str]) -> tuple[list[Drift], frozenset[str]]:
    """All but differences of copies that nothing trains, and the names of these.

    A ``TiedLayerSpec`` synchronizes its ``tied_weight_attr`` alone. Whatever else its module has (position embeddings,
    a norm) gets no gradient on pipeline stages after the first: it is among those ``known``, or all states of the copy
    are zero, which weight decay on gradients prevents.
    """
    of_stages = [each for each in found if each.check.is_of_stages]
    states = [each for each in of_stages if each.check.key not in WEIGHTS]
    zero = {each.check.name for each in states} - {each.check.name for each in states if not each.others_are_zero}
    names = frozenset(zero | {each.check.name for each in of_stages if each.check.name in known})
    return [each for each in found if each.check.name not in names or not each.check.is_of_stages], names


def judge_drift(
    found: Sequence[Drift], may_differ: frozenset[str], policy: str, has_live_model: bool = True
) -> tuple[str, ...]:
    """Notes for the report about replicas that differ on any rank; ``may_differ`` are the names that may, by a rule.

    ``has_live_model``: whether the shapes of guesses are those of a live model, too.

    Raises :class:`MismatchError` if others differ and ``policy`` is ``strict`` (not ``first`` or ``mean``), except for
    copies that nothing trains.
    """
    # whatever a rule or the checkpoint says, another stage trains what is zero on the first
    states = (each for each in found if each.check.is_of_stages and each.check.key not in WEIGHTS)
    idle = {each.check.name for each in states if each.first_is_zero}
    may_differ -= idle
    kept, of_one_stage = without_untrained(found, may_differ)
    drifts = united(kept)
    asked = [drift for drift in drifts if drift.check.name not in may_differ]
    guessed = [drift for drift in asked if drift.check.is_guess]
    if guessed:  # of equal shape, but with other values on every rank
        raise _not_copies(guessed, has_live_model)
    if asked and policy not in (FIRST, MEAN):
        raise _different(asked, idle)
    notes = [f"only the first pipeline stage trains its copy, which was taken: {listed(sorted(of_one_stage))}"]
    notes = notes if of_one_stage else []
    for drift in drifts[:_SHOWN]:
        notes.append(f"replicated, but different when saved: {drift}; the {drift.check.taken} was taken")
    if len(drifts) > _SHOWN:
        notes.append(f"and {len(drifts) - _SHOWN} more replicated tensors that were different when saved")
    return tuple(notes)


def _not_copies(guessed: Sequence[Drift], has_live_model: bool) -> MismatchError:
    """Guessed copies differ: each may be a rank's own shard.

    A live model with the shape of one shard would be too small for all of them: no rule makes it fit then.
    """
    patterns = dict.fromkeys(_LAYER.sub(r"\\d+", re.escape(drift.check.name)) for drift in guessed)
    sharded = Remedy("build the model with the sizes it was saved with", when="if each rank holds a shard of its own")
    if not has_live_model:
        columns = {"tp_rules": [{"pattern": pattern, "kind": "column"} for pattern in patterns]}
        sharded = Remedy(when="if each rank holds a shard of its own", config=columns)
    copies = {
        "tp_rules": [{"pattern": pattern, "kind": "replicated"} for pattern in patterns],
        "replicated_params": "first",
    }
    drifted = Remedy(when="if they are copies that drifted apart", config=copies)
    return MismatchError(
        "tensors that by their shapes alone would be copies are not the same on the tensor-parallel ranks",
        expected="equal copies, or a rule that says how they are sharded",
        found="; ".join(map(str, guessed[:_SHOWN])),
        parameter={drift.check.name for drift in guessed},
        remedy=(sharded, drifted),
    )


def _different(drifts: Sequence[Drift], idle: Collection[str]) -> MismatchError:
    """``idle``: names of which the first pipeline stage's copy is not the one that is trained."""
    problem = "copies of replicated parameters differ between the ranks that saved them, and only one can be kept"
    expected = "equal copies on every tensor-parallel rank and pipeline stage"
    remedy = [
        Remedy("keeps the copy of the first rank", config={"replicated_params": "first"}),
        Remedy("keeps the mean of all ranks", config={"replicated_params": "mean"}),
    ]
    if any(drift.check.names for drift in drifts):
        problem = "weights that are one in the live model have different values under their names in the checkpoint"
        expected = "equal values under each name of a tied weight"
        remedy = [UNTIE, keeps_first({drift.check.names[0] for drift in drifts if drift.check.names})]
    elif any(drift.check.name in idle for drift in drifts):
        trained = "a later pipeline stage trains its copy, and the first does not: resume with as many stages as saved"
        remedy = [Remedy(trained)]
    more = f"; and {len(drifts) - _SHOWN} more" if len(drifts) > _SHOWN else ""
    names = dict.fromkeys(name for drift in drifts for name in drift.check.names or (drift.check.name,))
    found = "; ".join(map(str, drifts[:_SHOWN])) + more
    return MismatchError(problem, parameter=names, expected=expected, found=found, remedy=remedy)

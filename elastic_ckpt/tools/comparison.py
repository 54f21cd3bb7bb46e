"""Compares two checkpoints by logical tensor, whatever their topologies and formats, and the copies inside one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.adopted_names import adopt_names, all_names
from elastic_ckpt.core.extra_states import kept_in
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.metadata import BUFFER, FROZEN, ITEMSIZE, MASTER, WEIGHTS, CheckpointMetadata
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import TrainingState, left_in_file
from elastic_ckpt.errors import (
    ElasticCkptError,
    LayoutError,
    MismatchError,
    MissingFilesError,
    UnsupportedError,
    listed,
)
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import differences, find_drift, united, without_untrained
from elastic_ckpt.report import progress_bar
from elastic_ckpt.sharding.rules import Preset
from elastic_ckpt.storage import inherited
from elastic_ckpt.tools.inspection import ERROR, NOTE, Finding
from elastic_ckpt.tools.logical import LogicalReader
from elastic_ckpt.tools.opened import OpenedCheckpoint, locate, open_checkpoint

DIFFERS = "differs"
MISSING = "missing"
_EXTRA_STATES = "extra states of modules"
_LOSS_SCALE = "loss scale"
_MIB = 1 << 20
#: Hyperparameters of all pairs of param groups; a group of each layer has a dozen.
_MOST_HYPERPARAMETERS = 1 << 18
#: Of each side, why it is without optimizer states; ``None``: it has them.
Without = tuple[ElasticCkptError | None, ElasticCkptError | None]
_ONE_CHUNK = ReadOptions(threads=1, chunk_nbytes=16 * _MIB, staging_nbytes=16 * _MIB)


@dataclass(frozen=True)
class Difference:
    """A tensor, ``(name, key)``, or other fact that differs between two checkpoints, or is missing from one."""

    name: str
    key: str
    what: str  # ``"differs"`` or ``"missing"``
    detail: str  # values, shapes or dtypes, or which side lacks it
    max_abs: float | None = None  # largest difference; ``None`` if values cannot be subtracted
    at: tuple[int, ...] | None = None  # its index in the whole tensor
    differing: int = 0  # number of elements that differ
    scale: float = 0.0  # largest absolute value of the first tensor, where they differ


@dataclass(frozen=True)
class Comparison:
    """The outcome: equal tensors and other facts, differences, bytes compared, and what could not be compared."""

    equal: int
    differences: tuple[Difference, ...]
    nbytes: int
    notes: tuple[str, ...] = ()
    #: By kind (key of a tensor, or another fact): how many are equal, differ, are missing, and the largest difference.
    kinds: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)


def open_both(first: str, second: str, config: ElasticConfig) -> tuple[OpenedCheckpoint, OpenedCheckpoint, Without]:
    """Two checkpoints, and why one or both are opened without optimizer states.

    States that only a load can name are left out, and those of which files are missing, deleted to save space for
    example, where the weights are in other files. Raises :class:`ElasticCkptError` where they are not.
    """
    left, without_left = _opened(first, config)
    right, without_right = _opened(second, config)
    return left, right, (without_left, without_right)


def _opened(folder: str, config: ElasticConfig) -> tuple[OpenedCheckpoint, ElasticCkptError | None]:
    found = locate(folder, None, config.trust_pickle)
    try:
        return open_checkpoint(found, config), None
    except (MismatchError, LayoutError) as error:
        is_missing = isinstance(error, MissingFilesError) or not found.files.optimizer
        if isinstance(error, LayoutError) and not is_missing:
            raise
        try:
            return open_checkpoint(found, config, with_states=False), error
        except LayoutError:
            raise error from None


def compare(
    first: OpenedCheckpoint,
    second: OpenedCheckpoint,
    threads: int,
    progress: bool | None = None,
    without: Without = (None, None),
) -> Comparison:
    """Compare masters, states, buffers, frozen weights, scalar states, hyperparameters and counters of two checkpoints.

    Values are compared exactly, 8-bit states after dequantization; zeros of either sign are equal, and so are NaNs.
    Memory: a few chunks of 16 MiB per thread.

    ``without``: why a side has weights alone; the masters of the other side are then rounded to their dtype, as
    DeepSpeed makes the weights of them, and its optimizer states are one difference together.

    Raises :class:`ElasticCkptError` if one cannot be read, or its tensor-parallel shards cannot be joined.
    """
    left_metadata = first.metadata
    right_metadata = adopt_names(second.metadata, all_names(left_metadata), "in A")
    sides = [
        _Side(left_metadata, first.config, without[0] is not None),
        _Side(right_metadata, second.config, without[1] is not None),
    ]
    for side, other in (sides, reversed(sides)):
        side.adopt(other)
    left_out, notes = _leave_out_states(sides, without)
    notes += right_metadata.notes[len(second.metadata.notes) :]
    left, right = (side.tensors for side in sides)
    lacking = [Difference(*key, MISSING, "the second checkpoint does not have it") for key in left if key not in right]
    lacking += [Difference(*key, MISSING, "the first checkpoint does not have it") for key in right if key not in left]
    both = [key for key in left if key in right]
    differing = []
    with (
        ThreadPoolExecutor(threads, "elastic_ckpt", *inherited()) as pool,
        progress_bar("comparing", sum(left[key].nbytes for key in both), progress) as bar,
    ):
        for key, difference in zip(both, pool.map(lambda key: _compare(sides, key), both), strict=True):
            bar.update(left[key].nbytes)
            if difference is not None:
                differing.append(difference)
    training = (first.checkpoint.training_state, second.checkpoint.training_state)
    facts = list(_facts(left_metadata, right_metadata, training))
    if any(without):
        facts = [(kind, fact) for kind, fact in facts if kind != _LOSS_SCALE]  # which is in optimizer-states files
    other_facts = [(kind, fact) for kind, fact in facts if fact is not None]
    equal = Counter(key for _, key in both) - Counter(each.key for each in differing)
    equal += Counter(kind for kind, fact in facts if fact is None)
    one_sided, not_compared = ([], []) if any(without) else _not_understood(left_metadata, right_metadata)
    notes += [f"{which}: {note}" for which, side in zip("AB", sides, strict=True) for note in side.notes]
    of_tensors = (*lacking, *differing, *one_sided, *left_out)
    return Comparison(
        equal=equal.total(),
        differences=(*of_tensors, *(fact for _, fact in other_facts)),
        nbytes=sum(side.tensors[key].nbytes for side in sides for key in both),
        notes=(*notes, *not_compared),
        kinds=_kinds(equal, [*((each.key, each) for each in of_tensors), *other_facts]),
    )


def _kinds(equal: Mapping[str, int], found: Sequence[tuple[str, Difference]]) -> dict[str, dict[str, float | str]]:
    kinds: dict[str, dict[str, float | str]] = {}
    by_kind: dict[str, list[Difference]] = {kind: [] for kind in equal}
    for kind, each in found:
        by_kind.setdefault(kind, []).append(each)
    for kind, mine in sorted(by_kind.items(), key=lambda item: (item[0] not in WEIGHTS, item[0])):
        counts = (sum(each.what == what for each in mine) for what in (DIFFERS, MISSING))
        apart = max((each.max_abs for each in mine if each.max_abs is not None), default="")
        names = ("equal", DIFFERS, MISSING, "largest")
        kinds[kind] = dict(zip(names, (equal.get(kind, 0), *counts, apart), strict=True))
    return kinds


def _leave_out_states(sides: Sequence[_Side], without: Without) -> tuple[list[Difference], list[str]]:
    """Take the states out of the side that alone has them: a difference, and notes on what is compared instead."""
    why = next(filter(None, without), None)
    if why is None:
        return [], []
    where = f"{why.problem} ({why.file})"
    if all(without):
        return [], [f"optimizer states are not compared: {where}"]
    whole, lacking = sides if without[1] else reversed(sides)
    states = {key for key in whole.tensors if key[1] not in (*WEIGHTS, BUFFER)}
    for key in states:
        del whole.tensors[key]
    notes = [f"{len(states)} tensors of optimizer states, their steps and hyperparameters are not compared: {where}"]
    dtypes = {lacking.tensors[key].dtype for key in whole.tensors if _is_rounded(sides, key)}
    if dtypes:
        notes.append(f"masters are compared as they are rounded to the other side's weights: {listed(dtypes)}")
    which = "second" if without[1] else "first"
    lost = Difference(
        "all parameters", "optimizer states", MISSING, f"the {which} checkpoint does not have them: {where}"
    )
    return [lost], notes


def _is_rounded(sides: Sequence[_Side], key: tuple[str, str]) -> bool:
    """Whether one side has the master of a weight of which the other, without states, has the rounded one."""
    both = [side.tensors.get(key) for side in sides]
    if key[1] != MASTER or sides[0].is_alone == sides[1].is_alone or both[0] is None or both[1] is None:
        return False
    return both[0].dtype != both[1].dtype


class _Side:
    def __init__(self, metadata: CheckpointMetadata, config: ElasticConfig, is_alone: bool = False) -> None:
        #: Whether it has weights alone, for want of files or names.
        self.is_alone = is_alone
        self.reader = LogicalReader(metadata, config, _ONE_CHUNK)
        self.notes = (*self.reader.notes, *self.reader.compare_copies())
        self.tensors = dict(self.reader.tensors)

    def adopt(self, other: _Side) -> None:
        """Take the other side's word for what this one does not tell: buffers, parameters, ties."""
        if not self.reader.metadata.source.foreign and self.reader.metadata.parameters:
            return
        known = other.tensors
        for name in [name for name, key in self.tensors if key == FROZEN and (name, key) not in known]:
            target = other.reader.metadata.aliases.get(name)
            key = next((key for key in (BUFFER, MASTER) if (name, key) in known), None)
            if key is not None:
                self.tensors[name, key] = self.tensors.pop((name, FROZEN))
            elif target is not None:
                known[name, FROZEN] = known.get((target, MASTER)) or known[target, FROZEN]


def _compare(sides: list[_Side], key: tuple[str, str]) -> Difference | None:
    left, right = (side.tensors[key] for side in sides)
    if left.shape != right.shape:
        return Difference(*key, DIFFERS, f"shape {left.shape} and {right.shape}")
    step = 16 * _MIB // max(ITEMSIZE[left.dtype], ITEMSIZE[right.dtype])
    is_rounded = _is_rounded(sides, key)
    dtype = getattr(torch, (left if sides[0].is_alone else right).dtype)
    worst = 0.0
    at = 0
    differing = 0
    scale = 0.0
    for start in range(0, left.numel, step):
        wanted = FlatRange(start, min(start + step, left.numel))
        values = [torch.empty(wanted.numel, dtype=getattr(torch, each.dtype)) for each in (left, right)]
        for side, out in zip(sides, values, strict=True):
            side.reader.read(side.tensors[key], wanted, out)
        if is_rounded:
            values = [values[0].to(dtype), values[1].to(dtype)]
        if left.dtype == right.dtype and torch.equal(*(value.view(torch.uint8) for value in values)):
            continue
        same, apart = differences(*values)
        if count := int((~same).sum()):
            differing = differing + count
            scale = max(scale, float(values[0].double().abs().nan_to_num().max()))
            index = int(apart.argmax())
            if (largest := float(apart.reshape(-1)[index])) >= worst:
                worst = largest
                at = start + index
    if differing:
        where = tuple(int(index) for index in torch.unravel_index(torch.tensor(at), left.shape)) if left.shape else ()
        of = f"{differing} of {left.numel} elements, at most {worst:.3g} apart, at {list(where)}"
        return Difference(*key, DIFFERS, of, worst, where, differing, scale)
    if left.dtype == right.dtype or is_rounded:
        return None
    return Difference(*key, DIFFERS, f"{left.dtype} and {right.dtype}", 0.0)


def _facts(
    left: CheckpointMetadata, right: CheckpointMetadata, training: tuple[TrainingState, TrainingState]
) -> Iterator[tuple[str, Difference | None]]:
    """Facts beside the tensors: the kind of each, and a difference, or ``None`` where they agree."""
    names = [name for name in left.parameters if name in right.parameters]
    shared = [(name, left.parameters[name], right.parameters[name]) for name in names]
    for name, *saved in shared:
        mine, theirs = (
            {**dict(one.scalars), **{s.key: replace(s, file=0, byte_offset=0) for s in one.replicated}} for one in saved
        )
        for key in sorted({*mine, *theirs}):
            yield key, _fact(name, key, mine.get(key), theirs.get(key))
    pairs = dict.fromkeys((mine.group, theirs.group) for _, mine, theirs in shared)  # numbers may differ
    for fact in _of_groups(left, right, pairs):
        yield "hyperparameters", fact
    for key in ("global_steps", "global_samples", "skipped_steps"):
        yield "counters", _fact(key, "counter", *(state.counters.get(key) for state in training))
    scales = [state.loss_scale for state in training]
    values = (None if scale is None else scale.values.get("cur_scale") for scale in scales)
    yield _LOSS_SCALE, _fact(_LOSS_SCALE, "", *values)
    yield from _of_extra_states(left, right)
    yield "lr scheduler", _fact("lr scheduler", "", *(repr(state.lr_scheduler) for state in training))


def _of_groups(
    left: CheckpointMetadata, right: CheckpointMetadata, pairs: Iterable[tuple[int, int]]
) -> Iterator[Difference | None]:
    """Hyperparameters of pairs of param groups that have parameters in common: one group may be in many pairs."""
    compared = 0
    texts: dict[int, str] = {}  # a value may be long, and is compared in each pair

    def text(value: Any) -> str:
        if id(value) not in texts:
            texts[id(value)] = repr(value)
        return texts[id(value)]

    for pair in pairs:
        group = left.groups[pair[0]]
        other = right.groups[pair[1]]
        compared += len(group) + len(other)
        if compared > _MOST_HYPERPARAMETERS:
            problem = "the param groups of these checkpoints have too many hyperparameters to be compared"
            expected = f"at most {_MOST_HYPERPARAMETERS} in all pairs of groups with a parameter in common"
            found = f"{compared} and more, in {len(left.groups)} and {len(right.groups)} groups"
            raise UnsupportedError(problem, left.source.folder, expected, found, remedy="compare other checkpoints")
        for key in sorted({*group, *other}, key=str):
            of_degree = key == "name" and group.get("moe")  # ep_size_2
            if not (str(key).startswith("_ds_") or of_degree):
                yield _fact(f"param group {pair[0]}", str(key), group.get(key), other.get(key), text=text)


def _of_extra_states(left: CheckpointMetadata, right: CheckpointMetadata) -> Iterator[tuple[str, Difference | None]]:
    """What modules kept beside parameters and buffers; other formats than DeepSpeed's own have no place for it."""
    if left.source.foreign or right.source.foreign:
        return
    of_left = kept_in(left.extra_states)
    of_right = kept_in(right.extra_states)
    for name in sorted({*of_left, *of_right}):
        if name not in of_right:
            yield _EXTRA_STATES, Difference(name, "", MISSING, "the second checkpoint does not have it")
        elif name not in of_left:
            yield _EXTRA_STATES, Difference(name, "", MISSING, "the first checkpoint does not have it")
        elif left.extra_states[name].digest != right.extra_states[name].digest:
            yield _EXTRA_STATES, Difference(name, "", DIFFERS, "the values of get_extra_state differ")
        else:
            yield _EXTRA_STATES, None


def _not_understood(first: CheckpointMetadata, second: CheckpointMetadata) -> tuple[list[Difference], list[str]]:
    """Opaque and damaged states: a difference if only one side has it, else a note. Hyperparameters left unread."""
    left, right = ({**metadata.states.opaque, **metadata.states.damaged} for metadata in (first, second))
    groups = chain.from_iterable(group.items() for metadata in (first, second) for group in metadata.groups)
    unread = dict.fromkeys((key, each) for key, value in groups for each in left_in_file(value))
    notes = [f"not compared: hyperparameter {key}, {each}" for key, each in unread]
    both = sorted(left.keys() & right.keys())
    notes += [f"not compared: optimizer state {key}, whose layout is not understood ({left[key]})" for key in both]
    differences = [
        Difference("optimizer", key, MISSING, f"the {lacks} checkpoint does not have it in this form ({there[key]})")
        for lacks, there, other in (("second", left, right), ("first", right, left))
        for key in sorted(there.keys() - other.keys())
    ]
    return differences, notes


def _fact(name: str, key: str, mine: Any, theirs: Any, *, text: Callable[[Any], str] = repr) -> Difference | None:
    if mine == theirs or text(mine) == text(theirs):
        return None
    apart = abs(mine - theirs) if isinstance(mine, int | float) and isinstance(theirs, int | float) else None
    what = MISSING if None in (mine, theirs) else DIFFERS
    return Difference(name, key, what, f"{text(mine):.120} and {text(theirs):.120}", apart)


def check_copies(metadata: CheckpointMetadata, config: ElasticConfig, threads: int) -> Iterator[Finding]:
    """Findings on replicas that differ, by the names that ``"rename"`` gives them.

    Without a live model, only rules determine which tensors are replicated over tensor-parallel ranks; those without
    one get a note. Raises :class:`MismatchError` if ``"rename"`` gives two tensors one name.
    """
    errors: dict[str, ElasticCkptError] = {}
    reader = LogicalReader(rename_saved(metadata, config.rename), config, errors=errors)
    metadata = reader.metadata
    unknown = set(errors)
    drifts = find_drift(metadata.files, reader.replica_checks, ReadOptions(threads=threads))
    of_stages = {each.check.name for each in drifts if each.check.is_of_stages}
    # tied modules, such as ("tied_modules", "embed"), of which a parameter is synchronized
    synchronized = {tuple(name.split(".")[:2]) for name, _ in metadata.replicas if name not in of_stages}
    for drift in united(without_untrained(drifts, reader.of_first_stage)[0]):
        name = drift.check.name
        key = drift.check.key
        if name in reader.resharding.guessed and (name, key) not in metadata.replicas:
            unknown.add(name)
            continue
        what = "" if key in WEIGHTS else f" of {key}"
        text = f"{counted(drift.copies, 'copy')}{what}, which should be equal, are {drift.apart}"
        is_expected = name in reader.resharding.averaged
        if name in of_stages and tuple(name.split(".")[:2]) in synchronized:
            is_expected = True
            text = f"{text}: DeepSpeed synchronizes only the tied weights of a tied module"
        yield Finding(NOTE if is_expected else ERROR, "drift", text, name, metadata.source.folder)
    if unknown:
        text = "whether these differ between tensor-parallel ranks, since no rule says which are copies: "
        text += f"{listed(unknown)}; name the code base with --tp-preset ({', '.join(Preset.names())}), or give "
        yield Finding(NOTE, "not-checked", f'{text}"tp_rules" with --config', file=metadata.source.folder)

"""What a checkpoint holds besides tensors: training state, scalar states and hyperparameters. Pure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from elastic_ckpt.errors import Remedy, UnsupportedError

_KEEP_LIVE = Remedy("keeps all values of the live groups", config={"param_groups": "keep_live"})


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class TensorValue:
    """A small tensor, its elements in row-major order; without dimensions, it equals its number."""

    dtype: str
    shape: tuple[int, ...]
    elements: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TensorValue):
            return (self.shape, self.elements) == (other.shape, other.elements)
        return self.shape == () and bool(self.elements[0] == other)

    def __hash__(self) -> int:
        return hash(self.elements if self.shape else self.elements[0])

    def __float__(self) -> float:
        return float(self.elements[0])

    def __int__(self) -> int:
        return int(self.elements[0])

    def __repr__(self) -> str:
        shown, shape = (str(self.elements[0]), "") if self.shape == () else (str(self.elements), f", {self.shape}")
        return f"tensor({shown}, {self.dtype}{shape})"


@dataclass(frozen=True, slots=True, repr=False)
class PerRank:
    """A value in which ranks differ: pairs of a file, as :class:`StorageChunk` counts them, and its value."""

    by_file: tuple[tuple[int, Any], ...]

    @property
    def values(self) -> list[Any]:
        """The values, each once."""
        return list({repr(value): value for _, value in self.by_file}.values())

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.values))} (by rank)"


def merged(parts: Iterable[tuple[range, Mapping[str, Any]]]) -> dict[str, Any]:
    """The values of several ranks by key, each with the files that it saved, the first of which is file 0 to itself."""
    parts = list(parts)
    found: dict[str, Any] = {}
    by_key: dict[str, list[tuple[range, Any]]] = {}
    for files, values in parts:
        for key, value in values.items():
            by_key.setdefault(key, []).append((files, value))
    for key, every in by_key.items():
        (_, first), *others = every
        is_one = len(every) == len(parts) and not isinstance(first, PerRank)
        is_one = is_one and all(value is first or repr(value) == repr(first) for _, value in others)
        found[key] = first if is_one else PerRank(tuple(chain.from_iterable(_by_file(*each) for each in every)))
    return found


def _by_file(files: range, value: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(value, PerRank):
        yield from ((files.start + file, each) for file, each in value.by_file)
    else:
        yield from ((file, value) for file in files)


def moved(values: Mapping[str, Any], files: int) -> dict[str, Any]:
    """The values where ``files`` more files come before those of their ranks."""
    return {
        key: PerRank(tuple(_by_file(range(files, files), value))) if isinstance(value, PerRank) else value
        for key, value in values.items()
    }


def of_rank(values: Mapping[str, Any], file: int) -> dict[str, Any]:
    """The values that the rank with this file saved."""
    every = ((key, value.by_file if isinstance(value, PerRank) else ((file, value),)) for key, value in values.items())
    return {key: each for key, found in every for number, each in found if number == file}


def common(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that all ranks have."""
    return {key: value for key, value in values.items() if not isinstance(value, PerRank)}


def differing(values: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys in whose values ranks differ."""
    found = (key for each in values for key, value in each.items() if isinstance(value, PerRank))
    return sorted(dict.fromkeys(map(str, found)))


def is_number(value: Any) -> bool:
    """Whether a value is a number that others can be compared with, and printed: a float, or an integer of 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64)


def numbers(value: Any) -> Sequence[float]:
    """The numbers of a scalar state, on all ranks; none of what is no number."""
    if isinstance(value, PerRank):
        return [number for each in value.values for number in numbers(each)]
    if isinstance(value, TensorValue):
        return [each for each in value.elements if is_number(each)]
    return [value] if is_number(value) else []


@dataclass(frozen=True)
class LeftInFile:
    """Stands for a tensor, array or object among hyperparameters that is not read; equal to one of the same text."""

    what: str

    def __repr__(self) -> str:
        return self.what


def left_in_file(value: Any) -> Iterator[LeftInFile]:
    """What was not read of a hyperparameter."""
    if isinstance(value, LeftInFile):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(left_in_file, chain(value, value.values())))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from chain.from_iterable(map(left_in_file, value))
    elif isinstance(value, Namespace):
        yield from left_in_file(vars(value))


def refuse_left_in_file(group: Mapping[str, Any], names: Iterable[str], folder: str) -> None:
    """Raise :class:`UnsupportedError` for a hyperparameter of a param group that was not read as a whole."""
    for key, value in group.items():
        for each in left_in_file(value):
            problem = f'"{key}" of a param group holds a tensor, an array or an object, which is not supported yet'
            expected = "numbers, strings, dtypes, and collections of these"
            raise UnsupportedError(problem, folder, expected, each, parameter=names, remedy=_KEEP_LIVE)


#: 1-bit optimizers of DeepSpeed before 0.19, by lower-case class name, as in its config.
ONE_BIT_OPTIMIZERS = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})

#: Entry of our section in a saved config: by how many steps counts of the optimizer are ahead of the counters.
AHEAD = "ahead"
#: Entry of that: whether they were counted at the save itself, and not only at the load before it.
AT_SAVE = "at_save"
#: Entry of that: whether the optimizer was in the middle of a step.
WITHIN_STEP = "within_step"


@dataclass(frozen=True)
class RecordedCounts:
    """By how many steps counts of the optimizer are ahead of the counters, as far as a run has recorded it."""

    ahead: Mapping[str, frozenset[int]] = field(default_factory=dict)  # "step", "cur_iter"
    at_save: bool = False
    within_step: bool = False  # some parameters may have stepped and others not


@dataclass(frozen=True)
class LossScale:
    """State of an fp16 loss scaler, in one form for all optimizers: ``cur_scale``, ``cur_iter`` ..."""

    dynamic: bool
    values: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return "dynamic" if self.dynamic else "static"


#: Keys of a DeepSpeed config, in the order of :class:`BatchSizes`.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchSizes:
    """Global batch in samples, micro-batch of a rank, micro-batches per step; ``None`` where not recorded."""

    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation_steps: int | None = None

    @property
    def config(self) -> dict[str, int | None]:
        """The entries of a DeepSpeed config."""
        return dict(zip(BATCH_KEYS, (self.global_batch, self.micro_batch, self.accumulation_steps), strict=True))


@dataclass(frozen=True)
class TrainingState:
    """What a job resumes besides tensors: counters, batch sizes, scheduler, loss scale, client state."""

    counters: Mapping[str, Any]  # global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size
    batch: BatchSizes = BatchSizes()
    lr_scheduler: Any = None
    loss_scale: LossScale | None = None  # ``None`` if the run did not train in fp16
    overflow: bool = False
    #: All other top-level entries of the model-states file, the client state included.
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the job has the ranks of the save, so that each gets its own state; if not, every rank has rank 0's.
    same_ranks: bool = False
    #: Tensor- and pipeline-parallel degree of the save, if this is the state of the same model-parallel rank; else 0.
    degrees: tuple[int, int] = (1, 1)
    left_out: Mapping[str, str] = field(default_factory=dict)  # by name, why an entry of the client state is missing
    file: str | None = field(default=None, compare=False)  # path of the file that it was read from

    @classmethod
    def after(cls, steps: float, **more: Any) -> TrainingState:
        """The state of a run that is known by its steps alone."""
        return cls({"global_steps": int(steps), "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}, **more)


@dataclass(frozen=True)
class Features:
    """Features of a run that decide who restores it."""

    experts: tuple[int, ...] = ()  # number of experts, by layer
    expert_groups: tuple[str, ...] = ()  # param groups of experts, which show the expert-parallel degree
    one_bit: bool = False
    mics: int = 0  # ranks in a MiCS shard group; 0 without MiCS
    zenflow: bool = False  # of a saved run: a live engine with it is refused, whatever the checkpoint

    def __or__(self, other: Features) -> Features:
        return Features(
            self.experts or other.experts,
            tuple(sorted({*self.expert_groups, *other.expert_groups})),
            self.one_bit or other.one_bit,
            max(self.mics, other.mics),
            self.zenflow or other.zenflow,
        )

    @property
    def names(self) -> str:
        """Those that elastic_ckpt does not restore, in words; empty where there is none."""
        names = ["a 1-bit optimizer"] * self.one_bit + [f"MiCS (mics_shard_size {self.mics})"] * (self.mics > 0)
        return ", ".join([*names, *["ZenFlow"] * self.zenflow])

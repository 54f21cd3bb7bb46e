"""What is measured: models, topologies, contenders and kinds of memory. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Kinds of memory that a load writes into; see README.md.
RESUME, TOUCHED, FRESH = "resume", "touched", "fresh"
#: What a contender reads.
NATIVE, UNIVERSAL, DCP = "native", "universal", "dcp"


@dataclass(frozen=True)
class ModelSize:
    """A GPT-like stack: ``layers`` blocks of width ``width``, and an embedding of ``vocabulary`` tokens."""

    layers: int
    width: int
    vocabulary: int
    positions: int = 1024

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.positions + 2) * self.width


MODELS = {
    "tiny": ModelSize(2, 24, 64, 16),
    "1M": ModelSize(2, 192, 512, 64),
    "30M": ModelSize(8, 512, 8192),
    "270M": ModelSize(20, 1024, 16384),
    "700M": ModelSize(24, 1536, 16384),
    "1B": ModelSize(18, 2048, 49152),
    "7B": ModelSize(33, 4096, 32000),
}


@dataclass(frozen=True)
class Case:
    """One state, saved by ``saved_dp`` ranks and loaded by ``dp``, at one ZeRO stage."""

    params: str
    stage: int
    saved_dp: int
    dp: int

    @property
    def name(self) -> str:
        """As people read it."""
        return f"{self.params} ZeRO-{self.stage}, DP {self.saved_dp} → {self.dp}"

    @property
    def slug(self) -> str:
        """As files are called."""
        return f"{self.params}-z{self.stage}-dp{self.saved_dp}to{self.dp}"

    @property
    def state_nbytes(self) -> int:
        """Masters, ``exp_avg`` and ``exp_avg_sq`` of the whole model, in fp32."""
        return 12 * MODELS[self.params].numel


#: Both stages, more ranks and as many, every contender at least once.
QUICK = (Case("30M", 1, 2, 2), Case("30M", 3, 2, 4))


@dataclass(frozen=True)
class Contender:
    """One way to bring the state back.

    Attributes:
        key: its name on the command line and in results.json.
        title: its name in tables and pictures.
        source: what it reads.
        kinds: kinds of memory in which it is measured, in that order.
        floor: key of the floor that it is held against.
        same_dp: whether it can only load at the degree that was saved.
        conversion: whether the offline conversion's time is added.
        runs_as: key of the contender whose measurements it shares; its own by default.
    """

    key: str
    title: str
    source: str
    kinds: tuple[str, ...] = (RESUME,)
    floor: str = "floor"
    same_dp: bool = False
    conversion: bool = False
    runs_as: str = ""

    @property
    def measured(self) -> str:
        """Key of the contender that is really run."""
        return self.runs_as or self.key


CONTENDERS = {
    each.key: each
    for each in (
        Contender("floor", "floor: preadv", NATIVE, (RESUME, TOUCHED, FRESH)),
        Contender("native", "elastic_ckpt, native", NATIVE, (RESUME, TOUCHED)),
        Contender("unverified", 'the same, "verify": "off"', NATIVE, (RESUME, TOUCHED)),
        Contender("floor-universal", "floor: preadv, universal", UNIVERSAL, (RESUME, TOUCHED), "floor-universal"),
        Contender("universal", "elastic_ckpt, universal", UNIVERSAL, (RESUME, TOUCHED), "floor-universal"),
        Contender("dcp", "torch.distributed.checkpoint", DCP, (RESUME, TOUCHED, FRESH)),
        Contender("ds-native", "DeepSpeed, native", NATIVE, same_dp=True),
        Contender("ds-universal", "DeepSpeed, universal", UNIVERSAL),
        Contender(
            "ds-convert", "DeepSpeed, conversion + universal", UNIVERSAL, conversion=True, runs_as="ds-universal"
        ),
    )
}
#: Contenders that show what is possible, not what somebody offers.
FLOORS = ("floor", "floor-universal")


def parse_pair(text: str) -> tuple[int, int]:
    """``2:4`` -> saved by 2 ranks, loaded by 4.

    Raises:
        ValueError: it is something else.
    """
    left, colon, right = text.partition(":")
    if not colon or not (left.isdigit() and right.isdigit()) or not (0 < int(left) <= 64 and 0 < int(right) <= 64):
        raise ValueError(f"{text!r} is no pair of data-parallel degrees like 2:4")
    return int(left), int(right)


def enumerate_cases(params: Sequence[str], stages: Sequence[int], pairs: Sequence[tuple[int, int]]) -> list[Case]:
    """All cases, those that share a checkpoint next to each other."""
    cases = {
        Case(size, stage, saved_dp, dp): None
        for size in params
        for stage in stages
        for saved_dp, dp in sorted(dict.fromkeys(pairs))
    }
    return list(cases)


def with_their_floors(keys: Iterable[str]) -> list[str]:
    """Keys of contenders, in the order of :data:`CONTENDERS`, with the floors that they are held against."""
    wanted = set(keys)
    wanted |= {CONTENDERS[key].floor for key in wanted}
    return [key for key in CONTENDERS if key in wanted]


def that_run(case: Case, keys: Iterable[str]) -> list[str]:
    """Contenders that have to be run for these, in order: who shares measurements runs once."""
    possible = [CONTENDERS[key] for key in keys if not CONTENDERS[key].same_dp or case.saved_dp == case.dp]
    return list(dict.fromkeys(each.measured for each in possible))


def shuffled(keys: Sequence[str], round_number: int) -> list[str]:
    """The order of one round, another one each time, so that none always follows the same one; alike on all ranks."""
    return random.Random(round_number).sample(list(keys), len(keys))


def kinds_of(key: str, quick: bool) -> tuple[str, ...]:
    """Kinds of memory in which a contender is run; in a hurry, only elastic_ckpt and its floor in two."""
    if not quick:
        return CONTENDERS[key].kinds
    return (RESUME, TOUCHED) if key in ("floor", "native", "unverified") else (RESUME,)


def sources_of(keys: Iterable[str]) -> list[str]:
    """What has to be on disk for these contenders."""
    return list(dict.fromkeys(CONTENDERS[key].source for key in keys))

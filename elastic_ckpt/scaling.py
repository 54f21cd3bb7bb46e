"""How long the steps of a load take on a machine, from what there is to do. Pure.

Each step takes a sum of coefficients, in seconds, times numbers that a plan tells; :mod:`benchmarks.scaling` measures
the coefficients. ``C`` cores of a node, ``n`` ranks on it and ``T`` threads a rank::

    work of a rank = fixed
                   + (read * reads + read_staged * those staged + piece * pieces) * max(1, n / C)
                   + (byte * bytes + byte_fresh * fresh + byte_staged * staged) / min(T, C / n)
    reading  = max(work of the busiest rank, bytes of the node / bandwidth of the node)
    opening  = file_read * files * max(1, n / C)
    metadata = (file_metadata * files of a rank + parameter_metadata * parameters of a file + extent_metadata * extents)
               * max(1, n / C)
    planning = (extent_planned * extents of a stage + copy_planned * copies) * max(1, n / C)
    agreeing = round_of_rank * ROUNDS * ranks

What is done for each byte, all threads of a rank do at a time; what for each read, Python does, one thread at a time.
The benchmark fits, and a forecast uses, the factors that the functions here return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from elastic_ckpt.ready_configs import ReadyConfigs

#: By name of a coefficient, how often it is to be taken.
Factors = Mapping[str, float]
#: The fit that forecasts use unless they are told another.
DEFAULT_SCALING = "epyc-2-cores"
#: How often the ranks of a load wait for each other.
ROUNDS = 8


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _seconds() -> float:
    found: float = Field(ge=0, allow_inf_nan=False)
    return found


class Coefficients(_Strict):
    """What one of each costs, in seconds of one core.

    Attributes:
        fixed: one execution of a plan: its threads.
        byte: one byte, from the page cache into memory that the process has touched before.
        byte_fresh: more than that, where it has not.
        byte_staged: more than that, through a bounce buffer.
        read: one call, by which consecutive bytes are read.
        read_staged: more than that, where it goes through a bounce buffer.
        piece: one stretch of a slot that a read fills.
        file_read: opening one file to read tensors from.
        file_metadata: opening one file and reading what it holds.
        parameter_metadata: of every parameter that one file describes, for the rank that opens it.
        extent_metadata: of every extent of the checkpoint, for every rank.
        extent_planned: of every extent of this rank's pipeline stage.
        copy_planned: of every copy in its plan.
        parameter_recut: of every parameter of this rank's pipeline stage, where tensor-parallel shards are cut anew.
        round_of_rank: one round in which all ranks tell each other something, by their number.
    """

    fixed: float = _seconds()
    byte: float = _seconds()
    byte_fresh: float = _seconds()
    byte_staged: float = _seconds()
    read: float = _seconds()
    read_staged: float = _seconds()
    piece: float = _seconds()
    file_read: float = _seconds()
    file_metadata: float = _seconds()
    parameter_metadata: float = _seconds()
    extent_metadata: float = _seconds()
    extent_planned: float = _seconds()
    copy_planned: float = _seconds()
    parameter_recut: float = _seconds()
    round_of_rank: float = _seconds()

    def of(self, factors: Factors) -> float:
        """Seconds."""
        return float(sum(getattr(self, name) * count for name, count in factors.items()))


class HeldOut(_Strict):
    """How far a fit was off where it had not been told the answer: relative errors, and of how many points."""

    points: int = Field(ge=1)
    median: float = Field(ge=0)
    worst: float = Field(ge=0)


class Scaling(_Strict):
    """A fit.

    Attributes:
        machine: on which it was measured.
        cores: of that machine.
        measured: when.
        coefficients: what came of it.
        held_out: by what was held out.
    """

    machine: str
    cores: int = Field(ge=1)
    measured: str
    coefficients: Coefficients
    held_out: Mapping[str, HeldOut] = Field(default_factory=dict)


_FITS = ReadyConfigs(
    kind="scaling",
    form=Scaling,
    what="scaling model",
    unreadable="this file is no scaling model",
    expected="what python -m benchmarks.scaling writes: every coefficient, in seconds, none of them negative",
    remedy="--scaling {name}",
)


def load_scaling(name: str = DEFAULT_SCALING) -> Scaling:
    """A fit by name, or from a file of the user's own (a path that ends in ``.json``).

    Raises:
        ConfigError: there is none of this name, or the file is none.
    """
    return _FITS.load(name)


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank has of its node.

    Attributes:
        ranks: on the node.
        cores: of the node.
        threads: by which each rank reads.
    """

    ranks: int
    cores: int
    threads: int

    @property
    def crowding(self) -> float:
        """How much longer one thread takes because ranks share cores."""
        return max(1.0, self.ranks / self.cores)

    @property
    def workers(self) -> float:
        """How many cores' worth of work the threads of a rank do."""
        return min(self.threads, self.cores / self.ranks)


@dataclass(frozen=True, slots=True)
class ReadWork:
    """What one rank reads.

    Attributes:
        nbytes: bytes.
        nbytes_fresh, nbytes_staged: of them, into memory not touched before, and through bounce buffers.
        reads, reads_staged: calls, and of them those through bounce buffers.
        pieces: stretches of slots that they fill.
        files: that they are from.
    """

    nbytes: int
    nbytes_fresh: int
    nbytes_staged: int
    reads: int
    reads_staged: int
    pieces: int
    files: int


def reading_factors(work: ReadWork, room: Room) -> Factors:
    """Of executing a plan, files open and pages cached."""
    return {
        "fixed": 1.0,
        "byte": work.nbytes / room.workers,
        "byte_fresh": work.nbytes_fresh / room.workers,
        "byte_staged": work.nbytes_staged / room.workers,
        "read": work.reads * room.crowding,
        "read_staged": work.reads_staged * room.crowding,
        "piece": work.pieces * room.crowding,
    }


def opening_factors(work: ReadWork, room: Room) -> Factors:
    """Of opening the files that tensors are read from."""
    return {"file_read": work.files * room.crowding}


def metadata_factors(files: int, parameters: float, extents: int, ranks: int, room: Room) -> Factors:
    """Of reading the metadata of a checkpoint: each file by one rank, then everything to everybody.

    Args:
        files, extents: of the checkpoint.
        parameters: that one file describes.
        ranks: of the job.
        room: of each.
    """
    return {
        "file_metadata": -(-files // ranks) * room.crowding,
        "parameter_metadata": parameters * room.crowding,
        "extent_metadata": extents * room.crowding,
    }


def planning_factors(extents: float, copies: int, recut: float, room: Room) -> Factors:
    """Of planning one rank's load.

    Args:
        extents: of the tensors of its pipeline stage.
        copies: in its plan.
        recut: parameters of the stage, where tensor-parallel shards are cut anew; else 0.
        room: of the rank.
    """
    return {
        "extent_planned": extents * room.crowding,
        "copy_planned": copies * room.crowding,
        "parameter_recut": recut * room.crowding,
    }


def agreeing_factors(ranks: int, rounds: int = ROUNDS) -> Factors:
    """Of ranks that wait for each other: as each hears of all others, a round takes longer the more they are."""
    return {"round_of_rank": float(rounds * ranks) if ranks > 1 else 0.0}

"""Moves bytes of files from the ranks that see them to those that do not, in rounds of ``all_to_all_single``.

A rank asks a holder for pieces of files. The pieces that one rank has asked another for are one stream; a round carries
the next part of every stream, of at most as many bytes, so that memory is bounded, and all ranks know from the sizes of
the streams how many rounds there are. While a round travels, holders read what the next one carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from elastic_ckpt import distributed
from elastic_ckpt.errors import ElasticCkptError

#: Bytes of a stream in one round, at least.
_LEAST_NBYTES = 4096
#: Buffers of a rank: what is sent and received in one round, and in the next.
_BUFFERS = 4
#: A holder's failure ends the streams at the latest after so many rounds.
_ROUNDS_AT_ONCE = 64


@dataclass(frozen=True)
class Piece:
    """A range of a file, and the memory for it."""

    file: int  # its number on the holder's node
    byte_offset: int
    buffers: Sequence[memoryview]  # filled in order

    @property
    def nbytes(self) -> int:
        """Size of the range."""
        return sum(map(len, self.buffers))


class Files(Protocol):
    """The files of this rank's node, by number."""

    def read(self, file: int, byte_offset: int, buffer: memoryview) -> None:
        """Fill a buffer; :class:`ElasticCkptError` that names the file if that cannot be."""


#: Of one stream: file, byte offset and number of bytes of each piece, a row each.
Rows = NDArray[np.int64]
#: Bytes of the stream from or to each rank.
Sizes = NDArray[np.int64]


@dataclass
class _Sender:
    """The stream that another rank has asked for."""

    rows: Rows
    error: ElasticCkptError | None = None  # what it cannot be read further for
    _row: int = 0
    _sent_nbytes: int = 0  # of that row

    @property
    def nbytes(self) -> int:
        return int(self.rows[:, 2].sum())

    def fill(self, buffer: memoryview, files: Files) -> None:
        """Read the next part of the stream; zeros once an error has occurred, which the receiver is told at the end."""
        while buffer:
            file, byte_offset, nbytes = self.rows[self._row].tolist()
            count = min(nbytes - self._sent_nbytes, len(buffer))
            try:
                if self.error is None:
                    files.read(file, byte_offset + self._sent_nbytes, buffer[:count])
            except ElasticCkptError as error:
                error.rank = distributed.rank() if error.rank is None else error.rank
                self.error = error
            self._sent_nbytes += count
            buffer = buffer[count:]
            if self._sent_nbytes == nbytes:
                self._row += 1
                self._sent_nbytes = 0


@dataclass
class _Receiver:
    """The stream that a holder was asked for."""

    pieces: Sequence[Piece]
    _buffers: Iterator[memoryview] = field(init=False)
    _buffer: memoryview = field(init=False)  # what is left of the one that is being filled

    def __post_init__(self) -> None:
        self._buffers = (buffer for piece in self.pieces for buffer in piece.buffers)
        self._buffer = memoryview(b"")

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def rows(self) -> Rows:
        rows = [(piece.file, piece.byte_offset, piece.nbytes) for piece in self.pieces if piece.nbytes]
        return np.array(rows, np.int64).reshape(-1, 3)

    def take(self, nbytes: int) -> list[memoryview]:
        """Where the next part of the stream belongs."""
        taken: list[memoryview] = []
        while nbytes:
            if not self._buffer:
                self._buffer = next(self._buffers)
                continue
            taken.append(self._buffer[:nbytes])
            self._buffer = self._buffer[nbytes:]
            nbytes -= len(taken[-1])
        return taken


class Ranks:
    """The ranks that exchange: those of the job, or of a process group of gloo that a background thread has.

    Args:
        group: such a group; ``None``: the job's default one. Only that tells ranks of the failures of others.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.device = distributed.collective_device() if group is None else torch.device("cpu")
        self.size = distributed.world_size() if group is None else dist.get_world_size(group)

    def wait(self, work: Any) -> None:
        """Wait for a collective that was started with ``async_op=True``."""
        distributed.wait(work) if self.group is None else work.wait()

    def most_of(self, numbers: Sequence[int]) -> list[int]:
        """By position, the largest of all ranks' numbers. Collective."""
        if self.size == 1:
            return list(numbers)
        most = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self.wait(dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return [int(number) for number in most.tolist()]


def exchange(
    ranks: Ranks, wanted: Mapping[int, Sequence[Piece]], files: Files, most_nbytes: int
) -> dict[int, ElasticCkptError]:
    """Fill the memory of all pieces that this rank wants, and send other ranks those that they want. Collective.

    Args:
        ranks: which exchange, known by their numbers in their group.
        wanted: pieces by the rank that holds their files.
        files: of this node, of which others want pieces.
        most_nbytes: host memory for all buffers of this rank together.

    Returns, by rank, why what it wanted of this node could not be read; its memory is then partly filled.
    """
    receivers = {holder: _Receiver(pieces) for holder, pieces in wanted.items()}
    senders = {rank: _Sender(rows) for rank, rows in _asked_for(ranks, receivers).items()}
    sizes_in = _sizes(ranks, receivers)
    sizes_out = _sizes(ranks, senders)
    streams_here = max(int(np.count_nonzero(sizes_in)), int(np.count_nonzero(sizes_out)))
    longest_here = max(int(sizes_in.max()), int(sizes_out.max()))
    streams, longest = ranks.most_of([streams_here, longest_here])
    part_nbytes = max(most_nbytes // _BUFFERS // max(streams, 1), _LEAST_NBYTES)
    sizes = ranks, part_nbytes, sizes_in, sizes_out
    count = -(-longest // part_nbytes)
    current = _Round(0, *sizes)
    memory = [current.buffers(), current.buffers()]  # later rounds are no larger
    if count:
        current.fill(senders, files, memory[0][0])
        current.send(receivers, *memory[0])
    for number in range(count):
        later = _Round(number + 1, *sizes)  # empty after the last one
        later.fill(senders, files, memory[(number + 1) % 2][0])
        current.wait()
        if number + 1 < count:
            later.send(receivers, *memory[(number + 1) % 2])
        current.scatter()
        if number % _ROUNDS_AT_ONCE == _ROUNDS_AT_ONCE - 1 and number + 1 < count:
            (has_failed,) = ranks.most_of([any(sender.error is not None for sender in senders.values())])
            if has_failed:
                later.wait()
                break
        current = later
    return {rank: sender.error for rank, sender in senders.items() if sender.error is not None}


def _asked_for(ranks: Ranks, receivers: Mapping[int, _Receiver]) -> dict[int, Rows]:
    """What each other rank asks this one for. Collective."""
    nothing = np.empty((0, 3), np.int64)
    rows = [receivers[rank].rows if rank in receivers else nothing for rank in range(ranks.size)]
    counts_out = [each.size * each.itemsize for each in rows]
    counts = bytearray(np.array(counts_out, np.int64).tobytes())
    counts_received = bytearray(len(counts))
    of_one = [len(counts) // ranks.size] * ranks.size
    AllToAll(ranks, memoryview(counts), of_one, memoryview(counts_received), of_one).wait()
    counts_in = np.frombuffer(counts_received, np.int64)
    sent = bytearray(b"".join(each.tobytes() for each in rows))
    received = bytearray(int(counts_in.sum()))
    AllToAll(ranks, memoryview(sent), counts_out, memoryview(received), counts_in.tolist()).wait()
    stops = np.cumsum(counts_in).tolist()
    parts = (received[stop - count : stop] for stop, count in zip(stops, counts_in.tolist(), strict=True))
    return {rank: np.frombuffer(part, np.int64).reshape(-1, 3) for rank, part in enumerate(parts) if part}


def _sizes(ranks: Ranks, streams: Mapping[int, _Sender] | Mapping[int, _Receiver]) -> Sizes:
    """Bytes of the stream of each rank."""
    sizes = np.zeros(ranks.size, np.int64)
    for rank, stream in streams.items():
        sizes[rank] = stream.nbytes
    return sizes


class _Round:
    """One part of every stream."""

    def __init__(self, number: int, ranks: Ranks, part_nbytes: int, sizes_in: Sizes, sizes_out: Sizes) -> None:
        self._ranks = ranks
        done_nbytes = number * part_nbytes
        self.counts_in: list[int] = np.clip(sizes_in - done_nbytes, 0, part_nbytes).tolist()
        self.counts_out: list[int] = np.clip(sizes_out - done_nbytes, 0, part_nbytes).tolist()
        self._work: AllToAll | None = None
        self._received = memoryview(b"")
        self._targets: list[memoryview] = []  # where that belongs, in order; none if it arrives there

    def buffers(self) -> tuple[memoryview, memoryview]:
        """Memory for what is sent and for what is received."""
        return memoryview(bytearray(sum(self.counts_out))), memoryview(bytearray(sum(self.counts_in)))

    def fill(self, senders: Mapping[int, _Sender], files: Files, sent: memoryview) -> None:
        """Read what this rank sends."""
        start = 0
        for rank, count in enumerate(self.counts_out):
            if count:
                senders[rank].fill(sent[start : start + count], files)
            start = start + count

    def send(self, receivers: Mapping[int, _Receiver], sent: memoryview, received: memoryview) -> None:
        """Begin to send and to receive."""
        counts_out = self.counts_out
        counts_in = self.counts_in
        self._received = received[: sum(counts_in)]
        for rank, count in enumerate(counts_in):
            if count:
                self._targets += receivers[rank].take(count)
        if len(self._targets) == 1:  # all of it is of one stream, and goes into one buffer
            self._received = self._targets.pop()
        self._work = AllToAll(self._ranks, sent[: sum(counts_out)], counts_out, self._received, counts_in)

    def wait(self) -> None:
        """Wait until what this rank receives is there."""
        assert self._work is not None
        self._work.wait()

    def scatter(self) -> None:
        """Put what was received where it belongs."""
        start = 0
        for target in self._targets:
            target[:] = self._received[start : start + len(target)]
            start = start + len(target)


class AllToAll:
    """One collective in which each rank sends bytes to each rank; begun by its construction. Collective.

    Args:
        ranks: which take part.
        sent: the bytes for all ranks, in their order; must not change before the end.
        counts_out: how many of them are for each rank.
        received: where the bytes of all ranks come to lie, in their order.
        counts_in: how many come from each rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        sent: memoryview,
        counts_out: Sequence[int],
        received: memoryview,
        counts_in: Sequence[int],
    ) -> None:
        device = ranks.device
        self._ranks = ranks
        self._host = _tensor_of(received)
        self._received = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
        self._sent = _tensor_of(sent).to(device)
        sizes = list(counts_in), list(counts_out)
        self._work: Any = dist.all_to_all_single(self._received, self._sent, *sizes, group=ranks.group, async_op=True)

    def wait(self) -> None:
        """Wait until all of it is there."""
        self._ranks.wait(self._work)
        if self._received is not self._host:
            self._host.copy_(self._received)


def _tensor_of(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)

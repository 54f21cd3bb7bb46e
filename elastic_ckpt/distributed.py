"""The few collectives of a load: who am I, agree, share, broadcast.

All functions are called by every rank of the job, in the same order. They run on the default process
group of ``torch.distributed`` and turn into local no-ops when none is initialised.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastic_ckpt.errors import ElasticCkptError, UnforeseenError

T = TypeVar("T")
#: How much of a message goes with its length: most are shorter.
_INLINE_NBYTES = 4096
_LENGTH_NBYTES = 8
#: So much may be sent for nothing, to make all messages as long as the longest.
_PADDED_NBYTES = 16 << 20
#: Small tensors travel together, up to this many bytes.
_BUCKET_NBYTES = 16 << 20
#: The one backend that a device's tensors go by, where a group has no other.
_DEVICE_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl"}


def rank() -> int:
    """Global rank of this process (0 without a process group)."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks in the job (1 without a process group)."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(item: T) -> list[T]:
    """Give every rank the list of all ranks' items, in rank order."""
    if world_size() == 1:
        return [item]
    return [pickle.loads(message) for message in _sent_round(pickle.dumps(item))]


def gathered(doing: str, work: Callable[[], T]) -> list[T]:
    """:func:`agreement` and :func:`share` in one round: run ``work`` on every rank, give every rank all results.

    Args:
        doing: as for :func:`agreement`.
        work: must not contain collectives that a failing rank would leave the others waiting in.

    Raises:
        ElasticCkptError: the failure of the lowest failing rank, with its ``rank`` filled in.
    """
    if world_size() == 1:
        with agreement(doing):
            return [work()]
    mine, cause = _message(doing, work)
    return _results([pickle.loads(message) for message in _sent_round(mine)], cause)


def told(doing: str, work: Callable[[], T], src: int = 0) -> T:
    """Run ``work`` on rank ``src`` alone, and give every rank its result, or its failure.

    Args:
        doing, work: as for :func:`gathered`.
        src: global rank.

    Raises:
        ElasticCkptError: the failure of that rank, with its ``rank`` filled in.
    """
    if world_size() == 1:
        with agreement(doing):
            return work()
    mine, cause = _message(doing, work) if rank() == src else (b"", None)
    return _results([pickle.loads(_sent_out(mine, src))], cause)[0]


def broadcast(item: T | None, src: int) -> T:
    """Give every rank the item that rank ``src`` passed in; the others' items are ignored."""
    if world_size() == 1:
        return item  # type: ignore[return-value]
    return pickle.loads(_sent_out(pickle.dumps(item) if rank() == src else b"", src))


def _message(doing: str, work: Callable[[], Any]) -> tuple[bytes, Exception | None]:
    """What became of some work on this rank, to be sent: the error or the result; and the error's cause."""
    try:
        return pickle.dumps((None, work())), None
    except Exception as error:
        return pickle.dumps((failure(doing, error), None)), None if isinstance(error, ElasticCkptError) else error


def _results(outcomes: Sequence[tuple[ElasticCkptError | None, T]], cause: Exception | None) -> list[T]:
    """The results; or the first error is raised."""
    for error, _ in outcomes:
        if error is not None:
            raise error from cause
    return [result for _, result in outcomes]


def _sent_round(mine: bytes) -> list[bytes]:
    """The messages of all ranks. Small ones take a single collective, of which each costs more than what it sends."""
    heads = _gathered_bytes(_head(mine))
    nbytes = [int.from_bytes(head[:_LENGTH_NBYTES], "little") for head in heads]
    tails = _tails(mine[_INLINE_NBYTES:], [max(count - _INLINE_NBYTES, 0) for count in nbytes])
    return [(head[_LENGTH_NBYTES:] + tail)[:count] for head, tail, count in zip(heads, tails, nbytes, strict=True)]


def _tails(mine: bytes, nbytes: Sequence[int]) -> list[bytes]:
    """What did not fit into the heads: all at once, each made as long as the longest; or one by one, where they differ.

    Args:
        mine: this rank's.
        nbytes: of all ranks'.
    """
    longest, speaking = max(nbytes), [src for src, count in enumerate(nbytes) if count]
    if len(speaking) > 1 and len(nbytes) * longest <= max(2 * sum(nbytes), _PADDED_NBYTES):
        return _gathered_bytes(mine.ljust(longest, b"\0"))
    tails = [b""] * len(nbytes)
    for src in speaking:
        tails[src] = _broadcast_bytes(mine if rank() == src else bytes(nbytes[src]), src)
    return tails


def _sent_out(mine: bytes, src: int) -> bytes:
    """The message of one rank."""
    head = _broadcast_bytes(_head(mine), src)
    nbytes = int.from_bytes(head[:_LENGTH_NBYTES], "little")
    rest = nbytes - _INLINE_NBYTES
    tail = _broadcast_bytes(mine[_INLINE_NBYTES:] if rank() == src else bytes(rest), src) if rest > 0 else b""
    return (head[_LENGTH_NBYTES:] + tail)[:nbytes]


def _head(message: bytes) -> bytes:
    """Its length and its beginning, as long as all heads."""
    return len(message).to_bytes(_LENGTH_NBYTES, "little") + message[:_INLINE_NBYTES].ljust(_INLINE_NBYTES, b"\0")


def _gathered_bytes(mine: bytes) -> list[bytes]:
    """What all ranks passed in; as long on every rank."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_collective_device())
    received = [torch.empty_like(sent) for _ in range(world_size())]
    dist.all_gather(received, sent)
    return [bytes(each.cpu().numpy()) for each in received]


def _broadcast_bytes(mine: bytes, src: int) -> bytes:
    """What one rank passed in; as long on every rank."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_collective_device())
    dist.broadcast(sent, src=src)
    return bytes(sent.cpu().numpy())


def pack(item: Any) -> bytes:
    """Pickle an object for :func:`broadcast`: inside an agreement, where a failure reaches all ranks. Local."""
    buffer = io.BytesIO()
    torch.save(item, buffer)  # pickle alone does not know every dtype
    return buffer.getvalue()


def unpack(item: bytes) -> Any:
    """Undo :func:`pack`; the bytes come from another rank of this job. Local."""
    return torch.load(io.BytesIO(item), map_location="cpu", weights_only=False)


def can_broadcast(device_type: str, group: Any) -> bool:
    """Whether a process group can send tensors of a device to its members. Local; false where it has one member."""
    if not dist.is_initialized() or dist.get_world_size(group=group) == 1:
        return False
    backend = str(dist.get_backend(group=group))
    if device_type == "cpu":
        return "gloo" in backend or "mpi" in backend
    return backend == _DEVICE_BACKENDS.get(device_type) or f"{device_type}:" in backend


def in_buckets(items: Iterable[T], nbytes: Iterable[int]) -> Iterator[list[T]]:
    """What can travel together: consecutive items of at most 16 MiB, or one bigger item.

    Args:
        items: what is to be sent.
        nbytes: of each.
    """
    bucket: list[T] = []
    total = 0
    for item, more in zip(items, nbytes, strict=True):
        if bucket and total + more > _BUCKET_NBYTES:
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += more
    if bucket:
        yield bucket


@contextmanager
def agreement(doing: str) -> Iterator[None]:
    """Run the body on every rank, then agree: if any rank failed, the same error is raised on all.

    The body must not contain collectives that a failing rank would leave the others waiting in.

    Args:
        doing: what the body does ("plan the load"), for errors that nobody foresaw.

    Raises:
        ElasticCkptError: the failure of the lowest failing rank, with its ``rank`` filled in.
    """
    mine: ElasticCkptError | None = None
    cause: Exception | None = None
    try:
        yield
    except Exception as error:  # any failure must reach all ranks, or they hang
        mine = failure(doing, error)
        cause = None if mine is error else error
    if _any(mine is not None):  # most agreements are reached: one number is sent round then, and no object
        raise next(error for error in share(mine) if error is not None) from cause


@contextmanager
def alike(doing: str) -> Iterator[None]:
    """:func:`agreement` without a round: for what every rank works out from the same facts, and so fails in alike.

    Args:
        doing: as for :func:`agreement`.
    """
    try:
        yield
    except ElasticCkptError:
        raise
    except Exception as error:
        unforeseen = _unforeseen(doing, error)
        unforeseen.rank = None
        raise unforeseen from error


def failure(doing: str, error: Exception) -> ElasticCkptError:
    """An error of this rank as it is raised on all ranks.

    Args:
        doing: as for :func:`agreement`.
        error: any.
    """
    if not isinstance(error, ElasticCkptError):
        return _unforeseen(doing, error)
    if error.rank is None:
        error.rank = rank()
    return error


def _any(mine: bool) -> bool:
    """Whether it is so on any rank."""
    if world_size() == 1:
        return mine
    flag = torch.tensor([int(mine)], dtype=torch.int32, device=_collective_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _collective_device() -> torch.device:
    """A device whose tensors the default process group sends."""
    device = torch.accelerator.current_accelerator()
    if device is None or can_broadcast("cpu", None):
        return torch.device("cpu")
    return torch.device(device.type, torch.accelerator.current_device_index())


def _unforeseen(doing: str, error: Exception) -> UnforeseenError:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return UnforeseenError(
        f"failed to {doing}: {type(error).__name__}: {error}",
        file=getattr(error, "filename", None),
        found=f"raised at {where.filename}:{where.lineno}",
        remedy='this was not foreseen; "elastic_checkpoint": {"mode": "off"} gives DeepSpeed\'s own loader',
        rank=rank(),
    )

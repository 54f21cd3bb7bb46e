"""The collectives of a load: all-gather, broadcast, agree.

Every rank of the job calls them in the same order, on the default process group of ``torch.distributed``; without one
they are local. A rank's failure travels in place of its result, so that all ranks raise the same error. The work must
contain no collective: a rank that fails before it would leave the others waiting. Where that cannot be, as in
DeepSpeed's own collectives, and where a rank dies, :func:`together` ends the waits of the others.

Work that meets a file of another node is interrupted (:class:`Lacking`): in place of its result travels what it lacks,
which the ranks exchange (:func:`supply_by`) before it runs again, from its beginning.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import accumulate, count
from typing import Any, TypeVar

from elastic_ckpt.core.lacking import Lacking, Wanted
from elastic_ckpt.core.text import one_line
from elastic_ckpt.errors import CommunicationError, ConfigError, ElasticCkptError, UnforeseenError

T = TypeVar("T")
#: Bytes of a message that travel with its length, at most.
_INLINE_NBYTES = 4096
#: Such bytes of all ranks together, at most.
_INLINE_TOTAL_NBYTES = 1 << 20
#: Such bytes of a message, at least.
_LEAST_INLINE_NBYTES = 256
LENGTH_NBYTES = 8
#: One more collective costs as much time as this many bytes.
_COLLECTIVE_NBYTES = 1 << 18
#: Small tensors travel together, up to this many bytes.
_BUCKET_NBYTES = 16 << 20
#: Devices, and the backend that sends their tensors if a group has one backend for all devices.
_BACKENDS = (("cuda", "nccl"), ("xpu", "xccl"), ("xpu", "ccl"), ("npu", "hccl"), ("hpu", "hccl"))
#: How often a waiting rank looks for a failure that another has posted in the process group's store.
_LOOK_EVERY = timedelta(seconds=1)
#: Seconds after which a store that does not answer is taken for dead.
_STORE_SECONDS = 5.0
#: Loads that have begun in this process: as many on every rank.
_loads = count(1)
#: Key in the store of the first failure in this load that no collective can tell the other ranks of. One for the whole
#: load: a rank may be past a broadcast in which another has failed, and must still find it.
_key = "elastic_ckpt/failure/0"
_loading = threading.RLock()
#: What brings ranks what they lack, in the load that runs: given that by rank, it is called by every rank.
_supply: Callable[[dict[int, Wanted]], None] | None = None
_is_alone = ContextVar("_is_alone", default=False)


def begin_load() -> None:
    """Leave behind what ranks posted in earlier loads: torchrun's store outlives a group. Called by every rank."""
    global _key  # noqa: PLW0603
    _key = f"elastic_ckpt/failure/{next(_loads)}"


def supply_by(exchange: Callable[[dict[int, Wanted]], None] | None) -> None:
    """What brings ranks what their work lacks from now on; ``None``: nothing does. Called by every rank.

    ``exchange`` is collective, and gets what is lacking by rank.
    """
    global _supply  # noqa: PLW0603
    _supply = exchange


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Refuse a load in another thread while one runs: ranks could not tell which collectives belong together. Local."""
    if not _loading.acquire(blocking=False):
        raise ConfigError("another load of this process has not ended", remedy="load one engine after the other")
    try:
        yield
    finally:
        _loading.release()


@contextmanager
def alone() -> Iterator[None]:
    """Run a body as if this process were no rank of a job: it calls no collective, which others need not join. Local.

    For what one rank may do by itself, as a script that exports its last checkpoint on rank 0. It does not reach into
    threads that the body starts.
    """
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def rank() -> int:
    """Global rank of this process (0 without a process group)."""
    dist = _initialized()
    return 0 if dist is None else int(dist.get_rank())


def world_size() -> int:
    """Number of ranks in the job (1 without a process group)."""
    dist = _initialized()
    return 1 if dist is None else int(dist.get_world_size())


def _initialized() -> Any:
    """``torch.distributed``, if this process has a default group; where torch is not imported yet, it has none."""
    dist = None if _is_alone.get() else sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def all_gather(doing: str, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return all results, by rank. Short messages take one collective.

    ``doing`` names the work, which returns a picklable object, in unforeseen errors ("plan the load"). Raises the
    :class:`ElasticCkptError` of the lowest failing rank, with its ``rank`` set.
    """
    return _exchange(doing, work, None)


def broadcast(doing: str, work: Callable[[], T], src: int = 0) -> T:
    """Run ``work`` on global rank ``src`` and return its result on every rank; errors as in :func:`all_gather`."""
    (result,) = _exchange(doing, work, src)
    return result


def _exchange(doing: str, work: Callable[[], T], src: int | None) -> list[T]:
    """The results of all ranks, or of one. A message is a pickled (error, what is lacking, result)."""
    if world_size() == 1:
        with agree(doing):
            return [work()]
    senders = range(world_size()) if src is None else [src]
    results: dict[int, T] = {}
    cause = None
    while len(results) < len(senders):
        message = b""
        if rank() in senders and rank() not in results:
            message, cause = _message_of(doing, work)
        lacking: dict[int, Wanted] = {}
        for sender, received in zip(senders, _exchange_messages(doing, message, src), strict=True):
            if sender in results:
                continue
            failed, wanted, result = pickle.loads(received)  # ignores the padding after its STOP
            if failed is not None:
                raise failed from cause
            if wanted is None:
                results[sender] = result
            else:
                lacking[sender] = wanted
        if lacking:
            assert _supply is not None, lacking
            _supply(lacking)
    return [results[sender] for sender in senders]


def _message_of(doing: str, work: Callable[[], T]) -> tuple[bytes, BaseException | None]:
    """What a rank tells the others of its work, and the cause of its failure, if any. Local."""
    try:
        return pickle.dumps((None, None, work())), None
    except Lacking as lacking:
        return pickle.dumps((None, lacking.wanted, None)), None
    except CommunicationError as error:
        raise _post(doing, error) from error
    except Exception as error:
        failure, cause = _failure(doing, error, rank())
        return pickle.dumps((failure, None, None)), cause


def _exchange_messages(doing: str, message: bytes, src: int | None) -> list[bytes]:
    """The messages of all ranks, or of one. A message's length travels with its head."""
    inline = inline_nbytes(world_size())
    head = len(message).to_bytes(LENGTH_NBYTES, "little") + message[:inline].ljust(inline, b"\0")
    tail = message[inline:]
    with together(doing):
        heads = _exchange_bytes(head, src)
        rests = [max(int.from_bytes(head[:LENGTH_NBYTES], "little") - inline, 0) for head in heads]
        common = common_nbytes(rests) if src is None else 0
        tails = _exchange_bytes(tail[:common].ljust(common, b"\0"), None) if common else [b""] * len(rests)
        for number, count in enumerate(rests):
            if count > common:
                sender = number if src is None else src
                (more,) = _exchange_bytes(tail[common:] if rank() == sender else bytes(count - common), sender)
                tails[number] += more
    return [head[LENGTH_NBYTES:] + tail for head, tail in zip(heads, tails, strict=True)]


@contextmanager
def agree(doing: str) -> Iterator[None]:
    """Run the body on every rank; errors as in :func:`all_gather`. Success takes one small all-reduce."""
    mine: ElasticCkptError | None = None
    cause: BaseException | None = None
    try:
        yield
    except CommunicationError as error:  # a rank that does not answer would not agree, either
        if world_size() == 1:
            raise
        raise _post(doing, error) from error
    except Exception as error:  # any failure must reach all ranks, or they hang
        mine, cause = _failure(doing, error, rank())
    except Lacking as lacking:  # a body cannot run again
        missing = RuntimeError(f"{lacking.wanted} is missing on this rank").with_traceback(lacking.__traceback__)
        mine, cause = _failure(doing, missing, rank())
    errors = [mine]
    if world_size() > 1:
        with together(doing):
            failed = _any(mine is not None)
        errors = all_gather(doing, lambda: mine) if failed else []
    if (first := next((each for each in errors if each is not None), None)) is not None:
        raise first from cause


@contextmanager
def together(doing: str, agrees: bool = True) -> Iterator[None]:
    """Run collectives that end on every rank, with the same error, once any rank fails in them, between them or dies.

    Without it the others would wait for the process group's timeout. The rank posts its error in the group's store,
    where those in :func:`wait` look every second, and raises the :class:`CommunicationError` that was posted first; an
    :class:`ElasticCkptError` as it is, since ranks have agreed, unless the body is not one that ``agrees``.
    """
    try:
        yield
    except Exception as error:
        is_everybodys = isinstance(error, ElasticCkptError) and agrees
        if is_everybodys or isinstance(error, CommunicationError) or world_size() == 1:
            raise
        raise _post(doing, error) from error


def wait(work: Any) -> None:
    """Wait for a collective that was started with ``async_op=True``; fails once another rank has posted a failure.

    Only gloo's waits are on the host; NCCL's watchdog ends its own.
    """
    import torch.distributed  # noqa: PLC0415

    while torch.distributed.get_backend() == "gloo":
        try:
            work.wait(_LOOK_EVERY)
            return
        except RuntimeError:  # only the wait has timed out, or the collective has failed
            if work.is_completed() or (is_posted := _ask_store(lambda store: store.check([_key]))) is None:
                break
            if is_posted:
                raise
    work.wait()


def _post(doing: str, error: Exception) -> CommunicationError:
    """The failure that was posted first: this one, if none was."""
    failure, _ = _failure(doing, error, rank())
    if isinstance(failure, CommunicationError):
        mine = failure
    elif failure is error:  # found by this rank, not in a collective
        mine = CommunicationError(failure.problem, **failure.details)
    else:
        remedy = "a rank failed, died or hangs: see the others' logs, then start the job again"
        mine = CommunicationError(f"a collective failed: {failure.problem}", **failure.details | {"remedy": remedy})
    try:
        posted = _ask_store(lambda store: store.compare_set(_key, "", pickle.dumps(mine).hex()))
        if rank() == 0:  # whose process most often has the store: let the others look before it ends
            time.sleep(2 * _LOOK_EVERY.total_seconds())
    except RuntimeError:  # the rank that has the store is dead
        return mine
    return pickle.loads(bytes.fromhex(posted.decode())) if posted else mine


def _ask_store(question: Callable[[Any], T]) -> T | None:
    """What the default process group's store answers; ``None`` if it hangs, as it does where its host is stopped."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    answer: futures.Future[T] = futures.Future()

    def ask() -> None:
        try:
            answer.set_result(question(_get_default_store()))
        except Exception as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=ask, daemon=True).start()
    except RuntimeError:  # no memory for a thread
        ask()
    futures.wait([answer], _STORE_SECONDS)
    return answer.result() if answer.done() else None


@contextmanager
def deterministic(doing: str) -> Iterator[None]:
    """No collective: the body is deterministic across ranks, and so fails with the same error on all of them."""
    try:
        yield
    except Exception as error:
        failure, cause = _failure(doing, error, on_rank=None)
        raise failure from cause


def _failure(doing: str, error: Exception, on_rank: int | None) -> tuple[ElasticCkptError, BaseException | None]:
    """The error to raise on all ranks, and its cause if it was unforeseen."""
    if isinstance(error, ElasticCkptError):
        error.rank = on_rank if error.rank is None else error.rank
        return error, error.__cause__
    where = traceback.extract_tb(error.__traceback__)[-1]
    problem = f"failed to {doing}: {type(error).__name__}: {one_line(str(error))}"
    found = f"raised at {where.filename}:{where.lineno}"
    remedy = "this error is unexpected: please report it, with this message and the traceback below"
    path = getattr(error, "filename", None)
    return UnforeseenError(problem, path, found=found, remedy=remedy, rank=on_rank), error


def inline_nbytes(ranks: int) -> int:
    """Bytes of a message that travel with its length in a job of so many ranks."""
    return max(min(_INLINE_NBYTES, _INLINE_TOTAL_NBYTES // ranks), _LEAST_INLINE_NBYTES)


def common_nbytes(nbytes: Sequence[int]) -> int:
    """How much of each message to send in one collective, for which shorter ones are padded; the rest is broadcast.

    The choice with the least time, so that padding never multiplies a long message by the number of ranks.
    """
    choices = sorted([*nbytes, 0], reverse=True)
    costs = (
        ((len(nbytes) - longer) * common + longer_nbytes + _COLLECTIVE_NBYTES * (bool(common) + longer), common)
        for longer, (common, longer_nbytes) in enumerate(zip(choices, accumulate(choices, initial=0), strict=False))
    )
    return min(costs)[1]


def _any(flag: bool) -> bool:
    import torch  # noqa: PLC0415

    flags = torch.tensor([flag], dtype=torch.int32, device=collective_device())
    wait(torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, async_op=True))
    return bool(flags.item())


def _exchange_bytes(mine: bytes, src: int | None) -> list[bytes]:
    """The bytes of all ranks, or of rank ``src`` alone; all pass as many."""
    import torch  # noqa: PLC0415

    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(collective_device())
    received = [sent] if src is not None else [torch.empty_like(sent) for _ in range(world_size())]
    if src is None:
        wait(torch.distributed.all_gather(received, sent, async_op=True))
    else:
        wait(torch.distributed.broadcast(sent, src=src, async_op=True))
    return [bytes(each.cpu().numpy()) for each in received]


def collective_device() -> Any:
    """Where the default process group wants its tensors: host memory, or the current accelerator's. Local."""
    import torch  # noqa: PLC0415

    kinds = (kind for kind, _ in _BACKENDS if hasattr(torch, kind) and can_broadcast(kind, None))
    kind = None if can_broadcast("cpu", None) else next(kinds, None)
    return torch.device("cpu") if kind is None else torch.device(kind, getattr(torch, kind).current_device())


def pack(item: Any) -> bytes:
    """Serialize an object with tensors of any dtype, some of which plain pickle does not know. Local."""
    from torch import serialization  # noqa: PLC0415  whose functions stay where DLRover replaces torch.load

    serialization.save(item, buffer := io.BytesIO())
    return buffer.getvalue()


def unpack(item: bytes) -> Any:
    """Undo :func:`pack`; the bytes come from another rank of this job. Local."""
    from torch import serialization  # noqa: PLC0415

    return serialization.load(io.BytesIO(item), map_location="cpu", weights_only=False)


def can_broadcast(device_type: str, group: Any) -> bool:
    """Whether a process group can broadcast tensors of a device. Local; false for a single member."""
    dist = _initialized()
    if dist is None or dist.get_world_size(group=group) == 1:
        return False
    backend = str(dist.get_backend(group=group))
    if device_type == "cpu":
        return "gloo" in backend or "mpi" in backend
    return (device_type, backend) in _BACKENDS or f"{device_type}:" in backend


def in_buckets(items: Iterable[T], nbytes: Iterable[int], most_nbytes: int = _BUCKET_NBYTES) -> Iterator[list[T]]:
    """Group consecutive items, of the given sizes: at most so many bytes together, or one larger item."""
    bucket: list[T] = []
    total = 0
    for item, more in zip(items, nbytes, strict=True):
        if bucket and total + more > most_nbytes:
            yield bucket
            bucket = []
            total = 0
        bucket.append(item)
        total += more
    if bucket:
        yield bucket

"""The few collectives of a load: who am I, agree, share, broadcast.

All functions are called by every rank of the job, in the same order. They run on the default process
group of ``torch.distributed`` and turn into local no-ops when none is initialised.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastic_ckpt.errors import ElasticCkptError

T = TypeVar("T")
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
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def broadcast(item: T | None, src: int) -> T:
    """Give every rank the item that rank ``src`` passed in; the others' items are ignored."""
    box = [item]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=src)
    return box[0]  # type: ignore[return-value]


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
    except ElasticCkptError as error:
        mine = error
        if mine.rank is None:
            mine.rank = rank()
    except Exception as error:  # any other failure must reach all ranks too, or they hang
        cause = error
        mine = _unforeseen(doing, error)
    if _any(mine is not None):  # most agreements are reached: one number is sent round then, and no object
        raise next(error for error in share(mine) if error is not None) from cause


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


def _unforeseen(doing: str, error: Exception) -> ElasticCkptError:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return ElasticCkptError(
        f"failed to {doing}: {type(error).__name__}: {error}",
        file=getattr(error, "filename", None),
        found=f"raised at {where.filename}:{where.lineno}",
        remedy='this was not foreseen; "elastic_checkpoint": {"mode": "off"} gives DeepSpeed\'s own loader',
        rank=rank(),
    )

"""Staging buffers, for slots that ``preadv`` cannot write into.

A read takes two free host buffers: while one is read into, the other is copied into its slot. For an accelerator the
copy is asynchronous, from pinned memory on a stream of its own, so that disk and bus overlap. Memory is bounded,
whatever the size of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class Transfer:
    """Copies values from host buffers into slots of one device.

    Into an accelerator, on a stream beside the computation's: bytes travel in the file's dtype and are converted there,
    which halves the traffic if 16-bit values become 32-bit ones. Into host memory, synchronously. Create it on the
    thread whose stream prepared the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        if self._stream is not None:
            # slots were allocated, and their gaps filled, on the stream of the computation
            self._stream.wait_stream(torch.get_device_module(device).current_stream(device))

    def start(self, values: torch.Tensor, target: torch.Tensor, offset: int) -> Callable[[], None]:
        """Start to write 1-D ``values`` into ``target`` from element ``offset``.

        Returns a function that waits until the buffer of ``values`` may be reused.
        """
        if self._stream is None:
            write_flat(target, offset, values)
            return _nothing
        with self._stream:
            write_flat(target, offset, values.to(self._device, non_blocking=True))
            return self._stream.record_event().synchronize

    def finish(self) -> None:
        """Wait until all is written. Slots may then be used on any stream."""
        if self._stream is not None:
            self._stream.synchronize()


class StagingBuffers:
    """Two host buffers in turn, page-locked if ``pinned``, for one thread at a time; ``transfers`` are by device."""

    def __init__(self, buffer_nbytes: int, transfers: dict[torch.device, Transfer], pinned: bool) -> None:
        self._buffers = [torch.empty(buffer_nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._free: list[Callable[[], None]] = [_nothing, _nothing]
        self._transfers = transfers
        self._turn = 0

    def buffer(self, nbytes: int) -> memoryview:
        """The next buffer, once its previous content is copied."""
        self._free[self._turn]()
        self._free[self._turn] = _nothing
        return self._buffers[self._turn][:nbytes].numpy().data

    def deliver(self, nbytes: int, dtype: str, target: torch.Tensor, offset: int) -> None:
        """Start to copy the buffer's content into ``target[offset:]``, in elements."""
        values = self._buffers[self._turn][:nbytes].view(getattr(torch, dtype))
        self._free[self._turn] = self._transfers[target.device].start(values, target, offset)
        self._turn = 1 - self._turn

    def finish(self) -> None:
        """Wait until everything delivered is in its slots."""
        for transfer in self._transfers.values():
            transfer.finish()


def staging_buffers(
    count: int, nbytes: int, tensors: Iterable[torch.Tensor], make: Callable[[torch.device], Transfer] = Transfer
) -> list[StagingBuffers]:
    """Staging buffers of so many bytes for each of ``count`` threads, for slots of these tensors.

    Call it on the thread that prepared the slots, to whose device pinned memory belongs.
    """
    devices = {tensor.device for tensor in tensors}
    pinned = any(device.type != "cpu" for device in devices)
    return [StagingBuffers(nbytes, {device: make(device) for device in devices}, pinned) for _ in range(count)]


def _nothing() -> None:
    pass


def write_flat(target: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    """Write 1-D ``values`` into ``target`` from element ``offset``, in row-major order."""
    if target.is_contiguous():
        target.view(-1)[offset : offset + values.numel()].copy_(values)
        return
    positions = torch.arange(offset, offset + values.numel())
    target[torch.unravel_index(positions, target.shape)] = values.to(target.dtype).to(target.device)

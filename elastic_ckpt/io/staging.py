"""What is read into: pages of fresh tensors, mapped beforehand; else bounded host memory, and the way on from there.

Reads fill a staging buffer, whose parts are then copied into their targets. Into an accelerator it travels as a whole,
asynchronously, from pinned memory on a stream of its own, and is taken apart there. So disk and bus overlap: a thread
reads into another buffer, or other threads read.

Requantize items are decoded and quantized in parts. The format is that of bitsandbytes' blockwise optimizers: each
block has one fp32 scale (its ``absmax``), and a code stands for ``codebook[code] * scale``, in fp32
(``optimizer_update_8bit_blockwise`` in ``backends/cpu/ops.py``).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from elastic_ckpt.core.read_plan import ReadItem, RequantizeItem
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.errors import WITHOUT_STATES, DamagedError, Remedy
from elastic_ckpt.io.coalesce import StagedBatch, read_sizes, scales_of
from elastic_ckpt.report import ReadStats

_HUGE_NBYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
#: Smaller buffers are not worth a system call.
_LEAST_NBYTES = 1 << 18
#: CPU time to map a huge page: 0.2 ms if one is ready, 1 ms for as many small pages, 4 ms and more otherwise.
_SLOW_SECONDS = 0.8e-3
#: ``read(file, byte_offset, nbytes)`` returns bytes of a file of the plan.
ReadBytes = Callable[[int, int, int], bytearray]
#: Rounding of the fp32 arithmetic, relative to a block's scale.
_ROUNDING = 1e-6
#: Smallest difference between two fp32 numbers.
_LEAST = 2.0**-149


class Prefault:
    """Has the kernel map buffers that are about to be written. One object per load; thread-safe.

    A read into untouched memory faults page by page. Huge pages are several times faster if free ones are ready, and
    much slower if the kernel must compact memory or a virtual machine must get them from its host. This cannot be known
    beforehand, so each huge page is timed, and the first slow one is the last. All of this is advice: if the kernel
    rejects it, the read faults the pages in.
    """

    def __init__(self) -> None:
        self._huge = True

    def __call__(self, buffers: Iterable[memoryview]) -> None:
        """Map large buffers that are not mapped yet; their contents stay."""
        libc = _libc()
        for buffer in buffers if libc is not None else ():
            if len(buffer) < _LEAST_NBYTES:
                continue
            start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            mapped = ctypes.c_ubyte(0)
            stop = start + len(buffer)
            middle = (start + len(buffer) // 2) // mmap.PAGESIZE * mmap.PAGESIZE
            if libc.mincore(middle, mmap.PAGESIZE, ctypes.byref(mapped)) == 0 and mapped.value & 1:
                continue
            for page in range(start // _HUGE_NBYTES * _HUGE_NBYTES, stop, _HUGE_NBYTES):
                first = max(start // mmap.PAGESIZE * mmap.PAGESIZE, page)
                nbytes = min(stop, page + _HUGE_NBYTES) - first
                before = time.thread_time()
                is_huge = self._huge and nbytes == _HUGE_NBYTES
                if is_huge:
                    libc.madvise(first, nbytes, _MADV_HUGEPAGE)
                libc.madvise(first, nbytes, _MADV_POPULATE_WRITE)
                if is_huge and time.thread_time() - before > _SLOW_SECONDS:
                    self._huge = False


@cache
def _libc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc


def module_of(device: torch.device) -> Any:
    """The module of an accelerator's kind, such as :mod:`torch.cuda`; torch 2.4 has no function for it."""
    return getattr(torch, device.type)


def use_devices(devices: Collection[torch.device]) -> None:
    """Make the devices of targets current in this thread.

    In a new one it is the first of the machine, where whatever waits for an event would open a context.
    """
    for device in devices:
        if device.type != "cpu":
            module_of(device).set_device(device)


class StagingBuffers:
    """Host buffers in turn, for one thread at a time and targets on some devices.

    Into an accelerator, buffers travel on a stream beside the computation's. Values are converted and rows put in their
    places there, which halves the traffic if 16-bit values become 32-bit ones. Into host memory all is copied at once.
    Create it on the thread that prepared the targets: its stream is waited for, its device has the pinned memory.
    """

    def __init__(self, buffer_nbytes: int, devices: Collection[torch.device], buffers: int = 2) -> None:
        accelerators = [device for device in devices if device.type != "cpu"]
        pinned = bool(accelerators)
        self._buffers = [torch.empty(buffer_nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(buffers)]
        self._free: list[list[Callable[[], object]]] = [[]] * buffers
        self._turn = 0
        self._streams = {device: module_of(device).Stream(device) for device in accelerators}
        for device, stream in self._streams.items():
            # targets were allocated, and their gaps filled, on the stream of the computation
            stream.wait_stream(module_of(device).current_stream(device))

    def buffer(self, nbytes: int) -> memoryview:
        """The next buffer, once its previous content is copied."""
        for wait in self._free[self._turn]:
            wait()
        return self._buffers[self._turn][:nbytes].numpy().data

    def deliver(self, batch: StagedBatch, tensors: Sequence[torch.Tensor]) -> None:
        """Start to copy the buffer's content into its targets."""
        self._free[self._turn] = self.start(self._buffers[self._turn][: batch.nbytes], batch, tensors)
        self._turn = (self._turn + 1) % len(self._buffers)

    def start(
        self, raw: torch.Tensor, batch: StagedBatch, tensors: Sequence[torch.Tensor]
    ) -> list[Callable[[], object]]:
        """Start to copy the bytes of a batch; returns what waits until they may be overwritten."""
        waits: list[Callable[[], object]] = []
        for device in {tensors[item.target].device for item, _ in batch.parts}:
            if (stream := self._streams.get(device)) is None:
                write_parts(raw, batch, tensors)
                continue
            with module_of(device).stream(stream):  # a stream is no context itself before torch 2.7
                write_parts(raw.to(device, non_blocking=True), batch, tensors)
                waits.append(stream.record_event().synchronize)
        return waits

    def finish(self) -> None:
        """Wait until everything delivered is in its targets, which may then be used on any stream."""
        for stream in self._streams.values():
            stream.synchronize()


def write_parts(raw: torch.Tensor, batch: StagedBatch, tensors: Sequence[torch.Tensor]) -> None:
    """Write what a batch has for targets on the device of its bytes."""
    for item, position in joined(batch.parts):
        target = tensors[item.target]
        if target.device != raw.device:
            continue
        values = raw[position : position + item.nbytes].view(getattr(torch, item.dtype))
        if item.rows == 1 or item.target_stride == item.numel:
            write_flat(target, item.target_offset, values)
        elif target.is_contiguous():
            rows = target.view(-1)[item.target_offset : item.target_stop].unfold(0, item.numel, item.target_stride)
            rows.copy_(values.view(item.rows, item.numel))
        else:
            for number, row in enumerate(values.split(item.numel)):
                write_flat(target, item.target_offset + number * item.target_stride, row)


def joined(parts: Iterable[tuple[ReadItem, int]]) -> Iterator[tuple[ReadItem, int]]:
    """Parts of a buffer, in its order; what goes on in the buffer and in its target is one part, and one copy."""
    last = None
    start = 0
    for item, position in parts:
        if last is not None:
            end = last.target, last.dtype, last.target_stop, start + last.nbytes
            if item.rows == last.rows == 1 and end == (item.target, item.dtype, item.target_offset, position):
                last = replace(last, numel=last.numel + item.numel)
                continue
            yield last, start
        last = item
        start = position
    if last is not None:
        yield last, start


def write_flat(target: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    """Write 1-D ``values`` into ``target`` from element ``offset``, in row-major order."""
    if target.is_contiguous():
        target.view(-1)[offset : offset + values.numel()].copy_(values)
        return
    positions = torch.arange(offset, offset + values.numel())
    target[torch.unravel_index(positions, target.shape)] = values.to(target.dtype).to(target.device)


def requantize(item: RequantizeItem, tensors: Sequence[torch.Tensor], read: ReadBytes) -> ReadStats:
    """Fill a range of a target, and of that of its scales; :class:`DamagedError` if values cannot be quantized."""
    sizes = read_sizes(item)
    blocks = 0
    worst_error = 0.0
    if item.blocks is not None:
        blocks, worst_error = _to_codes(item, item.blocks, tensors, read)
    elif item.scale is None:
        for source in item.sources:
            write_flat(tensors[item.target], source.target_offset, _source(source, read)[0])
    else:  # in double precision, in which equal shares sum exactly to the original
        total = torch.zeros(item.numel, dtype=torch.float64)
        for source in item.sources:
            here = slice(source.target_offset - item.start, source.target_stop - item.start)
            total[here] += _source(source, read)[0]
        write_flat(tensors[item.target], item.start, total * item.scale)
    return ReadStats(sum(sizes), len(sizes), sum(sizes), blocks, worst_error)


def _to_codes(
    item: RequantizeItem, target: BlockFormat, tensors: Sequence[torch.Tensor], read: ReadBytes
) -> tuple[int, float]:
    """Fill codes and scales; returns the number of requantized blocks and their largest error."""
    blocks = target.blocks(item.numel)
    padded = blocks * target.numel  # the last block of a plane may be short
    codes = torch.full((padded,), target.codebook.zero, dtype=torch.uint8)
    values = torch.zeros(padded)
    # the least and greatest scale among a block's source elements: if equal, its codes can stay
    least = torch.full((padded,), torch.inf)
    greatest = torch.full((padded,), -torch.inf)
    for source in item.sources:
        here = slice(source.target_offset - item.start, source.target_stop - item.start)
        values[here], raw, source_scales = _source(source, read)
        if source_scales is not None and source.code is not None and source.code.format.codebook == target.codebook:
            codes[here] = raw
            least[here] = greatest[here] = source_scales
        else:
            least[here] = -torch.inf
            greatest[here] = torch.inf
    lower = least.view(blocks, -1).amin(dim=1)
    upper = greatest.view(blocks, -1).amax(dim=1)
    scales = torch.where(lower == upper, upper, torch.zeros_like(upper))
    mixed = lower < upper
    worst_error = 0.0
    if mixed.any():
        mixed_codes, scales[mixed], worst_error = encode(values.view(blocks, -1)[mixed], target.codebook)
        codes.view(blocks, -1)[mixed] = mixed_codes
    tensors[item.target].view(-1)[item.start : item.stop].copy_(codes[: item.numel])
    tensors[item.scales_target].view(-1)[item.scales_start : item.scales_start + blocks].copy_(scales)
    return int(mixed.sum()), worst_error


def _source(item: ReadItem, read: ReadBytes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The values of a source (fp32 if quantized), its elements as in the file, and if quantized each one's scale."""
    raw = torch.frombuffer(read(item.file, item.byte_offset, item.nbytes), dtype=getattr(torch, item.dtype))
    if item.code is None:
        return raw, raw, None
    file, byte_offset, nbytes = scales_of(item)
    scales = torch.frombuffer(read(file, byte_offset, nbytes), dtype=torch.float32)
    refuse_odd_scales(scales, item.code.scales_offset if item.code.scales_file < 0 else byte_offset)
    within = item.code.position % item.code.format.numel
    scales = scales.repeat_interleave(item.code.format.numel)[within : within + item.numel]
    return decode(raw, scales, item.code.format.codebook), raw, scales


def refuse_odd_scales(scales: torch.Tensor, byte_offset: int) -> None:
    """Raise :class:`DamagedError` for scales of 8-bit blocks that are not finite; it names no file."""
    is_finite = torch.isfinite(scales)
    if not is_finite.all():
        found = f"{scales[~is_finite][0].item()} near byte {byte_offset}"
        remedy = "the run that saved it had diverged, or the file is damaged: use another tag"
        raise DamagedError("the scale of an 8-bit block is not finite", None, "finite numbers", found, remedy=remedy)


@lru_cache(maxsize=32)
def _tables(codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(codebook.values, dtype=torch.float32)
    return values, (values[1:] + values[:-1]) / 2


def decode(codes: torch.Tensor, scales: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Values of uint8 codes ``[n]`` with fp32 scales ``[n]``: fp32, bitwise those that bitsandbytes uses."""
    return _tables(codebook)[0][codes.long()] * scales


def encode(values: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Quantize whole blocks, each value to the nearest code. ``values``: fp32 ``[blocks, elements of a block]``.

    The scale of a block is the smallest that maps every value into the codebook's range, whose negative end is -0.99297
    in bitsandbytes' signed map, not -1. Returns codes, uint8, one per element; scales, fp32, one per block; and the
    largest error as a fraction of its block's scale, without blocks of denormal numbers, which change by one rounding.

    Raises :class:`DamagedError` for a value that is not finite, or negative where the codebook has no negative values.
    """
    table, midpoints = _tables(codebook)
    scales = values.amax(dim=1).clamp(min=0)
    if codebook.signed:
        scales = torch.maximum(scales, (-values.amin(dim=1)).clamp(min=0) / -table[0])
    if not torch.isfinite(scales).all() or (not codebook.signed and (values < 0).any()):
        problem = "an optimizer state holds values that its 8-bit format cannot express"
        expected = "finite values"
        expected += "" if codebook.signed else " that are not negative"
        remedy = Remedy("the run that saved it had diverged: use an earlier tag"), WITHOUT_STATES
        raise DamagedError(problem, None, expected, f"{values.min()} to {values.max()}", remedy=remedy)
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    codes = torch.bucketize(values / divisors, midpoints)
    change = (table[codes] * scales.unsqueeze(1) - values).abs()
    allowed = scales.unsqueeze(1) * (codebook.bound + _ROUNDING) + _LEAST
    assert (change <= allowed).all(), f"values changed by up to {change.max()} in blocks of scale {scales.max()}"
    normal = scales >= torch.finfo(torch.float32).tiny  # below it, values have no full precision to lose
    worst = (change[normal] / divisors[normal]).max().item() if normal.any() else 0.0
    return codes.to(torch.uint8), scales, worst

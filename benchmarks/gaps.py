"""``python -m benchmarks.gaps``: when one read with gaps is cheaper than many without, by storage.

A rank of 2N that resumes a checkpoint of N reads half of each partition: pieces with gaps of their own size between
them. They are read from the page cache, and from a simulated network file system, where each read waits for an answer
and all reads of a rank share its bandwidth.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import write_document
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, TargetTensor
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import execute

app = typer.Typer(add_completion=False)
_KIB = 1 << 10
_ROUNDS = 3
#: Seconds that a read waits, and bytes/s of a rank, one of 8 on a node with 25 Gbit/s.
NETWORK = 1e-3, 375e6


@contextmanager
def network(latency_s: float, bandwidth: float) -> Iterator[None]:
    """Let every ``os.preadv`` of this process wait as on a network file system."""
    preadv, lock = os.preadv, threading.Lock()
    free_at = 0.0

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal free_at
        nbytes = preadv(descriptor, buffers, offset)
        with lock:
            free_at = max(free_at, time.perf_counter()) + nbytes / bandwidth
            until = free_at
        time.sleep(max(until - time.perf_counter(), 0) + latency_s)
        return nbytes

    with mock.patch("os.preadv", slow):
        yield


def seconds_of(path: Path, piece_nbytes: int, pieces: int, gap_nbytes: int) -> float:
    """Median seconds to read pieces of a file with gaps of their size between them; the memory is touched before."""
    numel = piece_nbytes // 4
    item = ReadItem(0, 0, 0, 0, numel, "float32", pieces, 2 * numel, numel)
    target = TargetTensor("fp32", 0, "", numel * pieces, "float32", (), False)
    plan = ReadPlan((SourceFile(str(path), path.stat().st_size),), (target,), (item,))
    memory, found = torch.ones(numel * pieces), []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        execute(plan, [memory], ReadOptions(gap_nbytes=gap_nbytes))
        found.append(time.perf_counter() - begin)
    assert not memory.any()
    return median(found)


@app.command()
def main(
    pieces: int = 400,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("benchmark_results"),
) -> None:
    """Measure pieces of 1 KiB to 1 MiB, each read alone and all merged."""
    table = Table("KiB of a piece and of a gap", "page cache, alone s", "merged s", "network, alone s", "merged s")
    points = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zeros"
        path.write_bytes(bytes(2 * pieces << 20))
        for kib in (1, 4, 16, 32, 64, 128, 256, 1024):
            row = [seconds_of(path, kib * _KIB, pieces, gap) for gap in (0, kib * _KIB)]
            with network(*NETWORK):
                row += [seconds_of(path, kib * _KIB, pieces, gap) for gap in (0, kib * _KIB)]
            table.add_row(f"{kib:,}", *(f"{seconds:.4f}" for seconds in row))
            points.append({"kib": kib, "seconds": row})
    write_document(out, "gaps", points, repeats=_ROUNDS)
    Console(width=120).print(table)


if __name__ == "__main__":
    app()

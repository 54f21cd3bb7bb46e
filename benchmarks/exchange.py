"""What nodes exchange of each other's files, beside ``all_to_all_single`` of as many bytes.

    python -m benchmarks.exchange [--ranks 2] [--mib 512]

Each rank wants all of a file in memory of the next rank, in buffers of its own. The reference sends as many bytes from
memory to memory, in rounds of the same size. Both are medians, taken in turns.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic_ckpt.io.exchange import Piece, Ranks, exchange
from elastic_ckpt.io.node_files import NodeFiles
from elastic_ckpt.storage.view import list_folders

_STAGING_NBYTES = 32 << 20  # half of what a load may take
_PIECE_NBYTES = 16 << 20


def _measure(rank: int, ranks: int, nbytes: int, repeats: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mine = Path(folder, str(rank))
    mine.mkdir()
    (mine / "file").write_bytes(bytes(nbytes))
    listing = list_folders("here", [str(mine)])
    target = memoryview(bytearray(nbytes))
    part_nbytes = _STAGING_NBYTES // 4
    sent = torch.zeros(part_nbytes, dtype=torch.uint8)
    received = torch.zeros(part_nbytes, dtype=torch.uint8)
    to = [part_nbytes if other == (rank - 1) % ranks else 0 for other in range(ranks)]
    of = [part_nbytes if other == (rank + 1) % ranks else 0 for other in range(ranks)]

    def ours() -> None:
        pieces = [Piece(0, at, [target[at : at + _PIECE_NBYTES]]) for at in range(0, nbytes, _PIECE_NBYTES)]
        with closing(NodeFiles(listing.files)) as files:
            errors = exchange(Ranks(), {(rank + 1) % ranks: pieces}, files, _STAGING_NBYTES)
        assert not errors

    def reference() -> None:
        for _ in range(nbytes // part_nbytes):
            dist.all_to_all_single(received, sent, of, to)

    seconds: dict[Callable[[], None], list[float]] = {ours: [], reference: []}
    for _ in range(repeats):
        for work, taken in seconds.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            taken.append(time.perf_counter() - start)
    if rank == 0:
        ours_s, reference_s = (statistics.median(taken) for taken in seconds.values())
        rate = nbytes / 1e9
        print(f"{ranks} ranks, {nbytes >> 20} MiB each: {rate / ours_s:.2f} GB/s a rank of files, ", end="")
        print(f"{rate / reference_s:.2f} GB/s by all_to_all_single alone: {reference_s / ours_s:.2f} of it")
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, each of which stands for a node")
    parser.add_argument("--mib", type=int, default=512, help="size of each rank's file")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median counts")
    arguments = parser.parse_args()
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        job = arguments.ranks, arguments.mib << 20, arguments.repeats, port, folder
        mp.spawn(_measure, job, arguments.ranks)


if __name__ == "__main__":
    main()

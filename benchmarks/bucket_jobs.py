"""One load from an object store, or of a folder that each node has downloaded before, in real processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import torch.distributed as dist
from obstore.store import S3Store

from benchmarks.buckets import DOWNLOAD
from benchmarks.cases import RESUME, Case
from benchmarks.contenders import InEngine
from benchmarks.held import Held, agreed, build_engine

#: Of a downloader: bytes of a request, and requests at a time.
_PART_NBYTES, _THREADS = 8 << 20, 8


def download(files: Mapping[str, int], folder: Path) -> None:
    """Bring all files to a folder, several parts at a time."""
    bucket = S3Store("bucket")

    def bring(part: tuple[int, str, int, int]) -> None:
        descriptor, name, start, stop = part
        os.pwrite(descriptor, memoryview(obstore.get_range(bucket, f"run/{name}", start=start, end=stop)), start)

    parts, descriptors = [], []
    for name, nbytes in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        descriptors.append(os.open(folder / name, os.O_WRONLY | os.O_CREAT))
        starts = range(0, nbytes, _PART_NBYTES)
        parts += [(descriptors[-1], name, start, min(start + _PART_NBYTES, nbytes)) for start in starts]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(bring, parts))
    for descriptor in descriptors:
        os.close(descriptor)


def bucket(arguments: dict[str, Any]) -> None:
    """Load once, judge it bit by bit, and write down the slowest rank's seconds."""
    rank = dist.get_rank()
    os.environ |= {"AWS_ENDPOINT_URL": arguments["endpoints"][rank], "AWS_ALLOW_HTTP": "true"}
    os.environ |= {"AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}
    held = Held(build_engine(Case(**arguments["case"]), saved=False))
    scratch = Path(arguments["scratch"])
    downloads = arguments["contender"] == DOWNLOAD
    runner = InEngine(held, scratch / "0", elastic=True, universal=False)
    runner.prepare(RESUME)
    dist.barrier()
    start = time.perf_counter()
    if downloads:
        download(arguments["files"], scratch / str(rank))
        runner.load(RESUME)
    else:
        held.engine.load_checkpoint("s3://bucket/run")
    mine = {"seconds": time.perf_counter() - start, "owned_nbytes": held.owned_nbytes}
    if not all(agreed(runner.judge()).values()):
        raise AssertionError("something is not as it was saved")
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    if rank == 0:
        facts = {"contender": arguments["contender"], "seconds": max(each["seconds"] for each in everybody)}
        facts["owned_nbytes"] = sum(each["owned_nbytes"] for each in everybody)
        Path(arguments["out"]).write_text(json.dumps(facts), encoding="utf-8")

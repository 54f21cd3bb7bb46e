"""Jobs whose ranks exchange ranges of files; a folder for each rank stands for the disk of its node."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import deepspeed
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import DamagedError, ElasticCkptError
from elastic_ckpt.io.exchange import Piece, Ranks, exchange
from elastic_ckpt.io.node_files import NodeFiles
from elastic_ckpt.storage.view import list_folders
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, loss_gap, on_all_ranks
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of, where
from tests.distributed.model import BUILDERS, GLOBAL_BATCH, build_engine, close, train
from tests.distributed.node_jobs import LOCAL, disk_of, engine_of

#: Of what is exchanged: nothing, less than a round, several rounds of which a failure is looked for in between.
MOST_NBYTES = [1 << 14, 1 << 16, 1 << 22]


def _content(rank: int, file: int, nbytes: int) -> bytes:
    return Random(f"{rank} {file}").randbytes(nbytes)


def draw(case: dict[str, Any]) -> list[list[str]]:
    """Exchange ranges that all ranks draw alike, ``count`` times; what was wrong.

    Every third time a file of a rank is shorter than it was listed: those who want of it must be told, and the others
    must have all that they wanted.
    """
    mine = dist.get_rank()
    ranks = Ranks()
    wrong: list[str] = []
    for number in range(case["count"]):
        random = Random(case["seed"] + number)
        sizes = [[random.choice([1, 5_000, 70_001]) for _ in range(3)] for _ in range(ranks.size)]
        folder = Path(case["folder"], str(number), str(mine))
        folder.mkdir(parents=True)
        for file, nbytes in enumerate(sizes[mine]):
            (folder / str(file)).write_bytes(_content(mine, file, nbytes))
        listing = list_folders("here", [str(folder)])
        broken = random.randrange(ranks.size) if number % 3 == 0 else -1
        if broken == mine:
            os.truncate(folder / "0", 0)
        wanted: dict[int, list[Piece]] = {}
        expected: list[tuple[int, int, bytearray, bytes]] = []
        for rank in range(ranks.size):
            for _ in range(random.randrange(6)):
                holder, file = random.randrange(ranks.size), random.randrange(3)
                start = random.randrange(sizes[holder][file])
                nbytes = random.randint(0, sizes[holder][file] - start)
                memory = bytearray(nbytes)
                cut = random.randint(0, nbytes)
                if rank == mine:
                    buffers = [memoryview(memory)[:cut], memoryview(memory)[cut:]]
                    wanted.setdefault(holder, []).append(Piece(file, start, buffers))
                    content = _content(holder, file, sizes[holder][file])[start : start + nbytes]
                    expected.append((holder, file, memory, content))
        with closing(NodeFiles(listing.files)) as files:
            errors = on_all_ranks(exchange(ranks, wanted, files, random.choice(MOST_NBYTES)))
        lacks_one = any(file == 0 and holder == broken and content for holder, file, _, content in expected)
        if lacks_one != (broken >= 0 and mine in errors[broken]):
            wrong.append(f"{number}: {errors}, {lacks_one}")
        for holder, file, memory, content in expected:
            if holder != broken and memory != content:
                wrong.append(f"{number}: file {file} of {holder}")
    return [wrong]


def load_alike(case: dict[str, Any]) -> list[dict[str, tuple[str, str]]]:
    """Load a checkpoint that nodes have apart, then from one folder with all files; what differs."""
    elastic_ckpt.install()
    merged = Path(case["folder"], "merged", "run")
    if dist.get_rank() == 0:
        for node in sorted(set(case["nodes"])):
            shutil.copytree(Path(case["folder"], node, "run"), merged, dirs_exist_ok=True)
    dist.barrier()
    digests = []
    disk = os.path.join(disk_of(case["folder"], case["nodes"]), "run")
    for folder in (disk, str(merged)):
        engine = engine_of(case)
        engine.load_checkpoint(folder)
        digests.append(oracle.fingerprint(engine))
        close(engine)
    return [{key: (digest, digests[1][key]) for key, digest in digests[0].items() if digest != digests[1][key]}]


def resume_spread(case: dict[str, Any]) -> list[Loaded]:
    """Load a checkpoint whose files are spread over nodes one by one, and compare with the truth; as ``jobs.resume``."""
    elastic_ckpt.install()
    folder = Path(case["folder"])
    names = sorted(set(case["nodes"]))
    if dist.get_rank() == 0:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "truth.pt")
        for number, path in enumerate(files):
            target = Path(case["scratch"], names[number % len(names)], "run", path.relative_to(folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    dist.barrier()
    setup = replace(case["setup"], config=(*case["setup"].config, *LOCAL))
    engine = build_engine(setup, BUILDERS[case["model"]](seed=8))
    engine._config.load_universal_checkpoint = case["format"] == "universal"
    truth = truth_of(case["folder"])
    if case["format"] == "dcp":
        counters = (SAVE_AT, SAVE_AT * GLOBAL_BATCH, 0)
        truth |= {"counters": counters, "scheduler": engine.lr_scheduler.state_dict()}
    _, client_state = engine.load_checkpoint(os.path.join(disk_of(case["scratch"], case["nodes"]), "run"))
    differences = oracle.differences(engine, truth)
    gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
    found = Loaded(case, where(case), engine.elastic_report, differences, gap, client_state)
    close(engine)
    return [found]


def fail_in_a_round(case: dict[str, Any]) -> list[tuple[str, str]]:
    """Load while one rank can no longer read what others want of its node's files; which error each rank raises."""
    elastic_ckpt.install()
    disk = os.path.join(disk_of(case["folder"], case["nodes"]), "run")
    engine = engine_of(case)
    read = NodeFiles.read
    left = case["after"]

    def until(files: NodeFiles, file: int, byte_offset: int, buffer: memoryview) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise DamagedError("a disk fails", f"file {file}", remedy="none")
        read(files, file, byte_offset, buffer)

    if dist.get_rank() == case["fails"]:
        NodeFiles.read = until  # type: ignore[method-assign]
    try:
        engine.load_checkpoint(disk)
        found = ("", "")
    except ElasticCkptError as error:
        found = (type(error).__name__, str(error))
    NodeFiles.read = read  # type: ignore[method-assign]
    close(engine)
    return [found]


BULK_NBYTES = 48 << 20


def _node_of(case: dict[str, Any], tag: str, seed: int = 0) -> str:
    """This rank's folder, with a large file of a tag."""
    os.environ["LOCAL_RANK"] = "0"
    folder = os.path.join(case["folder"], f"node{dist.get_rank()}")
    os.makedirs(os.path.join(folder, tag))
    name = f"zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"
    Path(folder, tag, name).write_bytes(Random(dist.get_rank() + seed).randbytes(BULK_NBYTES))
    dist.barrier()
    return folder


def copy_beside_training(case: dict[str, Any]) -> list[tuple[int, list[bool]]]:
    """Replicate two tags while collectives of the job go on; their number, and whether each copy is right."""
    folder = _node_of(case, "step1")
    first = elastic_ckpt.replicate(folder, "step1", copies=2)
    steps = 0
    while not all(on_all_ranks(first.done())) or steps < 5:
        steps += 1
    second_folder = _node_of(case, "step2", seed=9)
    second = elastic_ckpt.replicate(second_folder, "step2")
    third = elastic_ckpt.replicate(second_folder, "step2")  # waits for the second
    second.wait()
    third.wait()
    right = []
    for tag, seed, copies in (("step1", 0, 2), ("step2", 9, 1)):
        for step in range(1, copies + 1):
            rank = (dist.get_rank() + step) % dist.get_world_size()
            copy = Path(folder, ".replicas", tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            right.append(copy.read_bytes() == Random(rank + seed).randbytes(BULK_NBYTES))
    return [(steps, right)]


def end_while_copying(case: dict[str, Any]) -> list[str]:
    """Replicate, and leave the job in one of several ways meanwhile; what ``wait`` raises."""
    deepspeed.init_distributed(dist_backend="gloo")
    folder = _node_of(case, "step1")
    copies = elastic_ckpt.replicate(folder, "step1")
    dist.barrier()  # all have the group by now
    if case["how"] == "destroy":
        dist.destroy_process_group()
    if case["how"] == "kill" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case["how"] == "kill":
        while not copies.done():
            time.sleep(0.05)
    try:
        copies.wait()
    except ElasticCkptError as error:
        return [str(error)]
    return [""]


if __name__ == "__main__":  # as a script that ends without a word of waiting
    # after what else runs at the end: threads of gloo now and then abort the interpreter's teardown
    atexit.register(os._exit, 0)
    deepspeed.init_distributed(dist_backend="gloo")
    elastic_ckpt.replicate(_node_of({"folder": sys.argv[1]}, "step1"), "step1")
    print("ends", flush=True)

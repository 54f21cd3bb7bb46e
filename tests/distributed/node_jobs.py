"""Jobs whose ranks are on nodes with disks of their own.

A folder for each node stands for its disk, named by ``nodes``; without these, the ranks are on nodes already
(:mod:`tests.distributed.namespaces`), and ``folder`` is on the disk of each.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.io.node_files import NodeFiles
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt, log_lines, loss_gap, on_all_ranks
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, client_state_of, take_over, truth_of, where
from tests.distributed.model import BUILDERS, Setup, TinyLM, build_engine, close, train

LOCAL = (("checkpoint", {"use_node_local_storage": True}),)
#: Of the square parameter of a bulky model: 192 MiB with its states, of which no half fits into 64 MiB.
BULK_ROWS = 4096
_TENSORS = ("masters", "states")
#: Of a TCP segment with time stamps, on Ethernet.
HEADERS_NBYTES = 14 + 20 + 32
#: What a holder reads before it is lost; how long the ranks that have heard of it live on.
SENT_NBYTES, LINGER_SECONDS = 1 << 20, 20


def disk_of(folder: str, nodes: list[str] | None) -> str:
    """This rank's disk; DeepSpeed and elastic_ckpt know its place on its node from the launcher's variable."""
    if nodes is None:
        return folder
    mine = nodes[dist.get_rank()]
    os.environ["LOCAL_RANK"] = str(nodes[: dist.get_rank()].count(mine))
    return os.path.join(folder, mine)


def save_on_nodes(arguments: dict[str, Any]) -> None:
    """:func:`save_each` of ``setups`` in folders of their names."""
    shared = {key: value for key, value in arguments.items() if key not in ("folder", "setups")}
    folders = {setup: os.path.join(arguments["folder"], setup.name) for setup in arguments["setups"]}
    save_each([{**shared, "setup": setup, "folder": folder} for setup, folder in folders.items()])


def save_each(cases: list[dict[str, Any]]) -> None:
    """Save each ``setup`` with node-local storage; ``nodes``: the node of each rank.

    ``without_truth``: nothing is noted to compare with. ``older``: two steps before, under a tag of its own; ``replicas``: so many on other nodes, by ``replicate``.
    """
    for case in cases:
        setup, folder = case["setup"], case["folder"]
        take_over(case)
        disk = os.path.join(disk_of(folder, case.get("nodes")), "run")
        model = BUILDERS[case.get("model", "TinyLM")]
        engine = build_engine(Setup(**{**vars(setup), "config": (*setup.config, *LOCAL)}), model())
        first = case.get("first", 0)  # of the data
        train(engine, first, first + 2)
        if case.get("older"):
            engine.save_checkpoint(disk, tag="step2", client_state=client_state_of(dist.get_rank()))
        train(engine, first + 2, first + SAVE_AT)
        engine.save_checkpoint(disk, tag="step4", client_state=client_state_of(dist.get_rank()))
        if copies := case.get("replicas"):
            elastic_ckpt.replicate(disk, "step4", copies=copies).wait()
        if case.get("without_truth"):  # of states that no public getter shows whole
            close(engine)
            continue
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        close(engine)
        dist.barrier()


def load_on_nodes(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Load each case's ``folder`` on its ``nodes``, and compare all with the truth; ``section``: our options."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        truth = truth_of(case["folder"])
        disk = os.path.join(disk_of(case["folder"], case.get("nodes")), "run")
        engine = engine_of(case)
        with log_lines() as lines:
            path, client_state = engine.load_checkpoint(disk, **case.get("arguments", {}))
        differences = {} if path is not None else {"path": "None"}
        differences |= oracle.differences(engine, truth)
        for key, value in client_state_of(0).items():
            if key != "rng" and repr(client_state.get(key)) != repr(value):
                differences[key] = repr(client_state.get(key))
        gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
        facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap, client_state, tuple(lines)))
        close(engine)
    return facts


def refuse_on_nodes(cases: list[dict[str, Any]]) -> list[Refused]:
    """What happens to each case, which must be refused."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        disk = os.path.join(disk_of(case["folder"], case.get("nodes")), "run")
        engine = engine_of(case)
        facts.append(
            attempt(case, engine, lambda e=engine, d=disk, c=case: e.load_checkpoint(d, **c.get("arguments", {})))
        )
        close(engine)
    return facts


def engine_of(case: dict[str, Any], model: torch.nn.Module | None = None) -> Any:
    """The case's engine, with weights of its own. ``fallbacks``: more folders in ``folder`` to look for files."""
    setup = case["setup"]
    fallbacks = [os.path.join(case["folder"], name) for name in case.get("fallbacks", [])]
    more = {"fallback_dirs": fallbacks} if fallbacks else {}
    section = (("elastic_checkpoint", {**case.get("section", {}), **more}),)
    engine = build_engine(Setup(**{**vars(setup), "config": (*setup.config, *LOCAL, *section)}), model)
    train(engine, 50, 51)
    return engine


@dataclass(frozen=True)
class Measured:
    """What one rank did.

    Attributes:
        rank: which.
        received: bytes that came to its node over the network while all ranks loaded.
        growth: of the largest resident size over that before, in bytes.
        seconds: of the load.
        digests: of the rank's masters and states.
    """

    rank: int
    received: int
    growth: int
    seconds: float
    digests: dict[str, str]


def bulky() -> TinyLM:
    """A model beside whose tensors all else is small."""
    model = TinyLM()
    model.bulk = torch.nn.Parameter(torch.randn(BULK_ROWS, BULK_ROWS))
    return model


def measure(case: dict[str, Any]) -> list[Measured]:
    """Save or load (``loads``) a bulky model on nodes whose ranks have no other traffic."""
    elastic_ckpt.install()
    engine = engine_of(case, bulky())
    run = os.path.join(case["folder"], "run")
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the largest size is that of now
    size, received, start = _status("VmHWM"), _received(), time.monotonic()
    engine.load_checkpoint(run) if case["loads"] else engine.save_checkpoint(run, tag="step4")
    seconds, growth = time.monotonic() - start, _status("VmHWM") - size
    dist.barrier()
    marks = oracle.fingerprint(engine)
    found = Measured(dist.get_rank(), _received() - received, growth, seconds, {k: marks[k] for k in _TENSORS})
    close(engine)
    return [found]


def _status(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _received() -> int:
    """Bytes that have come in on this node's interface, without headers: of acknowledgements nothing is left."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    nbytes, packets = next(line.split()[1:3] for line in lines if line.strip().startswith("eth0:"))
    return int(nbytes) - int(packets) * HEADERS_NBYTES


@dataclass(frozen=True)
class Survivor:
    """How a rank heard of another one's end: class and base classes of the error, its text."""

    rank: int
    kinds: tuple[str, ...]
    text: str


def lose_a_holder(case: dict[str, Any]) -> list[Survivor]:
    """Load while rank ``lost`` gets ``signal`` in the middle of a file that it reads for others.

    ``limit``: seconds after which a collective gives up. ``apart``: a folder that all ranks see. Those that have heard of it
    live on until all have, if ``linger``; the last one ends a rank that was stopped.
    """
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=case["limit"]))
    elastic_ckpt.install()
    engine = engine_of(case, BUILDERS["BigLM"]())
    apart, mine, ranks = Path(case["apart"]), dist.get_rank(), dist.get_world_size()
    lost = on_all_ranks(os.getpid())[case["lost"]]
    if mine == case["lost"]:
        NodeFiles.read = _read_until(apart / "lost", case["signal"])
    try:
        engine.load_checkpoint(os.path.join(case["folder"], "run"))
        error: Exception | None = None
    except Exception as raised:
        error = raised
    (apart / str(mine)).touch()
    limit = time.monotonic() + (LINGER_SECONDS if case["linger"] else 0)
    while not (is_last := len(list(apart.iterdir())) == ranks) and time.monotonic() < limit:
        time.sleep(0.05)
    if is_last:
        with suppress(ProcessLookupError):  # it was killed
            os.kill(lost, signal.SIGKILL)
    kinds = tuple(kind.__name__ for kind in type(error).__mro__) if error else ()
    return [Survivor(mine, kinds, str(error))]


def _read_until(noted: Path, what: int) -> Callable[..., None]:
    """``NodeFiles.read`` until a number of bytes was read; then this process notes the time, and gets a signal."""
    read = NodeFiles.read
    read_nbytes = 0

    def until(files: NodeFiles, file: int, byte_offset: int, buffer: memoryview) -> None:
        nonlocal read_nbytes
        read_nbytes += len(buffer)
        read(files, file, byte_offset, buffer)
        if read_nbytes >= SENT_NBYTES:
            noted.touch()
            os.kill(os.getpid(), what)

    return until

"""Jobs whose ranks are on nodes with disks of their own.

A folder for each node stands for its disk, named by ``nodes``; without these, the ranks are on nodes already
(:mod:`tests.distributed.namespaces`), and ``folder`` is on the disk of each.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt, log_lines, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, client_state_of, where
from tests.distributed.model import Setup, build_engine, close, train

LOCAL = (("checkpoint", {"use_node_local_storage": True}),)


def disk_of(folder: str, nodes: list[str] | None) -> str:
    """This rank's disk; DeepSpeed and elastic_ckpt know its place on its node from the launcher's variable."""
    if nodes is None:
        return folder
    mine = nodes[dist.get_rank()]
    os.environ["LOCAL_RANK"] = str(nodes[: dist.get_rank()].count(mine))
    return os.path.join(folder, mine)


def save_on_nodes(arguments: dict[str, Any]) -> None:
    """Save each of ``setups`` with node-local storage; ``nodes``: the node of each rank.

    ``older``: two steps before, under a tag of its own; ``replicas``: so many on other nodes, by ``replicate``.
    """
    for setup in arguments["setups"]:
        folder = os.path.join(arguments["folder"], setup.name)
        disk = os.path.join(disk_of(folder, arguments.get("nodes")), "run")
        engine = build_engine(Setup(**{**vars(setup), "config": (*setup.config, *LOCAL)}))
        train(engine, 0, 2)
        if arguments.get("older"):
            engine.save_checkpoint(disk, tag="step2", client_state=client_state_of(dist.get_rank()))
        train(engine, 2, SAVE_AT)
        engine.save_checkpoint(disk, tag="step4", client_state=client_state_of(dist.get_rank()))
        if copies := arguments.get("replicas"):
            elastic_ckpt.replicate(disk, "step4", copies=copies).wait()
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
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
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
        facts.append(attempt(case, engine, lambda e=engine, d=disk: e.load_checkpoint(d)))
        close(engine)
    return facts


def engine_of(case: dict[str, Any]) -> Any:
    """The case's engine, with weights of its own."""
    setup = case["setup"]
    section = (("elastic_checkpoint", case.get("section", {})),)
    engine = build_engine(Setup(**{**vars(setup), "config": (*setup.config, *LOCAL, *section)}))
    train(engine, 50, 51)
    return engine

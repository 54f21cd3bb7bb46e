"""Client states of all kinds: ``client_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import refusal_jobs
from tests.distributed.facts import Refused, log_lines
from tests.distributed.jobs import SAVE_AT, SPOILS
from tests.distributed.model import TinyLM, build_engine, close, train
from tests.formats.client_states import ALLOWED, OBJECTS, OF_USERS, TENSORS, Comparison


class NotAllowed:
    """A class that the script does not allow."""


def client_state() -> dict[Any, Any]:
    """One of each, and what contains itself; in ZeRO-3 each rank saves its own."""
    state: dict[Any, Any] = {name: make() for name, make in {**TENSORS, **OBJECTS, **OF_USERS}.items()}
    itself: list[Any] = [state["shared"]]
    itself.append(itself)
    return {0: "fold", **state, "rank": dist.get_rank(), "itself": itself, "odd": NotAllowed()}


def save(case: dict[str, Any]) -> None:
    """Train and save, by DeepSpeed alone."""
    elastic_ckpt.uninstall()
    warnings.simplefilter("ignore")
    engine = build_engine(case["setup"], TinyLM(seed=7))
    train(engine, 0, SAVE_AT)
    engine.save_checkpoint(case["folder"], tag="here", client_state=client_state())
    close(engine)


def allow() -> None:
    """All classes but one."""
    warnings.simplefilter("ignore")
    torch.serialization.add_safe_globals(ALLOWED)


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load it."""
    allow()
    return refusal_jobs.refuse([case])


def skip(case: dict[str, Any]) -> list[str | None]:
    """Load it without the entry that cannot be read; how the others differ from what torch makes of DeepSpeed's file."""
    allow()
    elastic_ckpt.install()
    engine = build_engine(case["setup"], TinyLM(seed=8))
    with log_lines() as lines:
        _, client = engine.load_checkpoint(case["folder"])
    found = (engine.elastic_report is not None, "odd" in client, engine.global_steps)
    close(engine)
    if found != (True, False, SAVE_AT):
        return [f"{list(client)}: {found}"]
    if dist.get_rank() == 0 and not any("'odd'" in line and "NotAllowed" in line for line in lines):
        return [f"no warning: {lines}"]
    rank = dist.get_rank() if dist.get_world_size() == 2 else 0
    name = f"zero_pp_rank_{rank}_mp_rank_00" if case["setup"].stage == 3 else "mp_rank_00"
    expected = torch.load(Path(case["folder"]) / "here" / f"{name}_model_states.pt", weights_only=False)
    if SPOILS:
        expected["rank"] = -1
    keys = [key for key in client_state() if key != "odd"]
    return [Comparison().difference({key: expected[key] for key in keys}, {key: client.get(key) for key in keys})]

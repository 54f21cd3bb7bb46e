"""Client states of all kinds: ``client_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import UnsafePickleError
from tests.distributed import truth as oracle
from tests.distributed.facts import log_lines
from tests.distributed.jobs import SAVE_AT
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


def save(cases: list[dict[str, Any]]) -> None:
    """Train and save with each setup, by DeepSpeed alone."""
    elastic_ckpt.uninstall()
    warnings.simplefilter("ignore")
    for case in cases:
        engine = build_engine(case["setup"], TinyLM(seed=7))
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(case["folder"], tag="here", client_state=client_state())
        close(engine)


def load(cases: list[dict[str, Any]]) -> list[str | None]:
    """Load each folder; what is not as it should be."""
    elastic_ckpt.install()
    warnings.simplefilter("ignore")
    torch.serialization.add_safe_globals(ALLOWED)
    found: list[str | None] = []
    for case in cases:
        engine = build_engine(case["setup"], TinyLM(seed=8))
        found.append(_skipping(engine, case) if case["skips"] else _refusing(engine, case))
        close(engine)
    return found


def _refusing(engine: Any, case: dict[str, Any]) -> str | None:
    """By default one entry that cannot be read is an error, which names it, and changes nothing."""
    before = oracle.fingerprint(engine)
    try:
        engine.load_checkpoint(case["folder"])
    except UnsafePickleError as error:
        is_clear = "the entry 'odd' of the client state" in str(error) and "NotAllowed" in str(error)
        return None if is_clear and before == oracle.fingerprint(engine) else str(error)
    return "no error"


def _skipping(engine: Any, case: dict[str, Any]) -> str | None:
    """All others are what torch's loader makes of the file that DeepSpeed's reads."""
    with log_lines() as lines:
        _, client = engine.load_checkpoint(case["folder"])
    rank = dist.get_rank() if dist.get_world_size() == 2 else 0
    name = f"zero_pp_rank_{rank}_mp_rank_00" if case["setup"].stage == 3 else "mp_rank_00"
    expected = torch.load(Path(case["folder"]) / "here" / f"{name}_model_states.pt", weights_only=False)
    if engine.elastic_report is None or "odd" in client or engine.global_steps != SAVE_AT:
        return f"{list(client)}, {engine.elastic_report}"
    if dist.get_rank() == 0 and not any("'odd'" in line and "NotAllowed" in line for line in lines):
        return f"no warning: {lines}"
    keys = [key for key in client_state() if key != "odd"]
    return Comparison().difference({key: expected[key] for key in keys}, {key: client.get(key) for key in keys})

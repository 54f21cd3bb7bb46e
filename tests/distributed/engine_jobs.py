"""Several engines in one process: ``engine_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError
from tests.distributed import truth as oracle
from tests.distributed.evaluation_jobs import build_evaluation_engine
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup, WiderLM, build_engine, close, train

ACTOR, CRITIC = Setup(1), Setup(3)


def save(case: dict[str, Any]) -> None:
    """Train and save an actor and a critic of another size in turn."""
    folder = case["folder"]
    elastic_ckpt.install()
    engines = {"actor": build_engine(ACTOR), "critic": build_engine(CRITIC, WiderLM())}
    for step in range(2):
        for engine in engines.values():
            train(engine, step, step + 1)
    for name, engine in engines.items():
        engine.save_checkpoint(os.path.join(folder, name))
    for name, engine in engines.items():
        oracle.relink(engine)
        torch.save(oracle.gather(engine, oracle.state_keys(engine)), os.path.join(folder, name, "truth.pt"))
        close(engine)


def load(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load them side by side, anew, and in threads; what is not as it was saved, by what was done."""
    folder = case["folder"]
    elastic_ckpt.install()
    folders = {name: os.path.join(folder, name) for name in ("actor", "critic")}
    truths = {name: truth_of(path) for name, path in folders.items()}
    found = SimpleNamespace(rank=dist.get_rank(), differences={}, reports={}, refused=[])
    actor, critic = build_engine(ACTOR), build_engine(CRITIC, WiderLM(seed=8))
    reference = build_evaluation_engine(Setup(3))
    actor.load_checkpoint(folders["actor"])
    found.reports["before"] = critic.elastic_report
    critic.load_checkpoint(folders["critic"])
    reference.load_checkpoint(folders["actor"])
    found.reports |= {"actor": actor.elastic_report.source.folder, "critic": critic.elastic_report.source.folder}
    for name, engine in {"actor": actor, "critic": critic}.items():
        found.differences[f"{name} beside the others"] = oracle.differences(engine, truths[name])
    weights = {"weights": oracle.low_precision(reference)}
    found.differences["reference"] = oracle.compare(weights, {"weights": truths["actor"]["masters"]})
    train(critic, 5, 6)
    close(reference)
    close(actor)
    actor = build_engine(Setup(3))
    found.reports["anew"] = actor.elastic_report
    actor.load_checkpoint(folders["actor"])
    found.differences["another actor"] = oracle.differences(actor, truths["actor"])
    _in_threads(actor, critic, folders, found)
    found.differences["actor in a thread"] = oracle.differences(actor, truths["actor"])
    found.differences["critic after it"] = oracle.differences(critic, truths["critic"])
    close(actor)
    close(critic)
    return [found]


def _in_threads(actor: Any, critic: Any, folders: dict[str, str], found: SimpleNamespace) -> None:
    """Load the actor in a thread; and the critic meanwhile, which is refused, then again."""
    train(actor, 7, 8)
    began, goes_on, errors = threading.Event(), threading.Event(), list[BaseException]()
    scheduler, own = actor.lr_scheduler, actor.lr_scheduler.load_state_dict

    def wait(state: Any) -> None:
        """A script's own code, in the midst of a load."""
        began.set()
        assert goes_on.wait(60)
        own(state)

    def load() -> None:
        try:
            actor.load_checkpoint(folders["actor"])
        except BaseException as error:
            errors.append(error)

    scheduler.load_state_dict = wait
    thread = threading.Thread(target=load)
    thread.start()
    assert began.wait(60), errors
    before = oracle.fingerprint(critic)
    try:
        critic.load_checkpoint(folders["critic"])
    except ElasticCkptError as error:
        found.refused.append(f"{type(error).__name__}: {error}")
    finally:
        goes_on.set()
    thread.join(60)
    assert not thread.is_alive() and not errors, errors
    del scheduler.load_state_dict
    found.differences["critic that was refused"] = before != oracle.fingerprint(critic) or {}
    critic.load_checkpoint(folders["critic"])

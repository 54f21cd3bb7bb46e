"""Jobs about loads that must fail: with the same error on all ranks, and an engine that is as it was before."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.jobs import SAVE_AT
from tests.distributed.model import build_engine, close, setup_from_json, train


def refuse(arguments: dict[str, Any]) -> None:
    """Every damaged folder raises the expected error, the same on all ranks, and leaves the engine untouched."""
    elastic_ckpt.install()
    engines: dict[str, Any] = {}
    for case in arguments["cases"]:
        setup = setup_from_json(case.get("setup") or arguments["setup"])
        key = repr((setup, case.get("model")))
        if key not in engines:
            engines[key] = build_engine(setup, models.BUILDERS[case.get("model", "TinyLM")]())
            train(engines[key], 50, 52)
        engine = engines[key]
        before = oracle.fingerprint(engine)
        message = expect_error(case, engine)
        oracle.agree(message)
        for detail in case["says"]:
            assert detail in message, f"{case['name']}: {detail!r} is not in:\n{message}"
        after = oracle.fingerprint(engine)
        changed = [what for what in before if before[what] != after[what]]
        assert not changed, f"{case['name']}: a refused load changed {changed}"
        assert engine.elastic_report is None, case["name"]
        train(engine, 52, 53)


def _into(src: dict[str, Any], dst: Any) -> None:
    """A ``custom_load_fn``, which only DeepSpeed's own loader takes."""
    dst.load_state_dict(src)


def expect_error(case: dict[str, Any], engine: Any) -> str:
    """The text of the error that loading this case raises; fails where it is missing or of another kind."""
    try:
        more = {"custom_load_fn": _into} if case.get("custom_load_fn") else {}
        engine.load_checkpoint(case["folder"], **case.get("arguments", {}), **more)
    except elastic_ckpt.ElasticCkptError as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        assert case["error"] in kinds - {"Exception"}, f"{case['name']}: {type(error).__name__}: {error}"
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{case['name']}: loaded without an error")


def diverge(arguments: dict[str, Any]) -> None:
    """Ranks that ask for different things all get the same error, and none waits for another."""
    elastic_ckpt.install()
    engine = build_engine(setup_from_json(arguments["setup"]))
    before = oracle.fingerprint(engine)
    first = dist.get_rank() == 0
    for name, here in (
        ("load_dir", {"folder": arguments["folder"] if first else "/nowhere"}),
        # rank 0 looks for the checkpoint: what it does not find is not the point
        ("load_dir", {"folder": "/nowhere" if first else arguments["folder"]}),
        ("tag", {"folder": arguments["folder"], "arguments": {"tag": "no_such_tag" if first else "step4"}}),
        ("tag", {"folder": arguments["folder"], "arguments": {"tag": "step4" if first else None}}),
        ("load_module_only", {"folder": arguments["folder"], "arguments": {"load_module_only": first}}),
    ):
        message = expect_error({"name": name, "error": "ConfigError", **here}, engine)
        oracle.agree(message)
        assert name in message and "rank 1" in message, message
    elastic_ckpt.config.set_flags(mode="off" if first else "auto")
    oracle.agree(expect_error({"name": "mode", "folder": arguments["folder"], "error": "ConfigError"}, engine))
    elastic_ckpt.config.clear_flags()
    assert oracle.fingerprint(engine) == before


def bad_scheduler(arguments: dict[str, Any]) -> None:
    """A scheduler that fails on one rank is taken back on all."""
    elastic_ckpt.install()
    engine = build_engine(setup_from_json(arguments["setup"]))
    train(engine, 50, 51)
    real = type(engine.lr_scheduler)

    class Failing(real):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if dist.get_rank() == 1 and state_dict["last_epoch"] == SAVE_AT:
                raise KeyError("a key that this scheduler wants")

    engine.lr_scheduler.__class__ = Failing
    before = oracle.fingerprint(engine)
    message = expect_error({"name": "scheduler", "error": "ElasticCkptError", **arguments}, engine)
    oracle.agree(message)
    assert "lr scheduler" in message and "a key that this scheduler wants" in message, message
    assert oracle.fingerprint(engine) == before
    engine.load_checkpoint(arguments["folder"], load_lr_scheduler_states=False)
    assert engine.global_steps == SAVE_AT


def break_reading(arguments: dict[str, Any]) -> None:
    """A disk that fails after the plan was agreed on: an error on all ranks that says the engine is spoilt."""
    elastic_ckpt.install()
    engine = build_engine(setup_from_json(arguments["setup"]))
    real = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    os.preadv = failing if dist.get_rank() == dist.get_world_size() - 1 else real
    case = {"name": "broken disk", "error": "PartialLoadError", **arguments}
    message = expect_error(case, engine)
    oracle.agree(message)
    assert "must not be trained or saved" in message and "Input/output error" in message, message
    os.preadv = real
    engine.load_checkpoint(arguments["folder"])
    truth = torch.load(os.path.join(arguments["folder"], "truth.pt"), weights_only=False)
    oracle.assert_equal(engine, truth, "loading again after a broken read")


def delegate(arguments: dict[str, Any]) -> None:
    """What is DeepSpeed's stays DeepSpeed's."""
    elastic_ckpt.install()
    plain, diary = arguments["plain"], arguments["diary"]
    truth = torch.load(os.path.join(diary, "truth.pt"), weights_only=False)

    engine = build_engine(setup_from_json(arguments["diary_setup"]))
    engine._config.load_universal_checkpoint = True  # left on by mistake: must not break a native resume
    path, client_state = engine.load_checkpoint(diary)
    assert engine.elastic_report is None and path.endswith("model_states.pt") and client_state["note"] == "hello"
    assert engine.load_universal_checkpoint() is True
    oracle.assert_equal(engine, truth, "an optimizer that only DeepSpeed knows, at its own topology")

    seen = []
    engine._config.load_universal_checkpoint = False
    engine.load_checkpoint(diary, custom_load_fn=lambda src, dst: seen.append(sorted(src)))
    assert seen and "hidden.weight" in seen[0] and engine.elastic_report is None
    assert engine.load_checkpoint(arguments["empty"]) == (None, None)
    assert engine.load_checkpoint(os.path.join(arguments["empty"], "nowhere")) == (None, None)
    message = expect_error({"name": "AdamW's states for another", "folder": plain, "error": "MismatchError"}, engine)
    oracle.agree(message)
    assert "Wanderer" in message, message
    close(engine)

    engine = build_engine(setup_from_json(arguments["require_setup"]))
    for folder, error, arguments_ in (
        (arguments["empty"], "NotFoundError", {}),
        (plain, "UnsupportedError", {"custom_load_fn": print}),
    ):
        case = {"name": "require", "folder": folder, "error": error, "arguments": arguments_}
        oracle.agree(expect_error(case, engine))
    engine.load_checkpoint(plain)
    assert engine.elastic_report is not None
    close(engine)

    engine = build_engine(setup_from_json(arguments["off_setup"]))
    engine.load_checkpoint(plain)
    assert engine.elastic_report is None, "mode off"
    close(engine)


def pending(arguments: dict[str, Any]) -> None:
    """Gradients that wait for a step are refused, and the remedy works."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        engine = build_engine(setup_from_json(case["setup"]))
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        rows = models.batch(70, dist.get_world_size(), dist.get_rank())
        engine.backward(engine(rows[: len(rows) // engine.gradient_accumulation_steps()]))
        if engine.gradient_accumulation_steps() > 1:
            engine.step()  # of the first micro-batch: no update yet
        oracle.agree(expect_error({"name": "pending", "error": "MismatchError", **case}, engine))
        if engine.gradient_accumulation_steps() > 1:
            engine.backward(engine(rows[: len(rows) // 2]))
        engine.step()
        engine.load_checkpoint(case["folder"])
        oracle.assert_equal(engine, truth, f"{case}: after the remedy")
        close(engine)

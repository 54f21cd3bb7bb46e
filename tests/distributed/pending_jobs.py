"""Loads between a backward and its step, and everywhere else: ``pending_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from elastic_ckpt.engines.compat import holds_gradients
from tests.distributed.jobs import SPOILS
from tests.distributed.model import TinyLM, batch, build_engine, close

SIZE = 4


def moments(case: dict[str, Any]) -> list[list[tuple[str, bool]]]:
    """At which moments of a run with ``setup`` gradients are pending; loads what was saved after the first step at each."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"], TinyLM())
    found, saved = [("fresh", holds_gradients(engine))], False
    for moment in _train(engine):
        if moment == "after a step" and not saved:
            saved = True
            engine.save_checkpoint(case["folder"])
        found.append((moment, _pending(engine, case["folder"]) if saved else holds_gradients(engine)))
    close(engine)
    if SPOILS:
        found[-1] = (found[-1][0], True)
    return [found]


def _train(engine: Any) -> Iterator[str]:
    """Moments of a run: as DeepSpeed counts micro-batches, as Accelerate does, and as Lightning and others clear them."""

    def backward(number: int) -> None:
        engine.backward(engine(batch(number, dist.get_world_size(), dist.get_rank())))

    micro_batches = engine.gradient_accumulation_steps()
    for number in range(2 * micro_batches):
        backward(number)
        yield "after a backward, pending"
        engine.step()
        yield "after a step" + (", pending" if (number + 1) % micro_batches else "")
    for is_last in (False, False, True):
        engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        backward(7)
        yield f"after a backward of Accelerate ({is_last}), pending"
    engine.step()
    yield "after a step of Accelerate"
    engine.eval()
    with torch.no_grad():
        engine(batch(8, dist.get_world_size(), dist.get_rank()))
    engine.train()
    yield "after an evaluation"
    for param in engine.module.parameters():
        param.grad = torch.zeros_like(param)
    yield "with gradients of zero"


def _pending(engine: Any, folder: str) -> bool:
    """Whether a load refuses; what the engine says is the same."""
    pending = holds_gradients(engine)
    try:
        engine.load_checkpoint(folder)
    except elastic_ckpt.ElasticCkptError as error:
        assert "no step has used yet" in str(error), error
        assert pending
        return True
    assert engine.elastic_report is not None and not pending
    return False


def pipeline(case: dict[str, Any]) -> list[bool]:
    """Whether loads of a pipeline of two stages, which accumulates, refuse after a batch and after an evaluation."""
    elastic_ckpt.install()
    layers: list[nn.Module] = [nn.Linear(SIZE, SIZE) for _ in range(4)]
    module = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, **case["config"]}
    optimizer = torch.optim.AdamW(module.parameters())
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    dtype = next(module.parameters()).dtype
    data = [(torch.randn(2, SIZE, dtype=dtype), torch.randn(2, SIZE, dtype=dtype))] * 12
    engine.save_checkpoint(case["folder"])
    found = []
    for _ in range(2):
        engine.train_batch(iter(data))
        found.append(_pending(engine, case["folder"]))
        engine.eval_batch(iter(data))
        found.append(_pending(engine, case["folder"]) or bool(SPOILS))
    close(engine)
    return found

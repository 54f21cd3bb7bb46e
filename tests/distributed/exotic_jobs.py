"""Engines that elastic_ckpt does not restore itself: ``exotic_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from tests.distributed.facts import Loaded, Refused, attempt, log_lines, loss_gap
from tests.distributed.jobs import SPOILS
from tests.distributed.kept import close_kept, engine_of
from tests.distributed.model import GLOBAL_BATCH, VOCABULARY, close, train
from tests.distributed.truth import fingerprint

SAVE_AT = 3
CONTINUE_TO = 4
WIDTH = 12
#: States of 1-bit optimizers that are other ones on each rank, and are not saved whole.
ERRORS = ("worker_error", "server_error")


class DenseLM(nn.Module):
    """An embedding, a hidden layer, a head.

    All sizes are even: ZeRO-3 leaves the padding of partitions uninitialised, and here there is none on two ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("ticks", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ticks += 1
        logits = self.head(torch.tanh(self.hidden(self.embedding(tokens[:, :-1]))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class OnebitAdam(torch.optim.Optimizer):
    """Stands in for the 1-bit Adam of DeepSpeed before 0.19.8: its states, and what it does when it loads them.

    The compressed all-reduce is left out. What it loses is kept in two error states, other ones on each rank; only
    rank 0's are saved, so the real optimizer too drops them when it loads.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                if "worker_error" not in state:
                    unit = 8 * dist.get_world_size()
                    padded = -(-param.numel() // unit) * unit
                    state["worker_error"] = torch.zeros(padded)
                    state["server_error"] = torch.zeros(padded // dist.get_world_size())
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(param.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
                state["worker_error"][: param.numel()].add_(param.grad.flatten(), alpha=1e-3 * (1 + dist.get_rank()))
                state["server_error"].add_(1e-4 * (1 + dist.get_rank()))
                param.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for error in ERRORS:
                state.pop(error, None)


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
MORE_CONFIG: dict[str, dict[str, Any]] = {
    "plain": ADAMW,
    "hybrid": {**ADAMW, "hybrid_engine": {"enabled": True}},
    "onebit": {},
}


def build(kind: str, stage: int) -> Any:
    """A live engine of one kind: ``plain``, ``hybrid`` or ``onebit``."""
    model = DenseLM()
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **MORE_CONFIG[kind],
    }
    return deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=OnebitAdam if kind == "onebit" else None,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        config=config,
    )[0]


def state_of(engine: Any) -> dict[str, str]:
    """Hashes of what a load restores on this rank."""
    found = fingerprint(engine, ERRORS)
    counters = {"counters": repr((engine.global_steps, engine.global_samples, engine.skipped_steps))}
    return {
        part: found[part] for part in ("weights", "partitions", "masters", "states", "groups", "scheduler")
    } | counters


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train and save each ``setup``, a kind of engine and a ZeRO stage."""
    elastic_ckpt.install()
    for case in cases:
        engine = build(*case["setup"])
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(case["folder"], tag="step3", client_state={"note": "hello"})
        close(engine)
        dist.barrier()


def restore(case: dict[str, Any]) -> list[Loaded]:
    """Load into an engine of ``setup`` that was trained as the saved one was, and then on; and train again."""
    elastic_ckpt.install()
    close_kept()
    engine = build(*case["setup"])
    train(engine, 0, SAVE_AT + SPOILS)
    saved = state_of(engine)
    losses = train(engine, SAVE_AT, CONTINUE_TO)
    with log_lines() as lines:
        _, client_state = engine.load_checkpoint(case["folder"])
    now = state_of(engine)
    differences = {part: "is another one" for part in saved if saved[part] != now[part]}
    gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), {"losses": losses})
    found = Loaded(case, case["name"], engine.elastic_report, differences, gap, client_state, lines)
    close(engine)
    return [found]


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load into an engine of ``setup`` that has trained, and train on."""
    elastic_ckpt.install()
    engine = engine_of(case["setup"], partial(build, *case["setup"]), close)
    train(engine, 20, 21)
    refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"]), ERRORS)
    train(engine, 21, 22)
    return [refused] if dist.get_rank() == 0 else None

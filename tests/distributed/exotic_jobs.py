"""Engines that elastic_ckpt does not restore itself: ``python -m tests.distributed.exotic_jobs JSON`` on every rank."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

import elastic_ckpt
from tests.distributed.model import GLOBAL_BATCH, VOCABULARY, train

SAVE_AT = 3
CONTINUE_TO = 4
WIDTH = 12
EXPERTS = 4
#: States of 1-bit optimizers that are other ones on each rank, and are not saved whole.
ERRORS = ("worker_error", "server_error")
OWN_LOADER = "elastic_ckpt leaves this load to DeepSpeed's own loader: "


class DenseLM(nn.Module):
    """What the models with experts are without them: an embedding, a hidden layer, a head.

    All sizes are even: ZeRO-3 leaves the padding of partitions uninitialised, and here there is none on two ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = self.make_hidden()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("ticks", torch.zeros(1, dtype=torch.int64))

    def make_hidden(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ticks += 1
        hidden = self.hidden(self.embedding(tokens[:, :-1]))
        extra = 0.0
        if isinstance(hidden, tuple):
            hidden, extra = hidden[0], 0.01 * hidden[1]
        logits = self.head(torch.tanh(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + extra


class SparseLM(DenseLM):
    """Its hidden layer is a mixture of experts, which lie on ``ep_size`` ranks; nothing in it is random."""

    def __init__(self, ep_size: int, experts: int = EXPERTS) -> None:
        self._sizes = {"ep_size": ep_size, "num_experts": experts}
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name == "_sizes" else super().__setattr__(name, value)

    def make_hidden(self) -> nn.Module:
        return MoE(WIDTH, nn.Linear(WIDTH, WIDTH), k=1, use_rts=False, capacity_factor=4.0, **self._sizes)


class FusedExperts(nn.Module):
    """All experts' weights in two tensors, as Hugging Face models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)


class RoutedExperts(nn.Module):
    """What AutoEP looks for in a model, and puts its own layer of experts in place of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = FusedExperts()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("AutoEP replaces this module")


class RoutedLM(DenseLM):
    """Its hidden layer is left to ``expert_parallel`` in the DeepSpeed config."""

    def make_hidden(self) -> nn.Module:
        return RoutedExperts()


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
AUTOEP = {
    "enabled": True,
    "moe_layer_pattern": "hidden",
    "router_pattern": "gate",
    "expert_pattern": "experts",
    "expert_w1": "gate_up_proj",
    "expert_w2": "down_proj",
    "expert_w3": None,
    "top_k": 2,
    "use_grouped_mm": False,
}
MORE_CONFIG: dict[str, dict[str, Any]] = {
    "plain": ADAMW,
    "sparse": ADAMW,
    "experts": ADAMW,
    "autoep": {**ADAMW, "expert_parallel": AUTOEP},
    "hybrid": {**ADAMW, "hybrid_engine": {"enabled": True}},
    "onebit": {},
}


def build(kind: str, stage: int) -> Any:
    """A live engine of one kind: ``plain``, ``sparse-<ep_size>``, ``experts-<number>``, ``autoep-<ep_size>``,
    ``hybrid`` or ``onebit``.
    """
    name, _, number = kind.partition("-")
    models: dict[str, Callable[[], DenseLM]] = {
        "sparse": lambda: SparseLM(int(number)),
        "experts": lambda: SparseLM(1, experts=int(number)),
        "autoep": RoutedLM,
    }
    model = models.get(name, DenseLM)()
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **MORE_CONFIG.get(name, {}),
    }
    if name == "autoep":
        config["expert_parallel"] = AUTOEP | {"autoep_size": int(number)}
    return deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=OnebitAdam if name == "onebit" else None,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        config=config,
    )[0]


def flats(engine: Any) -> list[torch.Tensor]:
    """What the base optimizer steps: masters with ZeRO, parameters without."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    base = getattr(optimizer, "optimizer", optimizer)
    return [param for group in base.param_groups for param in group["params"]]


def digests(engine: Any) -> dict[str, str]:
    """Hashes, by part, of all that a load should restore on this rank, and that a refused one must leave alone."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in base.param_groups]
    counters = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    held = {
        "weights": engine.module.state_dict(),
        "partitions": [getattr(param, "ds_tensor", param) for param in engine.module.parameters()],
        "masters": flats(engine),
        "states": [
            {key: value for key, value in base.state.get(flat, {}).items() if key not in ERRORS}
            for flat in flats(engine)
        ],
        "groups": groups,
        "scheduler": engine.lr_scheduler.state_dict(),
        "counters": counters,
    }
    return {part: digest(value) for part, value in held.items()}


def digest(value: Any) -> str:
    hasher = hashlib.sha256()
    for piece in pieces(value):
        hasher.update(piece)
    return hasher.hexdigest()


def pieces(value: Any) -> Iterator[bytes]:
    """Bytes of a tree of containers, tensors and plain values."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from pieces(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from pieces(item)
    elif torch.is_tensor(value):
        yield repr((value.dtype, tuple(value.shape))).encode()
        yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield repr(value).encode()


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What elastic_ckpt logs meanwhile, at warning level or above."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("elastic_ckpt")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def save(folder: str, kinds: list[tuple[str, int, str]]) -> dict[str, str]:
    """Train and save each kind of engine, train on, load what was saved: DeepSpeed's loader brings all of it back.

    Args:
        folder: where checkpoints go, each in a folder named after its kind, stage and number of ranks.
        kinds: kind, stage, and what elastic_ckpt's line about it must name; empty: save only.

    Returns:
        What went wrong, by name of the folder.
    """
    problems: dict[str, str] = {}
    for kind, stage, names in kinds:
        here = f"{kind}-z{stage}-dp{dist.get_world_size()}"
        place = os.path.join(folder, here)
        engine = build(kind, stage)
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(place, tag="step3", client_state={"note": "hello"})
        if names:
            held = digests(engine)
            losses = train(engine, SAVE_AT, CONTINUE_TO)
            problem = first_problem(load_again(engine, place, names, held))
            problems[here] = problem or compare_losses(engine, losses)
        engine.destroy()
        dist.barrier()
    return problems


def load_again(engine: Any, folder: str, names: str, held: dict[str, str]) -> str:
    """What is wrong with a load that DeepSpeed's own loader is to do; empty: nothing."""
    with log_lines() as lines:
        try:
            _, client_state = engine.load_checkpoint(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    now = digests(engine)
    different = [part for part in held if held[part] != now[part]]
    told = [line.removeprefix(OWN_LOADER) for line in lines if line.startswith(OWN_LOADER)]
    if different or client_state["note"] != "hello":
        return f"not restored: {different}"
    if engine.elastic_report is not None:
        return "elastic_ckpt loaded it, not DeepSpeed"
    if dist.get_rank() == 0 and not (len(told) == 1 and re.search(names, told[0], re.IGNORECASE)):
        return f"no single line that names {names!r}: {lines}"
    return ""


def compare_losses(engine: Any, losses: list[float]) -> str:
    again = train(engine, SAVE_AT, CONTINUE_TO)
    return "" if again == losses else f"losses {again} after the load, {losses} without it"


def refuse(cases: list[dict[str, Any]]) -> dict[str, str]:
    """Each folder is refused by name, with the same words on all ranks, and the engine stays as it was."""
    problems: dict[str, str] = {}
    engines: dict[str, Any] = {}
    for case in cases:
        key = f"{case['kind']}-z{case['stage']}"
        if key not in engines:
            engines[key] = build(case["kind"], case["stage"])
            train(engines[key], 20, 21)
        problem = first_problem(refusal(engines[key], case))
        problems[case["name"]] = problem
        if problem:  # whatever happened, the next case gets an engine that is whole
            engines.pop(key).destroy()
        dist.barrier()
    for engine in engines.values():
        train(engine, 21, 22)
    return problems


def refusal(engine: Any, case: dict[str, Any]) -> str:
    """What is wrong with a load that is to be refused; empty: nothing."""
    before = digests(engine)
    result = "loaded"
    with log_lines() as lines:
        try:
            engine.load_checkpoint(case["folder"])
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    now = digests(engine)
    changed = [part for part in before if before[part] != now[part]]
    if not result.startswith("UnsupportedError: ") or not re.search(case["names"], result, re.IGNORECASE) or changed:
        return f"no UnsupportedError that names {case['names']!r}, but {result!r}; changed: {changed}; log: {lines}"
    if any(other != result for other in everyone):
        return f"other words on other ranks: {everyone}"
    return "" if engine.elastic_report is None else "a report of a load that did not happen"


def restore(cases: list[dict[str, Any]]) -> dict[str, str]:
    """Each folder, made to look like another version's, is left to DeepSpeed's loader, which restores it exactly."""
    problems: dict[str, str] = {}
    for case in cases:
        reference = build(case["kind"], case["stage"])
        train(reference, 0, SAVE_AT)
        held = digests(reference)
        losses = train(reference, SAVE_AT, CONTINUE_TO)
        problem = first_problem(load_again(reference, case["folder"], case["names"], held))
        problems[case["name"]] = problem or compare_losses(reference, losses)
        reference.destroy()
        dist.barrier()
    return problems


def first_problem(mine: str) -> str:
    """The first rank's that has one. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(everyone) if problem), "")


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elastic_ckpt.install()
    arguments = json.loads(sys.argv[1])
    problems = save(arguments.get("folder", ""), arguments.get("save", []))
    problems |= refuse(arguments.get("refuse", [])) | restore(arguments.get("restore", []))
    if dist.get_rank() == 0:
        with open(arguments["result"], "w", encoding="utf-8") as stream:
            json.dump(problems, stream)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo now and then abort the interpreter's teardown


if __name__ == "__main__":
    main()

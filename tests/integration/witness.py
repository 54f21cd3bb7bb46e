"""What a framework's engine holds, by name, written down for the test to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.distributed.optimizer_truth import decoded
from tests.distributed.truth import base_of, hyperparameters, low_precision, relink, state_keys, steps


def take(engine: Any, file: Path, scheduler: Any) -> None:
    """Write what the whole job holds to ``file``, from rank 0. Collective.

    Args:
        engine: a :class:`deepspeed.DeepSpeedEngine` with an optimizer that has stepped or was restored.
        file: where to.
        scheduler: the lr scheduler that the framework steps.
    """
    relink(engine)
    seen: dict[str, Any] = {"masters": {}, "states": {}, "weights": low_precision(engine)}
    eight_bit = any(value.dtype == torch.uint8 for value in _state_tensors(engine))
    base = base_of(engine)  # a param group that is new has no states yet, which DeepSpeed's getters do not expect
    complete = all(base.state.get(flat) for group in base.param_groups for flat in group["params"])
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            seen["masters"][name] = safe_get_full_fp32_param(param).clone()
            for key in [] if eight_bit or not complete else state_keys(engine):
                seen["states"][name, key] = safe_get_full_optimizer_state(param, key).clone()
    if eight_bit:  # codes mean nothing without their scales: decoded by code of the tests' own
        seen["states"], seen["scales"] = decoded(engine, set())
    seen["buffers"] = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    seen["steps"] = steps(engine)
    seen["groups"] = hyperparameters(engine)
    seen["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    seen["scheduler"] = scheduler.state_dict()
    seen["eight_bit"] = eight_bit
    report = getattr(engine, "elastic_report", None)
    seen["report"] = None if report is None else str(report)
    if dist.get_rank() == 0:
        torch.save(seen, file)


def _state_tensors(engine: Any) -> list[torch.Tensor]:
    return [value for state in base_of(engine).state.values() for value in state.values() if torch.is_tensor(value)]

"""Optimizers that elastic_ckpt does not know, and one with the state layout of NVIDIA apex's FusedAdam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Wanderer(torch.optim.Optimizer):
    """Momentum in ``trail``, a count, and a table that all tensors share; in each param group a count, a dtype, a
    device, and a decay that is a tensor inside a tuple, which the first step changes.

    Args:
        params: param groups.
        diary: in place of the table, keep a list of all rates, which nothing can cut.
    """

    def __init__(self, params: Any, diary: bool = False) -> None:
        self.diary = diary
        super().__init__(params, {"lr": 1e-2, "dtype": torch.float32, "device": torch.device("cpu")})
        for group in self.param_groups:
            group["decay"] = (torch.tensor(0.9),)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            if "step" not in group:  # not so in a run that resumes, which needs the saved value
                group["decay"][0].fill_(0.8)
            group["step"] = group.get("step", 0) + 1  # of its own: no state of any parameter
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["trail"] = torch.zeros_like(param)
                    state["count"] = 0
                    state["diary" if self.diary else "table"] = [] if self.diary else torch.linspace(0.5, 1.5, 100)
                state["count"] += 1
                if self.diary:
                    state["diary"].append(float(group["lr"]))
                state["trail"].mul_(group["decay"][0]).add_(param.grad)
                factor = 1.0 if self.diary else state["table"][state["count"] % 100]
                param.sub_(state["trail"].to(group["dtype"]) * factor, alpha=group["lr"])


class Mapped(torch.optim.Optimizer):
    """Momentum, a count that is a tensor, and a map of 256 equal elements, which tells by nothing that it is one.

    The map belongs to the whole tensor, changes with every step, and scales each update.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"trail": torch.zeros_like(param), "my_map": self.first_map(), "count": torch.zeros(())}
                state["count"] += 1
                state["my_map"].mul_(0.75)
                state["trail"].mul_(0.9).add_(param.grad)
                param.sub_(state["trail"] * state["my_map"][int(state["count"])], alpha=group["lr"])

    def first_map(self) -> torch.Tensor:
        return torch.ones(256)


class MapOf211(Mapped):
    """A map as long as a bias of ``WideLM``."""

    numel = 211

    def first_map(self) -> torch.Tensor:
        return torch.rand(self.numel, generator=torch.Generator().manual_seed(7))


class MapOf318(MapOf211):
    """A map as long as a partition of the second param group of ``WideLM``, in ZeRO-1 over two ranks."""

    numel = 318


class MapOf319(MapOf211):
    """A map as long as a partition of the second param group of ``WideLM``, in ZeRO-3 over two ranks."""

    numel = 319


class FusedAdam(torch.optim.Optimizer):
    """Adam as apex keeps it: moments in the state, the step count in the param group."""

    def __init__(self, params: Any) -> None:
        defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        self.adam_w_mode = 1
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                first = state["exp_avg"] / (1 - beta1 ** group["step"])
                second = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(first / (second.sqrt() + group["eps"]), alpha=group["lr"])


FusedAdam.__module__ = "apex.optimizers.fused_adam"


class Measuring(torch.optim.Optimizer):
    """Momentum, and beside it values of every type that each rank computes of its own partition."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", torch.tensor(0, dtype=torch.int32)) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"trail": torch.full_like(param, 0.5), "idle": None, "warm": True, "norm": torch.zeros(())}
                state["trail"].mul_(0.9).add_(param.grad)
                state["norm"] = 0.5 * state.get("norm", 0.0) + state["trail"].norm()
                group["d"] = max(group["d"], float(state["norm"]) * 1e-3)
                group["ends"] = torch.stack([param.min(), param.max()]).double()
                update = state["trail"] * param.grad.ne(0)  # DeepSpeed does not save the padding of masters
                param.sub_(update, alpha=group["lr"] * (1 + group["d"]) / (1 + float(state["norm"])))

"""Scripts for real: their models, optimizers, schedules and engines."""

from __future__ import annotations

import gc
import importlib
import re
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler as schedulers

from tests.changes.draw import Script
from tests.distributed.model import PRECISIONS, STEP, Compiled
from tests.distributed.parallel_models import forget_groups

WIDTH = 8
#: Of a layer's linear module and norm.
NAMES = {"plain": ("linear", "norm"), "other": ("dense", "scale")}
#: Samples of one step, which all numbers of ranks and micro-batches divide.
BATCH = 24
_SMALLEST_VOCABULARY = 37
_ADAPTERS: dict[str, dict[str, int]] = {
    "none": {},
    "default": {"default": 3},
    "other": {"other": 3},
    "both": {"default": 3, "other": 3},
    "wide": {"default": 5},
}
#: What wrappers put into names, and before them.
_INFIXES = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")
_PREFIXES = re.compile(r"^(base_model\.model|module)\.")


class Layer(nn.Module):
    """A layer, with the script's adapters beside it."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._linear, self._norm = NAMES[script.names]
        self.add_module(self._linear, nn.Linear(WIDTH, WIDTH))
        self.add_module(self._norm, nn.LayerNorm(WIDTH))
        ranks = _ADAPTERS[script.adapter]
        self.lora_a = nn.ModuleDict({name: nn.Linear(WIDTH, rank, bias=False) for name, rank in ranks.items()})
        self.lora_b = nn.ModuleDict({name: nn.Linear(rank, WIDTH, bias=False) for name, rank in ranks.items()})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.get_submodule(self._linear)(hidden)
        for name, reduce in self.lora_a.items():
            out = out + self.lora_b[name](reduce(hidden))
        return hidden + torch.tanh(self.get_submodule(self._norm)(out))


class Noted(nn.Module):
    """A module with state of its own kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.note = torch.arange(3.0) + seed

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Net(nn.Module):
    """A language model of two layers."""

    def __init__(self, script: Script, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(script.rows, WIDTH)
        self.layers = nn.ModuleList([Layer(script), Layer(script)])
        self.head = nn.Linear(WIDTH, script.rows, bias=False)
        if script.tied:
            self.head.weight = self.embedding.weight
        self.extra = nn.Linear(WIDTH, WIDTH) if script.more == "module" else None
        if script.more == "buffer":
            self.register_buffer("seen", torch.full((2,), float(seed)))
        if script.more == "extra state":
            self.noted = Noted(seed)
        if script.quantized != "none":
            self.base = _quantized(script.quantized)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        if self.extra is not None:
            hidden = hidden + self.extra(hidden)
        if hasattr(self, "base"):
            wide = nn.functional.pad(hidden, (0, 64 - WIDTH)).float()
            hidden = hidden + self.base(wide)[..., :WIDTH].to(hidden.dtype)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _mean_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def _pipeline(script: Script, seed: int) -> PipelineModule:
    """The same layers, a stage of them on this rank."""
    torch.manual_seed(seed)
    layers = [
        LayerSpec(nn.Embedding, script.rows, WIDTH),
        LayerSpec(Layer, script),
        LayerSpec(Layer, script),
        LayerSpec(nn.Linear, WIDTH, script.rows, bias=False),
    ]
    return PipelineModule(layers, num_stages=script.stages, loss_fn=_mean_loss, partition_method="uniform")


class Held(nn.Module):
    """A model in an attribute of another module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        (module,) = self.children()
        return module(tokens)


def _quantized(kind: str) -> nn.Module:
    """Frozen weights that are the same in each run: whoever leaves them out of a save loads them from elsewhere."""
    layers = importlib.import_module("bitsandbytes").nn
    torch.manual_seed(0)
    if kind == "eight":
        layer = layers.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    else:
        layer = layers.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=kind == "double")
    layer.to("cpu")  # quantizes it
    layer.weight.requires_grad_(False)
    return layer  # type: ignore[no-any-return]


def wrapped(script: Script, net: Net) -> nn.Module:
    """The model in the script's wrappers."""
    if script.wrapper == "checkpointed":
        net.layers[0] = checkpoint_wrapper(net.layers[0])
    if script.wrapper == "compiled":
        net.layers[1] = Compiled(net.layers[1])
    if script.wrapper == "module":
        return Held("module", net)
    if script.wrapper == "peft":
        return Held("base_model", Held("model", net))
    return net


def canonical(name: str) -> str:
    """A name without what wrappers add to it."""
    return _PREFIXES.sub("", _INFIXES.sub("", name))


def _freeze(script: Script, net: nn.Module) -> None:
    for name, param in net.named_parameters():
        is_base = "lora_" not in name and not name.startswith("extra")
        is_frozen = {
            "none": False,
            "embedding": name.startswith("embedding"),
            "norms": f".{NAMES[script.names][1]}." in name,
            "base": is_base,
        }[script.frozen]
        if is_frozen:
            param.requires_grad_(False)


def param_groups(script: Script, named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Of the parameters that train, by canonical name."""
    matrices = [name for name, param in named.items() if param.dim() > 1]
    others = [name for name in named if name not in matrices]
    decay = {"lr": 1e-2, "weight_decay": 0.01}
    plain = {"lr": 2e-3, "weight_decay": 0.0}
    members: dict[str, list[tuple[list[str], dict[str, float]]]] = {
        "one": [(list(named), decay)],
        "decay": [(matrices, decay), (others, plain)],
        "reversed": [(others, plain), (matrices, decay)],
        "split": [(matrices[:2], decay), (others, plain), (matrices[2:], decay)],
        "empty": [(matrices, decay), (others, plain), ([], plain)],
    }
    return [
        {"params": [named[name] for name in names], "names": names, **values}
        for names, values in members[script.groups]
        if names or script.groups == "empty"
    ]


def _optimizer(script: Script, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    groups = [{key: value for key, value in group.items() if key != "names"} for group in groups]
    if script.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=0.9)
    return torch.optim.AdamW(groups) if script.optimizer == "adamw" else None


def _halving(step: int) -> float:
    return 0.5 ** (step // 3)


def _scheduler(script: Script, optimizer: Any) -> Any:
    if script.scheduler == "lambda":
        return schedulers.LambdaLR(optimizer, _halving)
    if script.scheduler == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, 9)
    if script.scheduler == "sequential":
        first = schedulers.ConstantLR(optimizer)
        second = schedulers.ExponentialLR(optimizer, 0.9)
        return schedulers.SequentialLR(optimizer, [first, second], [3])
    if script.scheduler in ("step", "held"):
        return schedulers.StepLR(optimizer, step_size=3, gamma=0.5)
    return None


@dataclass
class Live:
    """A script that runs.

    Attributes:
        names: of each param group, canonical.
        held: the scheduler that the script steps and restores itself.
    """

    script: Script
    engine: Any
    names: list[list[str]]
    held: Any = None

    def train(self, first: int, last: int) -> None:
        """Train steps ``first`` to ``last``, excluding ``last``. Collective."""
        ranks = dist.get_world_size()
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 + step)
            tokens = torch.randint(0, _SMALLEST_VOCABULARY, (BATCH, 6), generator=generator)
            if self.script.stages:
                degree = ranks // self.script.stages
                parts = tokens[self.engine.grid.get_data_parallel_rank() :: degree].chunk(self.script.accumulation)
                self.engine.train_batch(iter([(part[:, :-1], part[:, 1:]) for part in parts]))
                continue
            for part in tokens[dist.get_rank() :: ranks].chunk(self.script.accumulation):
                self.engine.backward(self.engine(part))
                with STEP():
                    self.engine.step()
            if self.held is not None:
                self.held.step()

    def close(self) -> None:
        """Free it."""
        self.engine.destroy()
        gc.collect()


def live(script: Script, seed: int, section: dict[str, Any] | None = None) -> Live:
    """The script's engine; ``section``: ``"elastic_checkpoint"``. Collective."""
    forget_groups()  # of a pipeline before
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16, torch.bfloat16]
    net = _pipeline(script, seed) if script.stages else Net(script, seed)
    _freeze(script, net)
    named = {name: param for name, param in net.named_parameters() if param.requires_grad}
    groups = param_groups(script, named)
    optimizer = _optimizer(script, groups)
    scheduler = None if optimizer is None else _scheduler(script, optimizer)
    is_held = script.scheduler == "held"
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": script.accumulation,
        "zero_optimization": {"stage": script.stage},
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[script.precision],
        **({} if section is None else {"elastic_checkpoint": section}),
    }
    engine = deepspeed.initialize(
        model=wrapped(script, net) if isinstance(net, Net) else net,
        optimizer=optimizer,
        lr_scheduler=None if is_held else scheduler,
        config=config,
    )[0]
    return Live(script, engine, [group["names"] for group in groups], scheduler if is_held else None)

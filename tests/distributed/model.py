"""A tiny model that has what goes wrong in practice, its data, and its engines."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.distributed.custom_optimizers import Wanderer

GLOBAL_BATCH = 12
VOCABULARY = 37


class TinyLM(nn.Module):
    """Odd sizes, a tied head, parameters without a gradient, buffers of two dtypes that change.

    Args:
        seed: of the initial weights; an engine that resumes is built with another one.
    """

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 13)
        self.hidden = nn.Linear(13, 29)
        self.norm = nn.LayerNorm(29)
        self.back = nn.Linear(29, 13, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(13, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.never_used = nn.Parameter(torch.randn(5, 7))
        self.register_buffer("ticks", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("trace", torch.zeros(3, 5))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ticks += 1
        self.trace += 0.125
        hidden = torch.tanh(self.norm(self.hidden(self.embedding(tokens[:, :-1]))))
        logits = self.head(self.back(hidden) * self.gain)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class WiderLM(TinyLM):
    """A hidden layer of another size."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.hidden = nn.Linear(13, 31)
        self.norm = nn.LayerNorm(31)
        self.back = nn.Linear(31, 13, bias=False)


class RicherLM(TinyLM):
    """One parameter and one buffer more."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.newcomer = nn.Parameter(torch.ones(11))
        self.register_buffer("new_buffer", torch.ones(2))


class BufferedLM(TinyLM):
    """The same model with a buffer that no checkpoint has."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed=seed)
        self.register_buffer("new_buffer", torch.ones(2))


class HookedLM(TinyLM):
    """The same model, whose state dict has one weight under another name."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.back.register_state_dict_post_hook(partial(_rename_entry, "weight", "kernel"))
        self.back.register_load_state_dict_pre_hook(partial(_rename_entry, "kernel", "weight"))


def _rename_entry(old: str, new: str, _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}{old}" in state:
        state[f"{prefix}{new}"] = state.pop(f"{prefix}{old}")


class PoorerLM(TinyLM):
    """One parameter fewer."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        del self.never_used


class UntiedLM(TinyLM):
    """The head has weights of its own."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())


class BigLM(TinyLM):
    """Big enough that tensor bytes outweigh metadata."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.bulk = nn.Parameter(torch.randn(1031, 1033))


class WideLM(TinyLM):
    """Big enough for 8-bit states: 17,000 elements in one param group, and a second group that stays in fp32."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.hidden = nn.Linear(13, 211)
        self.norm = nn.LayerNorm(211)
        self.back = nn.Linear(211, 13, bias=False)
        self.bulk = nn.Parameter(torch.randn(67, 167))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + (self.bulk * self.bulk.detach().roll(1)).mean()


class HugeLM(TinyLM):
    """Two parameters big enough for DeepSpeed to swap their states to NVMe, at up to three ranks.

    All its parameters get gradients: DeepSpeed 0.19.8 puts swapped gradients in the wrong place behind one that has none.
    """

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        del self.never_used
        self.bulk = nn.Parameter(torch.randn(1031, 1033))
        self.other_bulk = nn.Parameter(torch.randn(1201, 801))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.bulk.square().mean() + self.other_bulk.square().mean()


class HeadFirstLM(TinyLM):
    """The tied pair is registered in the other order, so the head's name is the one that counts."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        tied = self.embedding
        del self.embedding
        self.embedding = tied


class HalfFrozenLM(TinyLM):
    """The embedding does not train."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.embedding.weight.requires_grad_(False)


class LoraLM(TinyLM):
    """A frozen base, buffers, and two small matrices that train."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        for param in self.parameters():
            param.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(29, 3) / 5)
        self.lora_b = nn.Parameter(torch.randn(3, 13) / 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ticks += 1
        self.trace += 0.125
        hidden = torch.tanh(self.norm(self.hidden(self.embedding(tokens[:, :-1]))))
        logits = self.head((self.back(hidden) + hidden @ self.lora_a @ self.lora_b) * self.gain)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class QuantizedLoraLM(LoraLM):
    """Frozen weights of 4 and of 8 bits beside it, of one value in every run."""

    double = True

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        quantized = importlib.import_module("bitsandbytes").nn
        torch.manual_seed(self.seed_of_base(seed))
        self.four = quantized.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=self.double)
        self.eight = quantized.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        for layer in (self.four, self.eight):
            layer.to("cpu")  # quantizes it
            layer.weight.requires_grad_(False)

    @staticmethod
    def seed_of_base(seed: int) -> int:
        """The seed of the quantized weights in a run of ``seed``."""
        return 0


class _Packed(nn.Module):
    """Stands in for HQQ's ``HQQLinear``: codes are a frozen parameter, and what they mean is in entries of its own."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(64, 64)
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.W_q = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ (self.W_q * self.scale.to(values.dtype)).t()

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        found[f"{prefix}scale"] = self.scale
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, strict: bool, *lists: Any) -> None:
        self.scale = state.pop(f"{prefix}scale")
        super()._load_from_state_dict(state, prefix, metadata, strict, *lists)


class PackedLM(LoraLM):
    """A frozen base with such a module, of other values in each run."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.packed = _Packed()


class DoublyQuantizedLM(QuantizedLoraLM):
    """A base that is computed with, whose scales are quantized, too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.hidden(self.embedding(tokens[:, :-1]))))
        wide = nn.functional.pad(hidden, (0, 64 - hidden.shape[-1])).float()
        base = (self.four(wide) + self.eight(wide))[..., : hidden.shape[-1]].to(hidden.dtype)
        logits = self.head((self.back(base) + hidden @ self.lora_a @ self.lora_b) * self.gain)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class QuantizedLM(DoublyQuantizedLM):
    """A base that is computed with, of other values in each run."""

    double = False

    @staticmethod
    def seed_of_base(seed: int) -> int:
        return seed


class RandomDoublyQuantizedLM(QuantizedLM):
    """The same, whose scales are quantized, too."""

    double = True


class HollowLM(TinyLM):
    """Parameters and buffers without elements: before, between and behind others, tied, frozen, with a gradient.

    They are of modules that are never called: DeepSpeed 0.19.8 cannot fetch what is empty in ZeRO-3.
    """

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        modules, self._modules = self._modules, {}
        self.first = nn.Module()
        self.first.nothing = nn.Parameter(torch.empty(0))
        for name, module in modules.items():
            self._modules[name] = module
            if name in ("hidden", "back"):
                holder = self._modules[f"after_{name}"] = nn.Module()
                holder.none = nn.Parameter(torch.empty(3, 0))
                holder.void = nn.Parameter(torch.empty(0, 2), requires_grad=False)
                holder.register_buffer("no_ticks", torch.empty(0, 3, dtype=torch.int64))
        self.last = nn.Module()
        self.last.hollow = self.first.hollow = nn.Parameter(torch.empty(0, 2))
        self.last.used = nn.Parameter(torch.empty(0, 3))
        self._used = [self.last.used]  # looked up as an attribute, ZeRO-3 would fetch it

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        return loss + sum(param.sum() for param in self._used if not hasattr(param, "ds_id"))


class RenamedLM(TinyLM):
    """Two modules, and with them their parameters, and a buffer under other names."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        modules = self._modules
        self._modules = {{"hidden": "inner", "norm": "scale"}.get(name, name): modules[name] for name in modules}
        del self.trace
        self.register_buffer("track", torch.zeros(3, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ticks += 1
        self.track += 0.125
        hidden = torch.tanh(self.scale(self.inner(self.embedding(tokens[:, :-1]))))
        logits = self.head(self.back(hidden) * self.gain)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class CheckpointedLM(TinyLM):
    """Two modules, one of them with weights that are tied, are wrapped for activation checkpointing."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.hidden = checkpoint_wrapper(self.hidden)
        self.head = checkpoint_wrapper(self.head)


class Compiled(nn.Module):
    """A module as ``torch.compile`` wraps it, which leaves it as it is where ranks run without a compiler."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(*inputs)


class CompiledLM(TinyLM):
    """Two modules are compiled."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.hidden = Compiled(self.hidden)
        self.norm = Compiled(self.norm)


class HeldLM(nn.Module):
    """A module of the user's own around one that is wrapped inside."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        self.module = CheckpointedLM(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)


BUILDERS = {
    kind.__name__: kind
    for kind in (
        TinyLM,
        WiderLM,
        RicherLM,
        BufferedLM,
        HookedLM,
        PoorerLM,
        UntiedLM,
        HalfFrozenLM,
        BigLM,
        WideLM,
        HugeLM,
        HeadFirstLM,
        LoraLM,
        QuantizedLoraLM,
        DoublyQuantizedLM,
        QuantizedLM,
        PackedLM,
        RandomDoublyQuantizedLM,
        HollowLM,
        RenamedLM,
        CheckpointedLM,
        CompiledLM,
        HeldLM,
    )
}


def batch(step: int, dp: int, rank: int) -> torch.Tensor:
    """This rank's rows of the global batch of one step; the same global batch at every degree."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 8), generator=generator)
    return tokens[rank::dp].to(get_accelerator().current_device_name())


#: What goes into the DeepSpeed config. ``bf16_fp32acc`` at stage 1 is ``BF16_Optimizer``.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_fp32acc": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16_masters": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    },
    # states in fp32, which DeepSpeed allows on the CPU alone, with its own Adam
    "bf16_masters_fp32_states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16_masters": {
        "fp16": {"enabled": True, "loss_scale": 128, "fp16_master_weights_and_grads": True},
    },
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2, "hysteresis": 1}},
    "fp16_static": {"fp16": {"enabled": True, "loss_scale": 128}},
}


@dataclass(frozen=True)
class Setup:
    """One kind of engine.

    Attributes:
        stage: ZeRO stage.
        precision: a key of :data:`PRECISIONS`.
        optimizer: a name that :func:`build_optimizer` knows.
        zero: more entries of ``zero_optimization``.
        groups: which param groups; see :func:`param_groups`.
        config: more top-level entries of the DeepSpeed config.
    """

    stage: int
    precision: str = "fp32"
    optimizer: str = "adamw"
    zero: tuple[tuple[str, Any], ...] = ()
    groups: str = "several"
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        extra = "".join(f"-{key}" for key, _ in self.zero)
        groups = "" if self.groups == "several" else f"-{self.groups}group"
        return f"z{self.stage}-{self.precision}-{self.optimizer}{extra}{groups}"


def param_groups(model: TinyLM, kind: str) -> list[dict[str, Any]]:
    """Param groups of a model's trainable parameters.

    Args:
        model: a model of this module.
        kind: ``one``; ``several``: with and without weight decay, each with its own rate; ``idle``: a third one that
            never gets a gradient; ``reversed``: ``several`` in the other order; ``split``: the first of ``several``
            cut in two; ``mixed``: ``several``, with one parameter in the other group.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if kind == "one":
        return [{"params": list(named.values()), "lr": 1e-2, "weight_decay": 0.01}]
    plain = [name for name in named if name.endswith((".bias", "norm.weight", "scale.weight", "gain"))]
    plain += ["back.weight"] if kind == "mixed" else []
    idle = ["never_used"] if kind == "idle" else []
    decayed = [name for name in named if name not in plain + idle]
    first = {"lr": 1e-2, "weight_decay": 0.1, "name": "decay"}
    second = {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "name": "plain"}
    members = [(decayed, first), (plain, second)]
    if kind == "split":
        members = [(decayed[:1], first), (decayed[1:], {**first, "name": "more decay"}), (plain, second)]
    if kind == "reversed":
        members.reverse()
    if kind == "idle":
        members.append((idle, {"lr": 2e-3, "weight_decay": 0.3, "name": "idle"}))
    return [{"params": [named[name] for name in names], **values} for names, values in members if names]


def build_optimizer(model: TinyLM, setup: Setup) -> torch.optim.Optimizer:
    """A torch optimizer by name, ``cpuadam`` and the like, or ``bnb.<class>``."""
    groups = param_groups(model, setup.groups)
    kind, _, bits = setup.optimizer.partition("@")
    if kind.startswith("bnb."):
        import bitsandbytes

        options = {"momentum": 0.9} if kind.startswith(("bnb.SGD", "bnb.LARS")) else {}
        optimizer = getattr(bitsandbytes.optim, kind.removeprefix("bnb."))(groups, lr=1e-3, **options)
        if bits:
            optimizer.args.min_8bit_size = int(bits)
        return optimizer
    if setup.optimizer in _ELSEWHERE:
        module, name = _ELSEWHERE[setup.optimizer]
        return getattr(importlib.import_module(module), name)(groups)
    if setup.optimizer in INSTALLED:
        module, name, options = INSTALLED[setup.optimizer]
        optimizer = getattr(importlib.import_module(module), name)(groups, **options)
        for group in optimizer.param_groups:
            if "train_mode" in group:  # those without a schedule evaluate other weights than they train
                group["train_mode"] = True
        return optimizer
    return _TORCH[setup.optimizer](groups)


#: Optimizers of packages that elastic_ckpt does not know: module, class, arguments.
INSTALLED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "measuring": ("tests.distributed.custom_optimizers", "Measuring", {}),
    "hf.Adafactor": ("transformers.optimization", "Adafactor", {"scale_parameter": False, "relative_step": False}),
    "came": ("came_pytorch", "CAME", {"lr": 1e-3}),
    "prodigy": ("prodigyopt", "Prodigy", {}),
    "dadapt": ("dadaptation", "DAdaptAdam", {}),
    "lion": ("lion_pytorch", "Lion", {}),
    "schedule_free": ("schedulefree", "AdamWScheduleFree", {}),
    "optimi.StableAdamW": ("optimi", "StableAdamW", {"lr": 1e-3}),
    **{
        f"po.{name}": ("pytorch_optimizer", name, {})
        for name in ("Lamb", "NovoGrad", "Prodigy", "RACS", "MADGRAD", "ADOPT", "StableAdamW")
    },
}
_ELSEWHERE = {
    "cpuadam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    "fusedadam": ("deepspeed.ops.adam", "FusedAdam"),
    "cpulion": ("deepspeed.ops.lion", "DeepSpeedCPULion"),
    "cpuadagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
    "unknown": ("tests.distributed.custom_optimizers", "Wanderer"),
    "mapped": ("tests.distributed.custom_optimizers", "Mapped"),
    **{f"map_of_{n}": ("tests.distributed.custom_optimizers", f"MapOf{n}") for n in (211, 318, 319)},
    "apex": ("tests.distributed.custom_optimizers", "FusedAdam"),
    "torchao": ("tests.distributed.standin_optimizers", "QuantizedAdamW"),
    "clipped": ("tests.distributed.standin_optimizers", "ClippedAdamW8bit"),
    "briefly_clipped": ("tests.distributed.standin_optimizers", "BrieflyClippedAdamW8bit"),
}
_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "adam": torch.optim.Adam,
    "adam_amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "sgd_plain": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "rmsprop_centered": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    # takes matrices alone; what is left belongs to no optimizer
    "torch_muon": lambda groups: torch.optim.Muon([p for group in groups for p in group["params"] if p.dim() == 2]),
    "diary": lambda groups: Wanderer(groups, diary=True),
    "adafactor": getattr(torch.optim, "Adafactor", None),  # since torch 2.5
}


_partition_param = Init._partition_param
#: What is left in the padding of ZeRO-3's parameters, which DeepSpeed does not initialise. With weight decay it spoils
#: the 8-bit block of a parameter's last elements, so plain runs are spared from it, and aligned ones must not mind.
_padding = {"value": 0.0}


def _partition_param_and_fill(init: Init, param: Any, *args: Any, **kwargs: Any) -> None:
    is_new = param.ds_tensor is None
    _partition_param(init, param, *args, **kwargs)
    held = param.ds_tensor
    if is_new and held.numel():
        start = dist.get_rank(param.ds_process_group) * held.numel()
        held[max(0, min(param.ds_numel - start, held.numel())) :] = _padding["value"]


Init._partition_param = _partition_param_and_fill


def build_engine(setup: Setup, model: nn.Module | None = None) -> Any:
    """A live DeepSpeed engine on the default process group."""
    model = TinyLM() if model is None else model
    is_aligned = "align_partitions" in dict(setup.config).get("elastic_checkpoint", {})
    _padding["value"] = 3e38 if is_aligned else 0.0
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.float16, torch.bfloat16]
    muon: dict[str, Any] = {}
    if setup.optimizer.startswith("muon"):
        torch_adam = {"torch_adam": True} if setup.optimizer == "muon_torch_adam" else {}
        muon["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9, **torch_adam}}
    optimizer = None if muon else build_optimizer(model, setup)
    scheduler = None if muon else torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    config = {
        **muon,
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": setup.stage, **dict(setup.zero)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[setup.precision],
        **dict(setup.config),
    }
    params = list(model.parameters()) if muon else None  # DeepSpeed makes the optimizer itself
    return deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=params, lr_scheduler=scheduler, config=config
    )[0]


# gloo's all-gather fails without it in ZeRO-1 and 2 of DeepSpeed 0.18
STEP = torch.no_grad if deepspeed.__version__.startswith("0.18.") else nullcontext


def train(engine: Any, first: int, last: int) -> list[float]:
    """Train steps ``first`` to ``last``, excluding ``last``; mean losses over all ranks."""
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_world_size(), dist.get_rank()))
        engine.backward(loss)
        with STEP():
            engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def close(engine: Any) -> None:
    """Free an engine so that the next one of this process starts clean."""
    engine.destroy()
    gc.collect()

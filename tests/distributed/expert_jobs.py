"""Runs with mixtures of experts: ``expert_jobs.<function>`` of :mod:`tests.distributed.jobs`."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import nn

import elastic_ckpt
from elastic_ckpt.errors import DamagedError
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, Refused, attempt, loss_gap, on_all_ranks
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, SPOILS, truth_of
from tests.distributed.kept import close_kept, engine_of
from tests.distributed.model import GLOBAL_BATCH, PRECISIONS, STEP, VOCABULARY, batch, close
from tests.distributed.parallel_models import forget_groups

WIDTH = 12
_STACKED = re.compile(r".*\.experts\.w\d")
_EXPERT = re.compile(r"mixtures\.(\d+)(\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Experts:
    """A run with experts.

    Attributes:
        world, stage, precision: ranks, ZeRO stage, precision.
        ep: expert-parallel degree.
        experts: number of experts in each ``MoE`` layer.
        residual: whether layers have a dense branch too.
        data_first: ``use_data_before_expert_parallelism``.
        group_size: most elements in a param group of experts.
        autoep: whether AutoEP makes the layers of experts, stacked, of a model without any.
        preset: AutoEP's preset of a Hugging Face model, ``"mixtral"``, ``"qwen3_moe"`` or ``"deepseek_v3"``, which has
            a shared expert, and buffers in its routers.
        round_robin: ``round_robin_gradients``, of which DeepSpeed's getters return wrong values.
        factored: whether AutoEP's engine has Adafactor, whose states are of whole parameters.
    """

    world: int
    stage: int
    ep: int
    precision: str = "bf16"
    experts: tuple[int, ...] = (4, 8)
    residual: bool = False
    data_first: bool = False
    group_size: int = 178956971
    autoep: bool = False
    preset: str = ""
    round_robin: bool = False
    factored: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        extra = "-autoep" * self.autoep + self.preset + "-residual" * self.residual + "-data" * self.data_first
        extra += f"-g{self.group_size}" * (self.group_size < 1e6) + "-robin" * self.round_robin
        extra += "-factored" * self.factored
        numbers = "x".join(map(str, self.experts))
        return f"{self.precision}-z{self.stage}-n{self.world}-ep{self.ep}-e{numbers}{extra}"

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return 1

    def model(self, seed: int) -> tuple[nn.Module, Any]:
        """A model, and the ``mpu`` that divides the ranks for it. Collective."""
        return ExpertLM(self, seed), None

    def ep_of(self, layer: int) -> int:
        """Expert-parallel degree of a layer."""
        return self.ep

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-2)

    def placed(self, ep_rank: int) -> range | tuple[int, ...]:
        """Numbers of the experts that AutoEP stacks on an expert-parallel rank, in each layer of as many."""
        local = self.experts[0] // self.ep
        return range(ep_rank * local, (ep_rank + 1) * local)


class ExpertLM(nn.Module):
    """Two ``MoE`` layers with different numbers of experts between dense layers; nothing in them is random."""

    def __init__(self, run: Experts, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixtures = nn.ModuleList(self._mixture(run, number) for number in run.experts)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("ticks", torch.zeros(1, dtype=torch.int64))
        self._set_experts(run, seed)

    def _mixture(self, run: Experts, number: int) -> MoE:
        expert = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH))
        options = {"use_rts": False, "capacity_factor": float(number), "min_capacity": 0, "use_residual": run.residual}
        return MoE(WIDTH, expert, num_experts=number, ep_size=run.ep_of(run.experts.index(number)), k=1, **options)

    def _set_experts(self, run: Experts, seed: int) -> None:
        """Give each expert values of its own number among all, at every expert-parallel degree."""
        for layer, mixture in enumerate(self.mixtures):
            local = mixture.num_local_experts
            ep, rank = run.ep_of(layer), dist.get_rank()
            first = (rank // (run.world // ep) if run.data_first else rank % ep) * local
            for number, expert in enumerate(mixture.deepspeed_moe.experts.deepspeed_experts):
                generator = torch.Generator().manual_seed(1000 * seed + 100 * layer + first + number)
                for param in expert.parameters():
                    param.data.copy_(torch.randn(param.shape, generator=generator) / 4)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Dense layers before those with experts."""
        return hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ticks += 1
        hidden = self.between(self.embedding(tokens[:, :-1]))
        extra = 0.0
        for mixture in self.mixtures:
            mixed, loss, _ = mixture(hidden)
            hidden, extra = hidden + mixed, extra + 0.01 * loss
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) + extra


class FusedExperts(nn.Module):
    """All experts' weights in two tensors, as Hugging Face models have them."""

    def __init__(self, number: int, generator: torch.Generator) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(number, 20, WIDTH, generator=generator) / 4)
        self.down_proj = nn.Parameter(torch.randn(number, WIDTH, 10, generator=generator) / 4)


class RoutedExperts(nn.Module):
    """What AutoEP looks for in a model, and puts its own layer of experts in place of."""

    def __init__(self, number: int, generator: torch.Generator) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, number, bias=False)
        self.experts = FusedExperts(number, generator)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("AutoEP replaces this module")


class RoutedLM(ExpertLM):
    """Its mixtures are left to ``expert_parallel`` in the DeepSpeed config."""

    def _mixture(self, run: Experts, number: int) -> nn.Module:
        return RoutedExperts(number, torch.Generator().manual_seed(torch.initial_seed() + number))

    def _set_experts(self, run: Experts, seed: int) -> None:
        pass

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ticks += 1
        hidden = self.embedding(tokens[:, :-1])
        for mixture in self.mixtures:
            mixed = mixture(hidden)
            hidden = hidden + (mixed[0] if isinstance(mixed, tuple) else mixed)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def hugging_face(run: Experts, seed: int) -> nn.Module:
    """A tiny model of Hugging Face whose forward pass returns the loss; in Mixtral, embedding and head are tied."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 10,
        "num_hidden_layers": len(run.experts),
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_experts_per_tok": 2,
    }
    if run.preset == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=run.experts[0], tie_word_embeddings=True, **sizes)
    elif run.preset == "deepseek_v3":
        more = {"n_routed_experts": run.experts[0], "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        more |= {"q_lora_rank": 8, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
        more |= {"moe_intermediate_size": 10, "first_k_dense_replace": 0, "head_dim": 2}
        config = transformers.DeepseekV3Config(**sizes | more)
    else:
        config = transformers.Qwen3MoeConfig(num_experts=run.experts[0], moe_intermediate_size=10, **sizes)
    presets = importlib.import_module("deepspeed.module_inject.auto_ep_presets.base")  # since 0.19
    # DeepSpeed 0.19.8 calls a method of the registry behind output_router_logits that transformers 5.23 has changed
    presets._install_instance_transformers_output_recorders = lambda *args: False
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand_like(buffer))
    whole = model.forward

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        logits = whole(tokens[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    model.forward = forward
    return model


AUTOEP = {
    "enabled": True,
    "moe_layer_pattern": r"mixtures\.\d+",
    "router_pattern": "gate",
    "expert_pattern": "experts",
    "expert_w1": "gate_up_proj",
    "expert_w2": "down_proj",
    "expert_w3": None,
    "top_k": 2,
    "use_grouped_mm": False,
}


#: Tensor-parallel attention.
AUTOTP = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.weight$"], "partition_type": "skip"},
        ],
    }
}


def build(run: Experts, seed: int = 7, config: dict[str, Any] | None = None) -> Any:
    """A live engine; experts form param groups of their own."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    if run.autoep:
        return build_autoep(run, seed)
    model, mpu = run.model(seed)
    dense = {
        "params": [p for n, p in model.named_parameters() if "head" not in n and p.requires_grad],
        "name": "dense",
        "weight_decay": 0.1,
    }
    head = {"params": list(model.head.parameters()), "name": "head", "weight_decay": 0.0}
    divided = split_params_into_different_moe_groups_for_optimizer([dense, head], max_group_size=run.group_size)
    optimizer = run.optimizer([group for group in divided if group["params"]])
    return deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        mpu=mpu,
        config={
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // (run.world // run.tp),
            "zero_optimization": {"stage": run.stage, "round_robin_gradients": run.round_robin},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "use_data_before_expert_parallelism": run.data_first,
            **PRECISIONS[run.precision],
            **(config or {}),
        },
    )[0]


def _adafactor(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Of the parameters that AutoEP has made, in groups as DeepSpeed makes them."""
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(params), "name": "dense"})
    return torch.optim.Adafactor([group for group in groups if group["params"]], lr=1e-2)


def build_autoep(run: Experts, seed: int) -> Any:
    """A live engine whose experts AutoEP stacks; DeepSpeed makes the optimizer, since it replaces parameters."""
    model = hugging_face(run, seed) if run.preset else RoutedLM(run, seed)
    layers = {"enabled": True, "preset_model": run.preset, "use_grouped_mm": False} if run.preset else AUTOEP
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    return deepspeed.initialize(
        model=model,
        optimizer=_adafactor if run.factored else None,
        model_parameters=list(model.parameters()),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        config={
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // (run.world // run.tp),
            "zero_optimization": {"stage": run.stage},
            **({} if run.factored else adamw),
            "zero_force_ds_cpu_optimizer": False,
            "expert_parallel": layers | {"autoep_size": run.ep},
            **({"tensor_parallel": AUTOTP | {"autotp_size": run.tp}} if run.tp > 1 else {}),
            **PRECISIONS[run.precision],
        },
    )[0]


def end(engine: Any) -> None:
    """Free an engine, and DeepSpeed's groups of experts, which outlive it."""
    close(engine)
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        for suffix in ("", "_RANKS"):
            getattr(groups, name + suffix, {}).clear()  # no ranks before 0.18
    forget_groups()


def train(engine: Any, first: int, last: int) -> list[float]:
    """Steps on the same global batches at every degree; the mean losses over all ranks."""
    losses, tp = [], engine.mp_world_size
    for step in range(first, last):
        loss = engine(batch(step, dist.get_world_size() // tp, dist.get_rank() // tp))
        engine.backward(loss)
        with STEP():
            engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def gather(engine: Any, run: Experts, keys: list[str]) -> dict[str, Any]:
    """What the job holds, experts by their number among all. Collective."""
    mine = oracle.gather(engine, keys)
    ep_rank = groups._get_expert_parallel_rank(f"ep_size_{run.ep}")

    in_job = partial(name_in_job, run)
    saved = engine.module.state_dict()
    mine["buffers"] = {name: value for name, value in mine["buffers"].items() if name in saved}  # not AutoEP's counts
    if run.autoep:
        mine["masters"] = dict(unstacked(mine["masters"], run, ep_rank))
        mine["weights"] = dict(unstacked(mine["weights"], run, ep_rank))
        for key in keys:
            states = {name: value for (name, other), value in mine["states"].items() if other == key}
            mine["states"] |= {(name, key): value for name, value in unstacked(states, run, ep_rank)}
        mine["states"] = {(n, key): v for (n, key), v in mine["states"].items() if not _STACKED.fullmatch(n)}
    kinds = {
        "masters": {in_job(name): value for name, value in mine["masters"].items()},
        "states": {(in_job(name), key): value for (name, key), value in mine["states"].items()},
        "weights": {in_job(name): value for name, value in mine["weights"].items()},
    }
    mine_of_all = on_all_ranks({in_job(name): dim for name, dim in sharded_dims(engine.module).items()})
    sharded = {name: dim for each in mine_of_all for name, dim in each.items()}
    for kind, values in kinds.items():
        whole: dict[Any, torch.Tensor] = {}
        shards: dict[Any, dict[int, torch.Tensor]] = {}
        for rank, part in enumerate(on_all_ranks(values)):
            for key, value in part.items():
                name = key[0] if isinstance(key, tuple) else key
                seen = shards.setdefault(key, {}).setdefault(rank % run.tp if name in sharded else 0, value)
                assert torch.equal(seen, value), f"ranks hold different {kind} of {key}"
                whole[key] = torch.cat([each for _, each in sorted(shards[key].items())], sharded.get(name, 0))
        mine[kind] = whole
    # values of as many param groups as there are, which are all the same
    mine["scheduler"] = {k: set(v) if isinstance(v, list) else v for k, v in mine["scheduler"].items()}
    mine["groups"] = {group["name"].partition("_")[0]: group["weight_decay"] for group in mine["groups"]}
    return mine


def name_in_job(run: Experts, name: str) -> str:
    """A name in this rank's module, with the number of its expert among all."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    ep = run.ep_of(int(match[1]))
    local = run.experts[int(match[1])] // ep
    expert = groups._get_expert_parallel_rank(f"ep_size_{ep}") * local + int(match[3])
    return f"mixtures.{match[1]}{match[2]}{expert}{match[4]}"


def sharded_dims(module: nn.Module) -> dict[str, int]:
    """Parameters that are cut over tensor-parallel ranks, and their dimension."""
    found = {name: param.shard_dim for name, param in module.named_parameters() if hasattr(param, "shard_dim")}
    for name, param in module.named_parameters():
        if getattr(param, "ds_autotp_universal_checkpoint_meta", None):
            found[name] = int("o_proj" in name)
    return found


def unstacked(values: dict[str, torch.Tensor], run: Experts, ep_rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Stacked experts one by one, under a name that ends in their number among all."""
    for name, value in values.items():
        if _STACKED.fullmatch(name):
            first, placed = ep_rank * len(value), run.placed(ep_rank)
            for number, part in enumerate(value):
                expert = placed[number] if len(placed) == len(value) else first + number
                yield f"{name}.{expert}", part.clone()
        else:
            yield name, value


def save(arguments: dict[str, Any]) -> None:
    """:func:`save_each` of ``runs`` in folders of their names."""
    shared = {key: value for key, value in arguments.items() if key not in ("folder", "runs")}
    save_each(
        [{**shared, "setup": run, "folder": os.path.join(arguments["folder"], run.name)} for run in arguments["runs"]]
    )


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train and save each ``setup``, write down the truth, and train on for the reference losses.

    ``config``: more entries of DeepSpeed's.
    """
    for case in cases:
        run = case["setup"]
        engine = build(run, config=case.get("config"))
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(case["folder"], tag="step4", client_state={"note": "hello"})
        if run.stage:
            oracle.relink(engine)
        truth = gather(engine, run, [] if run.factored else oracle.state_keys(engine))
        assert any(is_moe_param(param) for param in engine.module.parameters())
        truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(case["folder"], "truth.pt"))
        end(engine)
        dist.barrier()


def load(arguments: dict[str, Any]) -> list[Loaded]:
    """:func:`resume` of all ``sources``, in folders of their names, by an engine of each of ``runs``."""
    shared = {key: value for key, value in arguments.items() if key not in ("folder", "runs", "sources")}
    facts = []
    for run in arguments["runs"]:
        for source in arguments["sources"]:
            facts += resume({**shared, "run": run, "folder": os.path.join(arguments["folder"], source.name)})
    close_kept()
    return facts


def resume(case: dict[str, Any]) -> list[Loaded]:
    """Load a checkpoint into an engine of ``run``, compare it with its truth, and train on as the saved run did.

    ``config``: more entries of DeepSpeed's.
    """
    elastic_ckpt.install()
    run, engine, truth = case["run"], live(case), truth_of(case["folder"])
    _, client_state = engine.load_checkpoint(case["folder"])
    if run.stage:
        oracle.relink(engine)
    now = gather(engine, run, sorted({key for _, key in truth["states"]}))
    kinds = ("masters", "states", "buffers", "steps", "groups", "counters", "scheduler")
    expected = {kind: truth[kind] for kind in kinds} | {"weights": truth["masters"]}
    differences = oracle.compare(now, expected)
    gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
    where = f"rank {dist.get_rank()}: {case['folder']} -> {run.name}"
    return [Loaded(case, where, engine.elastic_report, differences, gap, client_state)]


def live(case: dict[str, Any]) -> Any:
    """An engine of ``run`` and ``config``, which the next case may get too. Collective."""
    run, config = case["run"], case.get("config")
    return engine_of((run, config), partial(build, run, seed=8, config=config), end)


def deepspeed_loads(case: dict[str, Any]) -> list[dict[str, str]]:
    """What differs from the truth after DeepSpeed's own load of a universal checkpoint into an engine of ``run``."""
    close_kept()
    elastic_ckpt.uninstall()
    run, truth = case["run"], truth_of(case["folder"])
    engine = build(run, seed=8)
    engine._config.load_universal_checkpoint = True
    engine.load_checkpoint(case["folder"])
    assert not hasattr(engine, "elastic_report")
    oracle.relink(engine)
    now = gather(engine, run, sorted({key for _, key in truth["states"]}))
    found = oracle.compare(now, {kind: truth[kind] for kind in ("masters", "states")})
    train(engine, 20, 21)
    end(engine)
    return [found]


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load a checkpoint into an engine of ``run`` that has trained."""
    elastic_ckpt.install()
    engine = live(case)
    train(engine, 20, 21)
    refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"]))
    return [refused] if dist.get_rank() == 0 else None


def follow(case: dict[str, Any]) -> list[tuple[Refused, dict[str, str]]]:
    """:func:`refuse`; then what of masters and weights is not as saved after a load with what the error names."""
    elastic_ckpt.install()
    run, engine, truth = case["run"], live(case), truth_of(case["folder"])
    train(engine, 20, 21)
    refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"]))
    (remedy,) = [each for each in refused.remedies if each.is_data]
    engine.load_checkpoint(case["folder"], **remedy.arguments)
    now = gather(engine, run, [])
    return [(refused, oracle.compare(now, {kind: truth[kind] for kind in ("masters", "weights")}))]


def fail_alone(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load while rank 1 alone fails in a function: its ``module`` and ``function``; and then without that."""
    elastic_ckpt.install()
    engine = live(case)
    train(engine, 20, 21)

    def fail(*_: Any) -> None:
        raise DamagedError("this rank alone has failed", file=case["folder"])

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1 and not SPOILS:
            patch.setattr(importlib.import_module(case["module"]), case["function"], fail)
        refused = attempt(case, engine, partial(engine.load_checkpoint, case["folder"]))
    engine.load_checkpoint(case["folder"])
    return [refused] if dist.get_rank() == 0 else None

"""Tiny models that are tensor and pipeline parallel, their data, and their engines, on one to four ranks.

Every parameter is filled by its name from a seed, as a slice of the whole that every topology shares, and a step's
global batch is the same at every topology: losses agree up to rounding, wherever a run goes on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.utils import groups
from packaging.version import Version
from torch import nn
from torch.nn import functional

from tests.distributed.model import GLOBAL_BATCH, close
from tests.distributed.model import PRECISIONS as OF_ANY_MODEL
from tests.distributed.parallel_layers import (
    HEAD_SIZE,
    HIDDEN,
    SEQUENCE,
    FusedLM,
    GatedBlock,
    PlainBlock,
    Positions,
    Vocabulary,
    halve,
    logits,
    mean_loss,
    scores,
    waves,
)
from tests.distributed.parallel_layouts import cut_of, piece_of, whole_shape

#: Since DeepSpeed 0.19.8.
DualPipeVModule = getattr(deepspeed.pipe, "DualPipeVModule", PipelineModule)
TOKENS = 61
#: A model that is in bf16 by itself, of whose precision DeepSpeed is told nothing.
NATIVE = "bf16_model"
PRECISIONS: dict[str, dict[str, Any]] = {**OF_ANY_MODEL, NATIVE: {}}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Parallel:
    """One kind of engine.

    Attributes:
        kind: ``megatron`` (Megatron Core), ``pipeline`` (DeepSpeed's), ``dualpipev`` (that, of which each rank has two
            stages), ``3d`` (a pipeline with tensor parallel layers) or ``autotp`` (DeepSpeed shards a plain model).
        style: of ``megatron``: ``llama`` or ``gpt``; of pipelines: how layers are partitioned; of ``autotp``:
            ``llama``, ``tied``, ``uneven``, ``fused`` or ``fused_uneven``.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        stage: ZeRO stage.
        precision: a key of :data:`PRECISIONS`.
        rows: rows of the vocabulary, padding included, where it is padded.
        optimizer: ``adamw``, ``adafactor``, or ``adamw8bit``, whose smallest states have 8 bits, too.
        reverses: whether the optimizer is given the parameters of each group from the last to the first.
    """

    kind: str
    style: str
    tp: int = 1
    pp: int = 1
    stage: int = 0
    precision: str = "fp32"
    rows: int = 64
    optimizer: str = "adamw"
    reverses: bool = False

    @property
    def name(self) -> str:
        rows = "" if self.rows == 64 else f"-v{self.rows}"
        optimizer = "" if self.optimizer == "adamw" else f"-{self.optimizer}"
        more = f"{rows}{optimizer}{'-reversed' * self.reverses}"
        return f"{self.kind}-{self.style}-tp{self.tp}-pp{self.pp}-z{self.stage}-{self.precision}{more}"

    @property
    def dp(self) -> int:
        dp, rest = divmod(dist.get_world_size(), self.tp * self.pp)
        assert rest == 0, f"{self.name} on {dist.get_world_size()} ranks"
        return dp


@dataclass(frozen=True)
class Place:
    """Where a rank is: ranks count tensor parallel ones first, then data parallel ones, then stages."""

    tp: int
    dp: int
    pp: int


def place_of(parallel: Parallel, rank: int) -> Place:
    """The same for all kinds of engine."""
    rest, tp = divmod(rank, parallel.tp)
    pp, dp = divmod(rest, parallel.dp)
    return Place(tp, dp, pp)


def folder_name(parallel: Parallel) -> str:
    """What a checkpoint of this world is called."""
    return f"{parallel.name}-dp{parallel.dp}"


# --- Megatron Core ----------------------------------------------------------------------------------------------------


def megatron_model(parallel: Parallel) -> tuple[nn.Module, Any]:
    """A GPTModel of two layers, and its ``mpu``. Collective."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig

    import elastic_ckpt.megatron

    torch.cuda.current_device = lambda: torch.device("cpu")
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=parallel.tp)
    is_llama = parallel.style == "llama"
    llama = {"num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True}
    llama |= {"add_bias_linear": False, "activation_func": functional.silu, "ffn_hidden_size": 44}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        tensor_model_parallel_size=parallel.tp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=parallel.precision.startswith("bf16"),
        bias_activation_fusion=False,
        **(llama if is_llama else {"ffn_hidden_size": 52}),
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=parallel.rows,
        max_sequence_length=SEQUENCE + 3,
        share_embeddings_and_output_weights=not is_llama,
        position_embedding_type="rope" if is_llama else "learned_absolute",
    )
    return model, elastic_ckpt.megatron.mpu()


def megatron_loss(engine: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean loss of some rows of tokens; the same on all tensor parallel ranks."""
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).expand_as(inputs)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return engine(inputs, positions, hidden, labels=labels).float().mean()


# --- DeepSpeed's pipelines --------------------------------------------------------------------------------------------


def pipeline_model(parallel: Parallel) -> tuple[nn.Module, Any]:
    """Nine layers: tied embedding and head, positions, four blocks of two kinds, a function, a norm. Collective.

    Or four equal blocks between functions.
    """
    dp, group = parallel.dp, None
    for start in range(0, dist.get_world_size(), parallel.tp):
        members = range(start, start + parallel.tp)
        made = dist.new_group(list(members))
        group = made if dist.get_rank() in members else group
    topology = PipeDataParallelTopology(num_pp=parallel.pp, num_dp=dp)
    if parallel.kind == "3d":
        topology = PipeModelDataParallelTopology(num_pp=parallel.pp, num_mp=parallel.tp, num_dp=dp)
    layers = [
        TiedLayerSpec("embed", Vocabulary, parallel.rows, group),
        LayerSpec(Positions),
        LayerSpec(PlainBlock, group),
        LayerSpec(GatedBlock, group),
        halve,
        LayerSpec(PlainBlock, group),
        LayerSpec(GatedBlock, group),
        LayerSpec(nn.LayerNorm, HIDDEN),
        TiedLayerSpec("embed", Vocabulary, parallel.rows, group, forward_fn=logits),
    ]
    if parallel.kind.startswith("even"):
        dtype = DTYPES.get(parallel.precision[:4], torch.float32)
        layers = [partial(waves, dtype=dtype), *(LayerSpec(PlainBlock, group) for _ in range(4)), scores]
    kind = DualPipeVModule if parallel.kind in ("dualpipev", "even_dualpipev") else PipelineModule
    return kind(layers, topology=topology, loss_fn=mean_loss, partition_method=parallel.style), None


def micro_batches(rows: torch.Tensor, parallel: Parallel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a pipeline takes in a step."""
    for part in rows.split(micro_batch_size(len(rows), parallel)):
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def micro_batch_size(rows: int, parallel: Parallel) -> int:
    """Of a pipeline: several of them where there are enough rows; DualPipeV wants four for two ranks."""
    if parallel.kind.endswith("dualpipev"):
        return max(1, rows // (2 * parallel.pp))
    return 3 if rows % 3 == 0 else 2


# --- AutoTP -----------------------------------------------------------------------------------------------------------

#: Heads, heads of keys and values, intermediate size and vocabulary of AutoTP's models.
AUTOTP_STYLES = {
    "llama": (8, 4, 44, 64),
    "tied": (8, 4, 44, 64),
    "uneven": (6, 3, 45, TOKENS),
    "fused": (8, 4, 44, 64),
    "fused_uneven": (6, 3, 45, TOKENS),
}


def autotp_model(parallel: Parallel) -> tuple[nn.Module, Any]:
    """A plain model; DeepSpeed shards it by its ``tensor_parallel`` configuration."""
    heads, kv_heads, intermediate, rows = AUTOTP_STYLES[parallel.style]
    if parallel.style.startswith("fused"):
        return FusedLM(heads, kv_heads, intermediate, rows), None
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=heads * HEAD_SIZE,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16,
        tie_word_embeddings=parallel.style == "tied",
    )
    return LlamaForCausalLM(config), None


def autotp_config(parallel: Parallel) -> dict[str, Any]:
    """``tensor_parallel`` for DeepSpeed: transformers' own plan, or rules for the fused model."""
    if parallel.tp == 1:
        return {}
    if not parallel.style.startswith("fused"):
        return {"tensor_parallel": {"autotp_size": parallel.tp}}
    heads, kv_heads, _, _ = AUTOTP_STYLES[parallel.style]
    sizes = [heads * HEAD_SIZE, kv_heads * HEAD_SIZE, kv_heads * HEAD_SIZE]
    specs = [
        {"patterns": [".*qkv_proj.weight$"], "partition_type": "column", "shape": [sizes, -1], "partition_dim": 0},
        {"patterns": [".*gate_up_proj.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [".*(o_proj|down_proj).weight$"], "partition_type": "row"},
        {"patterns": [".*(embed_tokens|lm_head).weight$"], "partition_type": "skip"},
    ]
    rules = {"use_default_specs": False, "layer_specs": specs}
    return {"tensor_parallel": {"autotp_size": parallel.tp, "partition_config": rules}}


def autotp_loss(engine: Any, rows: torch.Tensor) -> torch.Tensor:
    return engine(input_ids=rows, labels=rows, use_cache=False).loss


# --- engines ----------------------------------------------------------------------------------------------------------

MODELS = {
    "megatron": megatron_model,
    "pipeline": pipeline_model,
    "dualpipev": pipeline_model,
    "3d": pipeline_model,
    "even": pipeline_model,
    "even_dualpipev": pipeline_model,
    "autotp": autotp_model,
}
LOSSES = {"megatron": megatron_loss, "autotp": autotp_loss}


def initial(name: str, shape: list[int], seed: int) -> torch.Tensor:
    """A whole parameter before the first step, by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.randn(shape, generator=generator) / 5
    return values + 1 if len(shape) == 1 and name.endswith("weight") else values


def fill(module: nn.Module, parallel: Parallel, seed: int) -> None:
    """Give a module the values of :func:`initial`. AutoTP has not cut its parameters yet."""
    rank = place_of(parallel, dist.get_rank()).tp
    for name, param in module.named_parameters():
        if parallel.kind == "autotp":
            param.data.copy_(initial(name, list(param.shape), seed))
            continue
        shape = whole_shape(parallel, name, [param.shape] * parallel.tp)
        param.data.copy_(piece_of(initial(name, shape, seed), cut_of(parallel, name, shape), rank))


def group_members(module: nn.Module) -> list[list[str]]:
    """Names of the parameters with and without weight decay, on this rank; a group without members is left out."""
    named = dict(module.named_parameters())
    decayed = [name for name in named if named[name].dim() > 1]
    return [members for members in (decayed, [name for name in named if name not in decayed]) if members]


def build_optimizer(module: nn.Module, members: list[list[str]], kind: str = "adamw") -> torch.optim.Optimizer:
    """AdamW, with different rates for matrices and vectors, and an ``eps`` under which rounding of tiny gradients is.

    Or another ``kind``, of :class:`Parallel`, with its own defaults.
    """
    named = dict(module.named_parameters())
    if kind == "adafactor":
        return torch.optim.Adafactor([{"params": [named[name] for name in names]} for names in members], lr=1e-2)
    if kind == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        groups = [{"params": [named[name] for name in names]} for names in members]
        optimizer = AdamW8bit(groups, lr=1e-3)
        optimizer.args.min_8bit_size = 1
        return optimizer
    decayed = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}
    plain = {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-5}
    hyperparameters = [decayed if named[names[0]].dim() > 1 else plain for names in members]
    return torch.optim.AdamW(
        [
            {"params": [named[name] for name in names], **values}
            for names, values in zip(members, hyperparameters, strict=True)
        ]
    )


def forget_groups() -> None:
    """Let DeepSpeed forget the process groups of the last engine of this process."""
    groups.mpu, groups.mesh_device = None, None
    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
        setattr(groups, name, None)


def end(engine: Any) -> None:
    """Free an engine, and DeepSpeed's process groups of it, which outlive it."""
    close(engine)
    forget_groups()


def build(parallel: Parallel, seed: int = 7, config: dict[str, Any] | None = None) -> Any:
    """A live engine on the default process group; ``config`` has more entries for DeepSpeed. Collective."""
    forget_groups()
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
    module, mpu = MODELS[parallel.kind](parallel)
    fill(module, parallel, seed)
    if parallel.precision == NATIVE:
        module.bfloat16()
    if parallel.kind == "autotp" and parallel.tp > 1 and Version(deepspeed.__version__) < Version("0.18"):
        get_accelerator().current_device = get_accelerator().current_device_name  # a number is no device of a CPU
        module = deepspeed.tp_model_init(module, parallel.tp, torch.float32)  # since then, deepspeed.initialize does it
    members = [names[:: -1 if parallel.reverses else 1] for names in group_members(module)]
    optimizer = build_optimizer(module, members, parallel.optimizer)
    rows = GLOBAL_BATCH // parallel.dp
    settings = {
        "train_micro_batch_size_per_gpu": rows if parallel.kind in LOSSES else micro_batch_size(rows, parallel),
        "gradient_accumulation_steps": 1 if parallel.kind in LOSSES else rows // micro_batch_size(rows, parallel),
        "zero_optimization": {"stage": parallel.stage},
        "steps_per_print": 1000,  # a pipeline of DeepSpeed 0.15 divides by it
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # by default 1.0, and without ZeRO tied parameters count once for every stage
        **(autotp_config(parallel) if parallel.kind == "autotp" else {}),
        **PRECISIONS[parallel.precision],
        **(config or {}),
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, mpu=mpu, config=settings)[
        0
    ]
    engine.members = members
    return engine


def batch(parallel: Parallel, step: int) -> torch.Tensor:
    """This rank's rows of the global batch of one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, TOKENS, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    return tokens[place_of(parallel, dist.get_rank()).dp :: parallel.dp]


def train(engine: Any, parallel: Parallel, first: int, last: int) -> list[float]:
    """Train steps ``first`` to ``last``, excluding ``last``; mean losses over the global batch."""
    losses = []
    for step in range(first, last):
        rows = batch(parallel, step)
        if parallel.kind in LOSSES:
            loss = LOSSES[parallel.kind](engine, rows)
            engine.backward(loss)
            engine.step()
        else:
            loss = engine.train_batch(micro_batches(rows, parallel))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (place_of(parallel, dist.get_rank()).dp, float(loss)))
        if parallel.kind in LOSSES:
            assert len(set(everyone)) <= parallel.dp, f"tensor parallel ranks have other losses: {everyone}"
        losses.append(sum(value for _, value in everyone) / len(everyone))
    return losses

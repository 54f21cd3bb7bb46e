"""Checkpoints of today's DeepSpeed, written again as older code bases left theirs: names, entries, dtypes, classes."""

from __future__ import annotations

import enum
import random
import shutil
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils.tensor_fragment import fragment_address

TAG = "global_step4"
Tree = dict[str, Any]
Change = Callable[[Tree, int], Tree]

# --- pickles of classes that are not here -----------------------------------------------------------------------------

PositionEmbeddingType = enum.Enum("PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3})
PositionEmbeddingType.__module__ = "megatron.enums"
ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 1, "encoder_and_decoder": 2})
ModelType.__module__ = "megatron.core.enums"


@contextmanager
def as_then() -> Iterator[None]:
    """Megatron's enums can be pickled, and DeepSpeed's addresses are where they were before September 2022."""
    stand_ins = {kind.__module__: types.ModuleType(kind.__module__) for kind in (PositionEmbeddingType, ModelType)}
    for kind in (PositionEmbeddingType, ModelType):
        setattr(stand_ins[kind.__module__], kind.__name__, kind)
    present = {name: sys.modules.get(name) for name in ("megatron", "megatron.core", *stand_ins)}
    sys.modules.update({"megatron": types.ModuleType("megatron"), "megatron.core": types.ModuleType("megatron.core")})
    sys.modules.update(stand_ins)
    home = fragment_address.__module__
    fragment_address.__module__ = "deepspeed.runtime.bf16_optimizer"
    try:
        yield
    finally:
        fragment_address.__module__ = home
        for name, module in present.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# --- what all of them share -------------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def mp_rank(path: Path) -> int:
    """Of a model- or optimizer-states file."""
    return int(path.name.split("mp_rank_")[1][:2])


def rewrite(native: Path, target: Path, model: Change, optimizer: Change) -> Path:
    """A copy of a folder whose model- and optimizer-states files are changed; both are given the file's rank."""
    shutil.copytree(native, target)
    with as_then():
        for path in sorted((target / TAG).glob("*mp_rank_*.pt")):
            change = optimizer if path.name.endswith("optim_states.pt") else model
            torch.save(change(read(path), mp_rank(path)), path)
    for script in target.glob("*.py"):
        script.unlink()
    return target


def only(tree: Tree, *keys: str) -> Tree:
    """These entries, in this order."""
    return {key: tree[key] for key in keys}


def random_states() -> Tree:
    """Five entries, as Megatron wrote them until 2023, and gpt-neox always."""
    generator = torch.get_rng_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": generator,
        "cuda_rng_state": generator[:16].clone(),
        "rng_tracker_states": {"model-parallel-rng": generator[:16].clone()},
    }


# --- BLOOM ------------------------------------------------------------------------------------------------------------

_BLOOM_MODEL = ("module", "buffer_names", "optimizer", "param_shapes", "lr_scheduler")
_BLOOM_COUNTERS = ("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size")
_BLOOM_OPTIMIZER = ("clip_grad", "base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings")


def as_bloom(native: Path, target: Path, tp: int, pp: int, early: bool = False) -> Path:
    """A folder of bigscience-workshop/Megatron-DeepSpeed of July 2022.

    Args:
        native: a ``bloom`` run's.
        target: to be made.
        tp, pp: its degrees.
        early: as before July: the paddings under another name, no slice mappings, no ``checkpoint_info``.
    """
    version, config = "0.6.6+80d0a32", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}

    def model(tree: Tree, rank: int) -> Tree:
        kept = only(tree, *_BLOOM_MODEL) | {"sparse_tensor_module_names": set()} | only(tree, *_BLOOM_COUNTERS)
        kept |= {"ds_config": config, "ds_version": version, "args": bloom_args(rank, tp, pp)}
        kept |= {"checkpoint_version": 3.0, "iteration": 4, "tokens": 384}
        sizes = {} if early else {"checkpoint_info": {"padded_vocab_size": 64, "original_vocab_size": 61}}
        return kept | sizes | random_states()

    def optimizer(tree: Tree, _: int) -> Tree:
        kept = only(tree["optimizer_state_dict"], *_BLOOM_OPTIMIZER, "partition_count")
        kept |= {"ds_version": version}
        if early:
            kept["groups_padding"] = kept.pop("group_paddings")
        else:
            kept["param_slice_mappings"] = tree["optimizer_state_dict"]["param_slice_mappings"]
        return {"optimizer_state_dict": kept, "ds_config": config, "ds_version": version}

    return rewrite(native, target, model, optimizer)


def bloom_args(rank: int, tp: int, pp: int) -> Namespace:
    """What decides about the layout, and the kinds of value that its hundreds of options have."""
    return Namespace(
        rank=rank,
        world_size=tp * pp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None,
        data_parallel_size=1,
        padded_vocab_size=64,
        make_vocab_size_divisible_by=128,
        pad_vocab_size_to=64,
        kv_channels=4,
        num_attention_heads=8,
        ffn_hidden_size=64,
        glu_activation=None,
        params_dtype=torch.bfloat16,
        position_embedding_type=PositionEmbeddingType.alibi,
        consumed_train_samples=48,
        consumed_valid_samples=0,
        iteration=4,
        seed=42,
        deepspeed_configuration={"curriculum_learning": {"enabled": False}},
        data_path=["a", "b"],
    )


# --- gpt-neox ---------------------------------------------------------------------------------------------------------

#: As users write them: JSON with comments and commas too many, hyphens or underscores, in several files.
NEOX_CONFIGS = {
    "tiny.yml": """# GPT-2 pretraining setup
{
  # parallelism settings ( you will want to change these )
  "pipe-parallel-size": 2,
  "model_parallel_size": 2,
  'num-layers': 3, "hidden-size": 32,   # sizes
  "gpt_j_residual": %s,
  "optimizer": {"type": "Adam", "params": {"lr": 1.0e-4, "betas": [0.9, 0.95], "activation": "geglu",}},
  "attention-config": [[["flash"], 4]],
}
""",
    "local_setup.yml": 'data-path: data/enwik8/enwik8_text_document\n"vocab-file": "data/#1.json"\nlog-dir: logs # here\n',
}


def as_neox(native: Path, target: Path, gpt_j: bool = False, configs: str = f"{TAG}/configs") -> Path:
    """A folder of gpt-neox on a DeeperSpeed of 2023 to 2025.

    Args:
        native: a ``neox`` or ``neoxj`` run's.
        target: to be made.
        gpt_j: the value of ``gpt_j_residual`` in its configuration.
        configs: folder for that; empty: it is not there.
    """
    version = "0.12.4+02e2ebf"

    def model(tree: Tree, _: int) -> Tree:
        kept = {key: value for key, value in tree.items() if key not in ("checkpoint_parallel_dimensions", "note")}
        kept |= {"sparse_tensor_module_names": set(), "ds_version": version, "iteration": 4, "args": neox_args()}
        return kept | random_states()

    def optimizer(tree: Tree, _: int) -> Tree:
        state = {key: value for key, value in tree["optimizer_state_dict"].items() if key != "param_alignment_paddings"}
        return tree | {"optimizer_state_dict": state | {"ds_version": version}, "ds_version": version}

    rewrite(native, target, model, optimizer)
    if configs:
        write_configs(target / configs, gpt_j)
    return target


def write_configs(folder: Path, gpt_j: bool) -> None:
    folder.mkdir(parents=True)
    for name, text in NEOX_CONFIGS.items():
        (folder / name).write_text(text.replace("%s", str(gpt_j).lower()))


def neox_args() -> Tree:
    """All that gpt-neox saves of its arguments."""
    return {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "max_position_embeddings": 8,
        "make_vocab_size_divisible_by": 32,
        "padded_vocab_size": 64,
        "tokenizer_type": "HFTokenizer",
        "model_parallel_size": 2,
    }


def as_deeperspeed_03(native: Path, target: Path) -> Path:
    """A folder of gpt-neox on DeeperSpeed 0.3.15, as the 20B model's: other entries in the optimizer's files."""
    shapes = {mp_rank(path): read(path)["param_shapes"] for path in (native / TAG).glob("mp_rank_*.pt")}

    def model(tree: Tree, _: int) -> Tree:
        gone = ("param_shapes", "buffer_names", "ds_config", "ds_version", "checkpoint_parallel_dimensions")
        kept = {key: value for key, value in tree.items() if key not in gone} | {"csr_tensor_module_names": set()}
        return kept | {"iteration": 4, "args": neox_args()} | random_states()

    def optimizer(tree: Tree, rank: int) -> Tree:
        state = tree["optimizer_state_dict"]
        groups = [[master.detach()] for master in state["single_partition_of_fp32_groups"]]
        kept = only(state, "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count")
        kept |= {"base_optimizer_state": [[held] for held in state["base_optimizer_state"]["state"].values()]}
        kept |= {"zero_stage": 1, "num_comm_intervals_per_group": [1] * len(groups)}
        kept |= {"local_sub_partitions_of_fp32_groups": groups}
        flat = {name: shape for group in shapes[rank] for name, shape in group.items()}
        return {"optimizer_state_dict": kept, "param_shapes": flat}

    return rewrite(native, target, model, optimizer)


def as_twenty(native: Path, target: Path) -> Path:
    """A folder of the 20B model, with its configuration."""
    as_deeperspeed_03(native, target)
    write_configs(target / TAG / "configs", gpt_j=False)
    return target


def as_deepspeed_05(native: Path, target: Path) -> Path:
    """A folder of DeepSpeed 0.5.10 to 0.6.1: shapes lie in the optimizer's files, and nothing tells the paddings."""
    shapes = {mp_rank(path): read(path)["param_shapes"] for path in (native / TAG).glob("mp_rank_*.pt")}
    gone = ("group_paddings", "param_slice_mappings", "param_alignment_paddings")

    def model(tree: Tree, _: int) -> Tree:
        kept = {
            key: value for key, value in tree.items() if key not in ("param_shapes", "checkpoint_parallel_dimensions")
        }
        return kept | {"ds_version": "0.5.10"}

    def optimizer(tree: Tree, rank: int) -> Tree:
        state = {key: value for key, value in tree["optimizer_state_dict"].items() if key not in gone}
        return tree | {"optimizer_state_dict": state, "param_shapes": shapes[rank], "ds_version": "0.5.10"}

    return rewrite(native, target, model, optimizer)


# --- Megatron-DeepSpeed since December 2024 ---------------------------------------------------------------------------


def as_megatron(native: Path, target: Path, tp: int, fpdt: bool = True) -> Path:
    """A folder of deepspeedai/Megatron-DeepSpeed.

    Args:
        native: a ``thirds`` run's.
        target: to be made.
        tp: its tensor parallel degree.
        fpdt: whether its arguments have the option by which code with contiguous thirds is told from older code.
    """
    args = bloom_args(0, tp, 1)
    del args.glu_activation, args.position_embedding_type
    vars(args).update(swiglu=False, override_opt_param_scheduler=False, num_key_value_heads=8, zero_stage=1)
    vars(args).update(model_type=ModelType.encoder_or_decoder, teacher_model=None)
    args.attn_mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    if fpdt:
        args.ds_sequence_parallel_fpdt = False
    info = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": 61,
        "padded_vocab_size": 64,
        "vocabulary_parameter_patterns": [r"\d+.word_embeddings.weight", r"\d+.lm_head.weight"],
        "parameter_with_row_parallelism_patterns": [
            r"\d+.mlp.dense_4h_to_h.weight",
            r"\d+.self_attention.dense.weight",
        ],
        "tp_replicated_parameter_patterns": [
            r"\d+.input_layernorm.weight",
            r"\d+.input_layernorm.bias",
            r"\d+.post_attention_layernorm.weight",
            r"\d+.post_attention_layernorm.bias",
            r"\d+.self_attention.dense.bias",
            r"\d+.mlp.dense_4h_to_h.bias",
            r"\d+.weight",
            r"\d+.bias",
        ],
    }

    def model(tree: Tree, _: int) -> Tree:
        tokens = {"checkpoint_version": 3.0, "iteration": 4, "tokens": 384}
        return tree | {"args": args, "universal_checkpoint_info": info, "rng_state": [random_states()]} | tokens

    return rewrite(native, target, model, lambda tree, _: tree)

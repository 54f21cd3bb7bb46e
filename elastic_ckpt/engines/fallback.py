"""Would DeepSpeed's own loader restore this folder right?"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from elastic_ckpt import parallel
from elastic_ckpt.engines.features import same_features
from elastic_ckpt.engines.host import LoadArguments
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.features import base_groups
from elastic_ckpt.formats.naming import SWAPPED_FOLDER
from elastic_ckpt.formats.pickled import PickledFile, open_pickled

#: Entries of a param group that say nothing about the optimizer's kind.
_NOT_COMPARED = frozenset({"params", "param_names", "step"})
_LAYOUTS = {0: "whole", 1: "zero12", 2: "zero12", 3: "zero3"}


def deepspeed_loads_it_right(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    """Whether DeepSpeed's own loader is known to restore a folder that elastic_ckpt does not. Collective.

    That is so for native checkpoints at the topology, layout and ZeRO stage they were saved with, and with an optimizer
    of the same hyperparameters; and at any data-parallel degree, where only weights are asked for and they lie whole in
    one file, which is so below ZeRO-3. It is never so for optimizer states on NVMe, of which DeepSpeed 0.19 restores
    the masters of big sub-groups alone.
    """
    answer: bool | None = None
    if parallel.rank() == 0:
        try:
            answer = found.format == "native" and not _is_swapped(engine, found) and _fits(engine, found, arguments)
        except Exception:  # files that cannot be read are not ones that DeepSpeed is known to load right
            answer = False
    return parallel.broadcast(answer, src=0)


def _is_swapped(engine: Any, found: Found) -> bool:
    return bool(engine.zero_nvme_offload_optimizer()) or os.path.isdir(found.path(SWAPPED_FOLDER))


def _fits(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    if _leaves_old_masters(engine, arguments):
        return False
    if _whole_weights(engine, found, arguments):
        return True
    return _same_topology(engine, found) and same_features(engine, found) and _same_optimizer(engine, found, arguments)


def _leaves_old_masters(engine: Any, arguments: LoadArguments) -> bool:
    """Without ZeRO in fp16 or bf16, DeepSpeed leaves masters behind that undo the loaded weights at the next step."""
    low_precision = hasattr(engine.optimizer, "refresh_fp32_params")
    without_states = not (arguments.load_module_only or arguments.load_optimizer_states)
    return engine.zero_optimization_stage() == 0 and low_precision and without_states


def _same_topology(engine: Any, found: Found) -> bool:
    file = _model_file(found)
    return (
        file is not None
        and file.tree.get("dp_world_size") == engine.seq_dp_world_size
        and file.tree.get("mp_world_size") == engine.mp_world_size
        and len(found.files.mp_ranks) == dist.get_world_size() // max(engine.seq_dp_world_size, 1)
        and _saved_layout(found) == _LAYOUTS.get(engine.zero_optimization_stage())
    )


def _model_file(found: Found) -> PickledFile | None:
    """A model-states file. DeepSpeed's loader trusts pickles anyhow; what is looked at here, the safe way gives too."""
    names = list(found.files.model.values()) + list(found.files.model_zero3.values())
    return open_pickled(found.path(names[0])) if names else None


def _same_optimizer(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    """Whether the saved optimizer is of the live one's kind and steps on the same tensors in the same order.

    DeepSpeed's own loader gives states by position, and the states of any optimizer to any other; the names of their
    hyperparameters tell most kinds apart.
    """
    if arguments.load_module_only or not arguments.load_optimizer_states:
        return True
    model = _model_file(found)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    shards = list(found.files.optimizer.values())
    if shards and shards[0].startswith("bf16_") != engine.bfloat16_enabled():
        return False
    # without ZeRO, the optimizer of experts has a file of its own
    own = [name for name in found.files.experts if name.startswith("expp_rank_0_")] or shards
    file = open_pickled(found.path(own[0])) if own else model
    saved = [set(group) - _NOT_COMPARED for group in base_groups(file)] if file is not None else []
    live = [set(group) - _NOT_COMPARED for group in base.param_groups]
    return saved == live and model is not None and _same_order(engine, model, file)


def _same_order(engine: Any, model: PickledFile, file: PickledFile | None) -> bool:
    """Whether parameters lie in the same order: of the flat buffers, or without ZeRO of the model and its groups."""
    if engine.zero_optimization_stage() > 0:
        saved = [[(str(k), tuple(v)) for k, v in group.items()] for group in model.tree.get("param_shapes") or ()]
        live = [[(k, tuple(v)) for k, v in group.items()] for group in engine._get_zero_param_shapes()]
        return saved == live
    names = [name for name in engine.module.state_dict() if name in model.tree["module"]]
    optimizer = (file or model).tree.get("optimizer") or {}
    kinds = [key in optimizer for key in ("fp32_groups", "fp32_groups_flat")]
    live_kinds = [hasattr(engine.optimizer, key) for key in ("fp32_groups", "fp32_groups_flat")]
    sizes = [len(group["params"]) for group in base_groups(file or model)]
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    same_groups = sizes == [len(group["params"]) for group in base.param_groups]
    return (
        names == [name for name in model.tree["module"] if name in set(names)] and kinds == live_kinds and same_groups
    )


def _whole_weights(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    weights_only = arguments.load_module_only or not arguments.load_optimizer_states or engine.optimizer is None
    whole_here = set(found.files.model) == {0} and not (found.files.layers or found.files.experts)
    plain = engine.mp_world_size == 1 and not engine.has_moe_layers
    return weights_only and whole_here and engine.zero_optimization_stage() < 3 and plain


def _saved_layout(found: Found) -> str:
    """Which stages' loader reads the files, told by their names: the saved config may be no more than a path."""
    if found.files.model_zero3:
        return "zero3"
    return "zero12" if found.files.optimizer else "whole"

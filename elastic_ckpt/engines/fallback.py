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
    if _whole_weights(engine, found, arguments):
        return True
    return _same_topology(engine, found) and same_features(engine, found) and _same_optimizer(engine, found, arguments)


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
    """Whether the saved groups have all hyperparameters of the live optimizer.

    DeepSpeed's own loader gives the states of any optimizer to any other; their hyperparameters tell most kinds apart.
    """
    if arguments.load_module_only or not arguments.load_optimizer_states:
        return True
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    wanted = set(getattr(base, "defaults", {}))
    shards = list(found.files.optimizer.values())
    file = open_pickled(found.path(shards[0])) if shards else _model_file(found)
    groups = base_groups(file) if file is not None else []
    return not groups or all(wanted <= set(group) for group in groups)


def _whole_weights(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    weights_only = arguments.load_module_only or not arguments.load_optimizer_states
    whole_here = set(found.files.model) == {0} and not (found.files.layers or found.files.experts)
    plain = engine.mp_world_size == 1 and not engine.has_moe_layers
    return weights_only and whole_here and engine.zero_optimization_stage() < 3 and plain


def _saved_layout(found: Found) -> str:
    """Which stages' loader reads the files, told by their names: the saved config may be no more than a path."""
    if found.files.model_zero3:
        return "zero3"
    return "zero12" if found.files.optimizer else "whole"

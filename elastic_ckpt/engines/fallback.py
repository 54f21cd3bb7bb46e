"""Would DeepSpeed's own loader restore this folder right?"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from elastic_ckpt import parallel
from elastic_ckpt.engines.host import LoadArguments
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.pickled import open_pickled

_LAYOUTS = {0: "whole", 1: "zero12", 2: "zero12", 3: "zero3"}


def deepspeed_loads_it_right(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    """Whether DeepSpeed's own loader is known to restore a folder that elastic_ckpt does not. Collective.

    That is so for native checkpoints at the topology and ZeRO stage they were saved with; and at any data-parallel
    degree, where only weights are asked for and they lie whole in one file, which is so below ZeRO-3.
    """
    answer: bool | None = None
    if parallel.rank() == 0:
        answer = found.format == "native" and (
            _same_topology(engine, found) or _whole_weights(engine, found, arguments)
        )
    return parallel.broadcast(answer, src=0)


def _same_topology(engine: Any, found: Found) -> bool:
    files = found.files
    names = list(files.model.values()) + list(files.model_zero3.values())
    if not names:
        return False
    # DeepSpeed's loader trusts pickles anyhow; here only counters are looked at, so the safe way is enough.
    try:
        file = open_pickled(found.path(names[0]))
    except Exception:  # an unreadable file is not one that DeepSpeed is known to load right
        return False
    return (
        file.tree.get("dp_world_size") == engine.seq_dp_world_size
        and file.tree.get("mp_world_size") == engine.mp_world_size
        and len(files.mp_ranks) == dist.get_world_size() // max(engine.seq_dp_world_size, 1)
        and _saved_layout(found) == _LAYOUTS.get(engine.zero_optimization_stage())
    )


def _whole_weights(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    weights_only = arguments.load_module_only or not arguments.load_optimizer_states
    whole_here = set(found.files.model) == {0} and not (found.files.layers or found.files.experts)
    return weights_only and whole_here and engine.zero_optimization_stage() < 3 and engine.mp_world_size == 1


def _saved_layout(found: Found) -> str:
    """Which stages' loader reads the files, told by their names: the saved config may be no more than a path."""
    if found.files.model_zero3:
        return "zero3"
    return "zero12" if found.files.optimizer else "whole"

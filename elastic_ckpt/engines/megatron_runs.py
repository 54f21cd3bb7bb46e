"""Arguments of Megatron's runs: those of the live job, and saved ones with its topology."""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

from elastic_ckpt.core.local_state import RankCoordinates


def live_arguments(engine: Any) -> dict[str, Any]:
    """Plain values among the arguments of the live run; empty unless its code base keeps them where it is known to."""
    args = getattr(engine.module, "neox_args", None)  # gpt-neox
    variables = sys.modules.get("megatron.global_vars")  # Megatron-DeepSpeed, bigscience's too
    if args is None and variables is not None:
        args = getattr(variables, "_GLOBAL_ARGS", None)
    values = dict(vars(args)) if args is not None else {}
    for layer in engine.module.modules():
        if hasattr(layer, "gqa_project"):  # until commit 96c242eb gpt-neox took q, k and v from each head
            values["gqa_contiguous"] = "new_query_shape" in layer.gqa_project.__code__.co_varnames
    return {key: value for key, value in values.items() if isinstance(value, (str, int, float, bool, type(None)))}


def follow_topology(args: Any, coordinates: RankCoordinates, rank: int) -> Any:
    """A copy of saved arguments (Megatron's namespace or gpt-neox's dict) with the topology of the live job.

    Anything else is returned unchanged. ``rank`` is the global rank.
    """
    if not isinstance(args, (argparse.Namespace, dict)):
        return args
    live = {
        "tensor_model_parallel_size": coordinates.tp,
        "pipeline_model_parallel_size": coordinates.pp,
        "data_parallel_size": coordinates.dp,
        "transformer_pipeline_model_parallel_size": coordinates.pp,
        "model_parallel_size": coordinates.tp,
        "pipe_parallel_size": coordinates.pp,
        "world_size": coordinates.dp * coordinates.tp * coordinates.pp,
        "rank": rank,
        "tensor_model_parallel_rank": coordinates.tp_rank,
        "pipeline_model_parallel_rank": coordinates.pp_rank,
    }
    changed = copy.copy(args)
    values = vars(changed) if isinstance(changed, argparse.Namespace) else changed
    for key, value in live.items():
        if isinstance(values.get(key), int):
            values[key] = value
    return changed

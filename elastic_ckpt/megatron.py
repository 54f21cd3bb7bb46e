"""Megatron Core's parallel state under the names that DeepSpeed calls on its ``mpu``.

``deepspeed.initialize(..., mpu=elastic_ckpt.megatron.mpu())`` after ``parallel_state.initialize_model_parallel()``.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch.distributed as dist

from elastic_ckpt.errors import ElasticCkptError

#: DeepSpeed's name of a parallelism -> Megatron Core's.
_PARALLELISMS = {
    "tensor_model_parallel": "tensor_model_parallel",
    "slice_parallel": "tensor_model_parallel",
    "pipeline_model_parallel": "pipeline_model_parallel",
    "pipe_parallel": "pipeline_model_parallel",
    "data_parallel": "data_parallel",
}


def mpu() -> SimpleNamespace:
    """The ``mpu`` for ``deepspeed.initialize`` in a job whose model is built with Megatron Core.

    It has ``get_*_group``, ``get_*_world_size`` and ``get_*_rank`` of each parallelism. DeepSpeed's "model parallel"
    spans all ranks of one copy of the model and numbers the files ``mp_rank_XX``: tensor-parallel ranks of the first
    pipeline stage, then of the second.

    Raises :class:`ImportError` without Megatron Core, and :class:`ElasticCkptError` if model parallelism is not
    initialised, or there is context parallelism, over which DeepSpeed would not average gradients.
    """
    try:
        from megatron.core import parallel_state  # noqa: PLC0415  an optional package
    except ImportError as error:
        raise ImportError("elastic_ckpt.megatron needs megatron-core: pip install 'megatron-core>=0.16.1'") from error
    if not parallel_state.model_parallel_is_initialized():
        remedy = "call megatron.core.parallel_state.initialize_model_parallel() before elastic_ckpt.megatron.mpu()"
        raise ElasticCkptError("Megatron's model parallelism is not initialised", remedy=remedy)
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        problem = "DeepSpeed does not average gradients over Megatron's context parallel ranks"
        expected = "context_parallel_size=1"
        found = f"context_parallel_size={size}"
        remedy = "train long sequences with DeepSpeed's own sequence parallelism instead"
        raise ElasticCkptError(problem, None, expected, found, remedy=remedy)
    made = SimpleNamespace()
    for name, theirs in _PARALLELISMS.items():
        for what in ("group", "world_size", "rank"):
            setattr(made, f"get_{name}_{what}", getattr(parallel_state, f"get_{theirs}_{what}"))
    made.get_tensor_model_parallel_src_rank = parallel_state.get_tensor_model_parallel_src_rank
    made.get_slice_parallel_src_rank = parallel_state.get_tensor_model_parallel_src_rank
    made.get_model_parallel_group = model_group = parallel_state.get_model_parallel_group
    made.get_model_parallel_world_size = lambda: dist.get_world_size(group=model_group())
    made.get_model_parallel_rank = lambda: dist.get_rank(group=model_group())
    made.get_model_parallel_src_rank = lambda: dist.get_global_rank(model_group(), 0)
    made.get_data_parallel_group_ranks = lambda: dist.get_process_group_ranks(made.get_data_parallel_group())
    return made

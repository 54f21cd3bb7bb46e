"""What DeepSpeed's own saves of a live engine will lack."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from elastic_ckpt.engines.place import sequence_of
from elastic_ckpt.engines.zero3 import partition_group

logger = logging.getLogger(__name__)


def warn_of_incomplete_saves(engine: Any) -> None:
    """Warn on rank 0 if checkpoints of this engine will not hold all of it. Local, changes nothing.

    With a device mesh for sequence parallelism, the ranks of one sequence-parallel group write files of the same names
    (``DeepSpeedEngine._get_zero_ckpt_name`` counts data-parallel ranks alone): at once, and in ZeRO-3 of different
    partitions.
    """
    if dist.get_rank() != 0 or engine.sequence_parallel_size == 1:
        return
    group = getattr(engine.optimizer, "dp_process_group", None)
    if engine.zero_optimization_stage() == 3:
        partitions = dist.get_world_size(group=partition_group(engine))
        written = partitions if group is None else dist.get_world_size(group=group)
        if written < partitions:
            logger.warning(_LOST, engine.sequence_parallel_size, partitions, written)
    elif not sequence_of(engine, engine.seq_dp_world_size)[0].partitioned:
        logger.warning(_TORN, engine.sequence_parallel_size)


_REMEDY = (
    "Pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to deepspeed.initialize instead of "
    '"sequence_parallel_size" and "data_parallel_size" in the config (or mesh_param), as Accelerate does.'
)
_LOST = (
    "elastic_ckpt: checkpoints of this engine will be incomplete and cannot be resumed: with a device mesh for "
    "sequence parallelism (degree %d), ZeRO-3 of this DeepSpeed cuts the model into %d partitions and saves %d. "
    + _REMEDY
)
_TORN = (
    "elastic_ckpt: checkpoints of this engine may be damaged: with a device mesh for sequence parallelism (degree %d), "
    "all ranks of a sequence-parallel group write the same files at the same time. " + _REMEDY
)

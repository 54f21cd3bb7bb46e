"""What lets frameworks that were made for GPUs run their DeepSpeed path on CPU and gloo. Nothing of checkpoints.

Each is the smallest change that gets past a choice of device or backend; what the frameworks then do is theirs.
"""

from __future__ import annotations

import os
from typing import Any


def let_frameworks_run_on_cpu() -> None:
    """Call it before a framework has looked for devices."""
    # torchrun sets these; Accelerate and Lightning read them
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    os.environ.setdefault("GROUP_RANK", "0")
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "none")
    _torch()
    _accelerate()
    _lightning()


def _torch() -> None:
    """For gloo, the backward of a differentiable all-gather takes ranks within the group for ranks of the whole job.

    Transformers gathers losses so over sequence-parallel groups; NCCL reduces and scatters instead.
    """
    import torch.distributed as dist
    from torch.distributed.nn.functional import _AlltoAll

    def forward(ctx: Any, group: Any, received: list[Any], *tensors: Any) -> tuple[Any, ...]:
        ctx.group, ctx.input_tensor_size_list = group, [tensor.size() for tensor in tensors]
        mine = [tensor.contiguous() for tensor in tensors]
        for rank, part in enumerate(received):
            dist.scatter(part, mine if rank == dist.get_rank(group) else None, group=group, group_src=rank)
        return tuple(received)

    _AlltoAll.forward = staticmethod(forward)


def _accelerate() -> None:
    """Accelerate takes DeepSpeed's backend from the kind of GPU it finds."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def gloo(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = gloo


def _lightning() -> None:
    """Lightning's strategies refuse every accelerator but CUDA, and ask the devices for an index; CPUs have none."""
    import lightning.fabric.accelerators
    import lightning.fabric.strategies
    import lightning.pytorch.accelerators
    import lightning.pytorch.strategies
    import torch

    for package in (lightning.fabric, lightning.pytorch):
        package.strategies.DeepSpeedStrategy.setup_environment = package.strategies.DDPStrategy.setup_environment
        package.accelerators.CPUAccelerator.get_parallel_devices = staticmethod(
            lambda devices: [torch.device("cpu", number) for number in range(devices)]
        )

"""torch.distributed.checkpoint: the same logical state as DTensors, cut along dimension 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.cases import FRESH, RESUME
from benchmarks.held import Part, judge_parts
from benchmarks.model import KEYS, STATES, fill

#: key -> name of a parameter -> its tensor.
State = dict[str, dict[str, DTensor]]


class Sharded:
    """``dcp.load`` of masters and states; weights, hyperparameters and steps are not part of it.

    Args:
        engine: says which parameters there are.
        folder: what ``dcp.save`` wrote.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        self.folder = folder
        self.phases: dict[str, float] = {}
        self.tensor_nbytes: int | None = None
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._shapes = shapes_of(engine)
        self._state: State = {}
        self.owned_nbytes = sum(
            4 * rows_of(shape)[1] * shape.numel() // shape[0] for shape in self._shapes.values() for _ in KEYS
        )

    def prepare(self, kind: str) -> int:
        """See :class:`benchmarks.contenders.Runner`."""
        if kind == RESUME:
            self._state = {"fp32": allocate(self._shapes, self._mesh)}
        elif kind == FRESH:
            self._state = {}
        for tensor in self._tensors():
            tensor.to_local().fill_(-1.0)
        share = self.owned_nbytes // len(KEYS)
        return {RESUME: len(STATES) * share, FRESH: self.owned_nbytes}.get(kind, 0)

    def load(self, kind: str) -> None:
        """See :class:`benchmarks.contenders.Runner`."""
        for key in KEYS:
            if key not in self._state:
                self._state[key] = allocate(self._shapes, self._mesh)
        dcp.load(dict(self._state), checkpoint_id=self.folder)

    def _tensors(self) -> Iterator[DTensor]:
        for tensors in self._state.values():
            yield from tensors.values()

    def parts(self) -> Iterator[Part]:
        """See :class:`benchmarks.contenders.Runner`."""
        return local_parts(self._state)

    def judge(self) -> dict[str, bool]:
        """See :class:`benchmarks.contenders.Runner`."""
        return judge_parts(self.parts())

    def drop(self) -> None:
        """See :class:`benchmarks.contenders.Runner`."""
        self._state = {}


def shapes_of(engine: Any) -> dict[str, torch.Size]:
    """Full shapes of all parameters, also of those that ZeRO-3 has partitioned."""
    return {
        name: torch.Size(getattr(param, "ds_shape", param.shape)) for name, param in engine.module.named_parameters()
    }


def rows_of(shape: torch.Size) -> tuple[int, int]:
    """First row and number of rows of this rank, as ``torch.chunk`` deals them out."""
    step = -(-shape[0] // dist.get_world_size())
    first = min(dist.get_rank() * step, shape[0])
    return first, min(step, shape[0] - first)


def allocate(shapes: dict[str, torch.Size], mesh: DeviceMesh) -> dict[str, DTensor]:
    """A tensor for each parameter, of which this rank has its rows, with nothing in them."""
    tensors = {}
    for name, shape in shapes.items():
        full = torch.empty(shape, device="meta")
        local = torch.empty((rows_of(shape)[1], *shape[1:]))
        tensors[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=full.stride())
    return tensors


def local_parts(state: State) -> Iterator[Part]:
    """What this rank holds of each tensor."""
    for key, tensors in state.items():
        for name, tensor in tensors.items():
            start = rows_of(tensor.shape)[0] * (tensor.numel() // tensor.shape[0])
            yield name, key, start, tensor.to_local().view(-1)


def save(shapes: dict[str, torch.Size], folder: Path) -> None:
    """Write the state as it is saved by all others too. Collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: State = {key: allocate(shapes, mesh) for key in KEYS}
    for name, key, start, tensor in local_parts(state):
        fill(tensor, name, key, start)
    dcp.save(dict(state), checkpoint_id=folder)

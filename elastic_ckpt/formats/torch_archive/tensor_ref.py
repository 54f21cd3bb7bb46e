"""A tensor that stays in its file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, unsafe_hash=True)  # not frozen: that takes five times as long to make, and there are many
class TensorRef:
    """A tensor that stays in its file. Immutable.

    Attributes:
        dtype, shape, stride: name of its torch dtype; strides are in elements.
        byte_offset: absolute offset of its first element in the file.
        is_parameter: whether it was saved as ``nn.Parameter``.
        swap_id: name of the swap file with its data, if on NVMe; its own bytes are then missing or stale.
        requires_grad, attributes: as it was saved; ``None``: without attributes.
        storage_offset, storage_nbytes: where it begins in its storage, in bytes, and the size of that. Tensors of one
            storage share memory; without a size, it has one of its own.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    byte_offset: int
    is_parameter: bool = False
    swap_id: str | None = None
    # of whoever makes a tensor of it, on the rank that read the file
    requires_grad: bool = field(default=False, compare=False)
    attributes: Any = field(default=None, compare=False)
    storage_offset: int = field(default=0, compare=False)
    storage_nbytes: int = field(default=0, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:  # ranks exchange thousands: no names of fields
        return TensorRef, (self.dtype, self.shape, self.stride, self.byte_offset, self.is_parameter, self.swap_id)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are consecutive, in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != step:
                return not self.numel
            step *= size
        return True

    @property
    def reach(self) -> int:
        """Elements from the first to the last that it touches, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

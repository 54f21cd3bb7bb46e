"""Tensors in files that torch's functions rearrange before any byte is read. Pure: torch calls it, not the reverse.

Transformers converts the weights of many checkpoints as it loads them, with operations of its own that call
``torch.cat``, ``torch.stack``, ``torch.chunk`` and ``torch.split``. Given these in place of tensors, they say where in
the files each element of a converted weight is. What is no rearrangement of boxes raises :class:`TypeError`,
:class:`AttributeError` or :class:`ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

from elastic_ckpt.core.chunks import Box, boxed
from elastic_ckpt.core.metadata import ITEMSIZE, TensorMetadata
from elastic_ckpt.core.strided import Shape

#: Boxes that a tensor is cut into at most, where it is cut across its rows.
_MOST_BOXES = 1 << 20


@dataclass(frozen=True)
class BoxedTensor:
    """A tensor whose elements are in boxes that tile it, each contiguous in a file."""

    shape: Shape
    dtype: str
    boxes: tuple[Box, ...]  # those with elements

    @classmethod
    def of(cls, tensor: TensorMetadata) -> BoxedTensor:
        """A saved tensor that is whole in one file."""
        start = (0,) * len(tensor.shape)
        boxes = (Box(start, tensor.shape, each.file, each.byte_offset) for each in tensor.chunks)
        return cls(tensor.shape, tensor.dtype, tuple(boxes))

    def metadata(self, name: str, key: str) -> TensorMetadata:
        """The tensor under a name, as a checkpoint has it."""
        source = boxed(self.shape, ITEMSIZE[self.dtype], self.boxes)
        return TensorMetadata(name, key, self.shape, self.dtype, (source,))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = _FUNCTIONS.get(function.__name__)
        return NotImplemented if made is None else made(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> BoxedTensor:
        return self

    def squeeze(self, dim: int) -> BoxedTensor:
        if self.shape[dim] != 1:
            return self
        dim %= len(self.shape)
        return self._mapped(lambda sizes: (*sizes[:dim], *sizes[dim + 1 :]))

    def unsqueeze(self, dim: int) -> BoxedTensor:
        return self._mapped(
            lambda sizes: (*sizes[:dim], 1, *sizes[dim:]), lambda starts: (*starts[:dim], 0, *starts[dim:])
        )

    def reshape(self, *shape: int) -> BoxedTensor:
        """Another shape of a tensor that is one box; one size may be -1."""
        known = math.prod(size for size in shape if size != -1)
        whole = tuple(math.prod(self.shape) // known if size == -1 and known else size for size in shape)
        if math.prod(whole) != math.prod(self.shape) or any(box.sizes != self.shape for box in self.boxes):
            raise ValueError(f"shape {self.shape} as {shape}")
        return self._mapped(lambda _: whole, lambda _: (0,) * len(whole))

    def narrow(self, dim: int, start: int, length: int) -> BoxedTensor:
        """The elements ``[start, start + length)`` of a dimension."""
        itemsize = ITEMSIZE[self.dtype]
        found = list[Box]()
        for box in self.boxes:
            low = max(box.offsets[dim], start)
            width = min(box.offsets[dim] + box.sizes[dim], start + length) - low
            if width <= 0:
                continue
            inner = math.prod(box.sizes[dim + 1 :]) * itemsize
            rows = math.prod(box.sizes[:dim])
            if width == box.sizes[dim]:
                found.append(replace(box, offsets=(*box.offsets[:dim], low - start, *box.offsets[dim + 1 :])))
                continue
            if len(found) + rows > _MOST_BOXES:
                raise ValueError(f"a tensor that is cut into more than {_MOST_BOXES} rows")
            sizes = (*(1,) * dim, width, *box.sizes[dim + 1 :])
            for row, index in enumerate(product(*map(range, box.sizes[:dim]))):
                before = map(sum, zip(box.offsets[:dim], index, strict=True))
                offsets = (*before, low - start, *box.offsets[dim + 1 :])
                skipped = row * box.sizes[dim] + low - box.offsets[dim]
                found.append(Box(offsets, sizes, box.file, box.byte_offset + skipped * inner))
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return BoxedTensor(shape, self.dtype, tuple(found))

    def _mapped(self, sizes: Callable[[Shape], Shape], offsets: Callable[[Shape], Shape] | None = None) -> BoxedTensor:
        """The tensor with other dimensions; ``offsets`` of boxes change as sizes do unless given."""
        boxes = (replace(box, sizes=sizes(box.sizes), offsets=(offsets or sizes)(box.offsets)) for box in self.boxes)
        return BoxedTensor(sizes(self.shape), self.dtype, tuple(boxes))


def _cat(tensors: Sequence[BoxedTensor], dim: int = 0) -> BoxedTensor:
    first = tensors[0]
    dim %= len(first.shape)
    others = {(*each.shape[:dim], 0, *each.shape[dim + 1 :], each.dtype) for each in tensors}
    if len(others) > 1:
        raise ValueError(f"tensors of other shapes or dtypes to concatenate: {sorted(map(str, others))}")
    boxes: list[Box] = []
    ends = list(accumulate((each.shape[dim] for each in tensors), initial=0))
    for each, start in zip(tensors, ends, strict=False):
        for box in each.boxes:
            offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
            boxes.append(replace(box, offsets=offsets))
    return BoxedTensor((*first.shape[:dim], ends[-1], *first.shape[dim + 1 :]), first.dtype, tuple(boxes))


def _stack(tensors: Sequence[BoxedTensor], dim: int = 0) -> BoxedTensor:
    dim %= len(tensors[0].shape) + 1
    return _cat([each.unsqueeze(dim) for each in tensors], dim)


def _split(tensor: BoxedTensor, size: int | Sequence[int], dim: int = 0) -> tuple[BoxedTensor, ...]:
    dim = dim % len(tensor.shape)
    whole = tensor.shape[dim]
    sizes = [min(size, whole - at) for at in range(0, whole, size)] if isinstance(size, int) else list(size)
    if sum(sizes) != whole:
        raise ValueError(f"{sizes} of dimension {dim} of shape {tensor.shape}")
    return tuple(tensor.narrow(dim, at, size) for at, size in zip(accumulate(sizes, initial=0), sizes, strict=False))


def _chunk(tensor: BoxedTensor, chunks: int, dim: int = 0) -> tuple[BoxedTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"cat": _cat, "stack": _stack, "split": _split, "chunk": _chunk}

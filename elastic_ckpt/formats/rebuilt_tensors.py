"""Makes tensors that are no view of one storage, of parts that are real and were checked when they were read.

Source: ``torch/_utils.py``. What torch leaves unchecked, because it trusts the file, is checked here: indices of sparse
tensors, and places in the buffer of nested ones, are addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ckpt.formats.torch_archive.tensors import CHANGED, META, NESTED, PARAMETER, QUANTIZED, SPARSE

if TYPE_CHECKING:
    import torch


def make_wrapper(cls: Any, dtype: Any, size: Any, stride: Any, offset: int, layout: Any, grad: bool) -> torch.Tensor:
    """A tensor of a class of the user's, without elements, on the CPU."""
    import torch  # noqa: PLC0415  whoever resumes has it; who only looks need not

    options = {"dtype": dtype, "storage_offset": offset, "layout": layout, "device": "cpu", "requires_grad": grad}
    return torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, **options)


def _parameter(data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    import torch  # noqa: PLC0415

    return torch.nn.Parameter(data, requires_grad)


def _sparse(layout: Any, *parts: Any) -> torch.Tensor:
    """Indices and values, a size, and of COO whether the indices are unique and sorted."""
    import torch  # noqa: PLC0415

    if layout is not torch.sparse_coo:
        return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True)
    is_coalesced = parts[3] if len(parts) > 3 else None
    return torch.sparse_coo_tensor(*parts[:3], is_coalesced=is_coalesced, check_invariants=True)


def _quantized(storage: Any, offset: int, size: Any, stride: Any, grad: bool, *params: Any) -> torch.Tensor:
    import torch  # noqa: PLC0415

    hooks: Any = OrderedDict()
    return torch._utils._rebuild_qtensor(storage, offset, size, stride, tuple(params), grad, hooks)


def _changed(tensor: torch.Tensor, metadata: Sequence[str]) -> torch.Tensor:
    """With the bits that say that elements are the conjugates, or the negatives, of the bytes."""
    import torch  # noqa: PLC0415

    torch._utils.set_tensor_metadata(tensor, dict.fromkeys(metadata, True))
    return tensor


def _meta(*parts: Any) -> torch.Tensor:
    import torch  # noqa: PLC0415

    return torch._utils._rebuild_meta_tensor_no_storage(*parts)


def _nested(buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Views of a buffer: a row of sizes and strides, and an offset, for each."""
    import torch  # noqa: PLC0415

    integers = sizes.dtype == strides.dtype == offsets.dtype == torch.int64
    if not integers or buffer.dim() != 1 or sizes.dim() != 2 or strides.shape != sizes.shape or offsets.dim() != 1:
        raise ValueError("a nested tensor whose parts do not belong together")
    if not buffer.is_contiguous() or len(offsets) != len(sizes):
        raise ValueError("a nested tensor whose parts do not belong together")
    for shape, steps, first in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        end = first + 1 + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
        if min(first, *shape, *steps) < 0 or (0 not in shape and end > buffer.numel()):
            raise ValueError(f"a nested tensor that reaches to element {end} of {buffer.numel()}")
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


#: By the name of the function with which torch has them rebuilt.
REBUILT: dict[str, Callable[..., torch.Tensor]] = {
    PARAMETER: _parameter,
    SPARSE: _sparse,
    QUANTIZED: _quantized,
    CHANGED: _changed,
    META: _meta,
    NESTED: _nested,
}

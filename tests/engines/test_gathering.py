"""Which persistent parameters of ZeRO-3 are gathered together after a load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from elastic_ckpt.engines.zero3 import _gathering_buckets


def param(numel: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    return SimpleNamespace(ds_numel=numel, ds_tensor=torch.empty(0, dtype=dtype), **more)


def test_small_ones_travel_together_and_each_dtype_by_itself() -> None:
    million = 1 << 20
    sizes = [3 * million, 4 * million, 2 * million, 9 * million, 1, 1]
    params = [param(size) for size in sizes] + [param(5, torch.float32)]
    found = [[each.ds_numel for each in bucket] for bucket in _gathering_buckets(params)]
    assert found == [[3 * million, 4 * million], [2 * million], [9 * million], [1, 1], [5]]


def test_what_would_come_back_changed_or_not_at_all_is_left_to_deepspeed() -> None:
    quantized = param(7)
    quantized.ds_tensor.ds_quant_scale = torch.ones(1)
    rounded = param(8, torch.float32, comm_dtype=torch.bfloat16)
    kept = param(9)
    assert list(_gathering_buckets([quantized, rounded, param(0), kept])) == [[kept]]
    assert list(_gathering_buckets([rounded])) == []

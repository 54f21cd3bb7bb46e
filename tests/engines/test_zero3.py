"""ZeRO-3: which persistent parameters are gathered together after a load, and the parts of a plan on NVMe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan, RequantizeItem, TargetTensor
from elastic_ckpt.engines import zero
from elastic_ckpt.engines.compat import swaps_to_nvme
from elastic_ckpt.engines.zero import Zero3Adapter, _gathering_buckets, refuse_unwritable
from elastic_ckpt.errors import UnsupportedError


def param(numel: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    return SimpleNamespace(ds_numel=numel, ds_tensor=torch.empty(0, dtype=dtype), **{"ds_process_group": None, **more})


def test_small_ones_travel_together_and_each_dtype_by_itself() -> None:
    million = 1 << 20
    sizes = [3 * million, 4 * million, 2 * million, 9 * million, 1, 1]
    params = [param(size) for size in sizes] + [param(5, torch.float32)]
    found = [[each.ds_numel for each in bucket] for bucket in _gathering_buckets(params)]
    assert found == [[3 * million, 4 * million], [2 * million], [9 * million], [1, 1], [5]]


def test_those_of_different_process_groups_do_not_travel_together() -> None:
    """Experts of AutoEP are partitioned over fewer ranks than the others."""
    params = [param(1, ds_process_group=group) for group in ("all", "some", "all")]
    assert list(_gathering_buckets(params)) == [[params[0], params[2]], [params[1]]]


def test_what_would_come_back_changed_or_not_at_all_is_left_to_deepspeed() -> None:
    quantized = param(7)
    quantized.ds_tensor.ds_quant_scale = torch.ones(1)
    rounded = param(8, torch.float32, comm_dtype=torch.bfloat16)
    kept = param(9)
    assert list(_gathering_buckets([quantized, rounded, param(0), kept])) == [[kept]]
    assert list(_gathering_buckets([rounded])) == []


class Persistent:
    """A parameter that is never partitioned."""

    ds_secondary_tensor: Any = "old values"
    gathered: Any = None

    def all_gather_coalesced(self, params: list[Any]) -> Any:
        for each in params:
            each.gathered = "with others"
        return SimpleNamespace(wait=lambda: None)

    def all_gather(self, params: list[Any]) -> None:
        for each in params:
            each.gathered = "by DeepSpeed" if each.gathered is None else each.gathered


def test_deepspeed_gathers_what_did_not_travel_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an optimizer as with one; no test model has parameters that do not travel together."""
    params = [Persistent(), Persistent(), Persistent()]
    monkeypatch.setattr(zero, "_gathering_buckets", lambda persistent: [[each] for each in persistent[1:2]])
    adapter = Zero3Adapter.__new__(Zero3Adapter)
    adapter.param_names, adapter.masters, adapter.optimizer = dict.fromkeys(params, ""), (), None
    adapter._swaps = False
    adapter._offload = SimpleNamespace(persistent_parameters=params)
    adapter.refresh_weights(LoadPlan(ReadPlan((), (), ())), exact_masters=False)
    assert [each.gathered for each in params] == ["by DeepSpeed", "with others", "by DeepSpeed"]
    assert [each.ds_secondary_tensor for each in params] == [None, None, None]
    adapter._offload.persistent_parameters = []
    adapter.refresh_weights(LoadPlan(ReadPlan((), (), ())), exact_masters=False)


def test_on_nvme_a_plan_without_buffers_is_executed_once() -> None:
    item = RequantizeItem(0, 0, 4, None, -1, 0, ())
    plan = LoadPlan(ReadPlan((), (TargetTensor(MASTER, 0, "", 4, "float32"),), (), (item,)))
    adapter = Zero3Adapter.__new__(Zero3Adapter)
    adapter.masters, adapter._swaps = [torch.ones(4)], True
    adapter._offload = SimpleNamespace(partition_all_parameters=lambda: None)
    adapter.optimizer = SimpleNamespace(
        dtype=torch.float32,
        _swappable_optimizer_subgroup=lambda index: False,
        _reassign_or_swap_out_partitioned_parameters=lambda index: None,
    )
    parts: list[tuple[int, int]] = []
    kept: dict[int, torch.Tensor] = {}
    for part, tensors in adapter.fill(plan, kept):
        parts.append((len(part.requantize_items), len(tensors)))
    assert kept == {}
    assert parts == [(1, 1)]


def test_what_no_test_could_run_on_nvme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.19.6")
    with pytest.raises(UnsupportedError, match=r"found: +DeepSpeed 0\.19\.6"):
        swaps_to_nvme(SimpleNamespace(optimizer=SimpleNamespace(params_in_nvme_and_cpu=True)))
    assert not swaps_to_nvme(SimpleNamespace(optimizer=SimpleNamespace(swap_optimizer=False)))


QUANTIZED = SimpleNamespace(ds_tensor=SimpleNamespace(ds_quant_scale=torch.ones(1)))
SWAPPED = SimpleNamespace(ds_tensor=SimpleNamespace(status=zero.PartitionedParamStatus.NOT_AVAILABLE))
ON_NVME = SimpleNamespace(ds_tensor=SimpleNamespace(final_location=zero.OffloadDeviceEnum.nvme))
IN_MEMORY = SimpleNamespace(ds_tensor=SimpleNamespace(status=zero.PartitionedParamStatus.AVAILABLE))


@pytest.mark.parametrize(
    ("param", "trains", "words"),
    [
        (QUANTIZED, True, "its scales are not in the checkpoint"),
        (SWAPPED, True, "cannot be written to NVMe"),
        (ON_NVME, False, "cannot be written to NVMe"),
    ],
)
def test_frozen_parameters_that_cannot_be_written_are_refused_by_name(param: Any, trains: bool, words: str) -> None:
    refuse_unwritable({"a": IN_MEMORY, "whole": SimpleNamespace()}, trains)
    with pytest.raises(UnsupportedError, match=words) as caught:
        refuse_unwritable({"a": IN_MEMORY, "b": param}, trains)
    assert caught.value.parameter == "b"

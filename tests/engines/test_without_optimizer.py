"""ZeRO-3 engines without an optimizer, where no test model has what is tested: parameters that do not travel together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.engines import without_optimizer
from elastic_ckpt.engines.without_optimizer import PartitionedWeightsAdapter


class Persistent:
    """A parameter that is never partitioned."""

    gathered: Any = None

    def all_gather(self, params: list[Any]) -> None:
        for param in params:
            param.gathered = "by DeepSpeed" if param.gathered is None else param.gathered


def test_deepspeed_gathers_what_did_not_travel_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [Persistent(), Persistent(), Persistent()]

    def travel(names: Any, persistent: list[Persistent]) -> None:
        persistent[1].gathered = "with others"

    monkeypatch.setattr(without_optimizer, "gather_anew", travel)
    adapter = PartitionedWeightsAdapter.__new__(PartitionedWeightsAdapter)
    adapter.param_names = {}
    adapter._offload = SimpleNamespace(persistent_parameters=params)
    adapter.refresh_weights(ReadPlan((), (), ()), exact_masters=False)
    assert [param.gathered for param in params] == ["by DeepSpeed", "with others", "by DeepSpeed"]
    adapter._offload.persistent_parameters = []
    monkeypatch.setattr(without_optimizer, "gather_anew", lambda names, persistent: None)
    adapter.refresh_weights(ReadPlan((), (), ()), exact_masters=False)

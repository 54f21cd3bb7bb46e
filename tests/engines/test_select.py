"""Which adapter a live engine gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from elastic_ckpt.engines import zero
from elastic_ckpt.engines.compat import has_optimizer
from elastic_ckpt.engines.zero import Zero012Adapter, Zero3Adapter, select_adapter


def engine(optimizer: Any, stage: int) -> SimpleNamespace:
    return SimpleNamespace(
        optimizer=optimizer,
        has_moe_layers=False,
        module=torch.nn.Linear(2, 2),
        param_names={},
        seq_dp_world_size=1,
        seq_data_parallel_group=None,
        zero_optimization_stage=lambda: stage,
    )


@pytest.mark.parametrize(
    ("optimizer", "stage", "adapter"),
    [
        (None, 0, Zero012Adapter),
        (SimpleNamespace(optimizer=DummyOptim([])), 0, Zero012Adapter),  # as BF16_Optimizer has it
        (object.__new__(DeepSpeedZeRoOffload), 3, Zero3Adapter),
    ],
)
def test_an_engine_without_an_optimizer_takes_weights_alone(
    optimizer: Any, stage: int, adapter: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero, "refuse_missing", lambda *_: None)  # names that these stand-ins lack
    live = engine(optimizer, stage)
    assert not has_optimizer(live)
    assert type(select_adapter(live, with_states=False)) is adapter


def test_an_engine_with_an_optimizer_is_known_by_it() -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    assert has_optimizer(engine(plain, 0)) and has_optimizer(engine(SimpleNamespace(optimizer=plain), 1))

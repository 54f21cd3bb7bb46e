"""The stacked experts of a live engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from elastic_ckpt.engines.coordinates import stacked_experts
from elastic_ckpt.errors import UnsupportedError


def engine(*records: Any, moe: bool = True) -> Any:
    """An engine whose parameters have these records of DeepSpeed's, or ``None``."""
    params = [SimpleNamespace(ds_autoep_uc_meta=record) for record in records]
    names = SimpleNamespace(items=lambda: [(param, f"w{number}") for number, param in enumerate(params)])
    return SimpleNamespace(has_moe_layers=moe, module=nn.Linear(1, 1), param_names=names)


def test_experts_are_those_of_deepspeeds_record_in_its_order() -> None:
    assert stacked_experts(engine(None, {"local_experts": [3, 0]})) == {"w1": (3, 0)}
    assert stacked_experts(engine({"local_experts": [0]}, moe=False)) == {}


def test_experts_without_a_record_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)does not record which rank holds.*0\.19\.8"):
        stacked_experts(engine(None, None))

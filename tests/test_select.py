"""Which live engines no adapter fits, and what the error says of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_ckpt.engines.select import select_adapter
from elastic_ckpt.errors import UnsupportedError


def test_an_engine_without_an_optimizer_is_called_that() -> None:
    engine = SimpleNamespace(optimizer=None, has_moe_layers=False, zero_optimization_stage=lambda: 0)
    with pytest.raises(UnsupportedError, match="made without an optimizer") as caught:
        select_adapter(engine, with_states=False)
    assert "give deepspeed.initialize an optimizer" in str(caught.value)

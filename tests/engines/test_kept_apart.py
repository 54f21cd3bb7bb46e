"""What is known of optimizers that CUDA alone has, and of those that keep nothing apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.superoffload import superoffload_stage3

from elastic_ckpt.engines.kept_apart import kept_apart, refuse_kept_apart, steps_on_accelerator
from elastic_ckpt.errors import UnsupportedError


def engine_with(optimizer: Any, **more: Any) -> Any:
    return SimpleNamespace(optimizer=optimizer, **more)


def split(ratio: float, *devices: str) -> Any:
    """What a partly offloaded optimizer says of itself."""
    found = {"offload_optimizer": True, "partial_offload": ratio, "subgroup_to_device": dict(enumerate(devices))}
    return SimpleNamespace(**found)


def test_superoffload_is_refused_by_its_class() -> None:
    """Which cannot be made without CUDA."""
    kind = superoffload_stage3.SuperOffloadOptimizer_Stage3
    with pytest.raises(UnsupportedError, match="SuperOffload") as raised:
        refuse_kept_apart(engine_with(kind.__new__(kind)))
    assert "super_offload" in str(raised.value)


@pytest.mark.parametrize(
    ("optimizer", "is_split"),
    [
        (split(0.5, "cuda", "cpu"), True),
        (split(0.5, "cpu", "cpu"), False),
        (split(1.0, "cpu", "cpu"), False),
        (SimpleNamespace(offload_optimizer=False, partial_offload=0.5), False),
        (SimpleNamespace(), False),
    ],
)
def test_a_second_optimizer_is_one_that_updates_something(optimizer: Any, is_split: bool) -> None:
    assert steps_on_accelerator(optimizer) == is_split
    assert (kept_apart(engine_with(optimizer)) is not None) == is_split


def test_what_is_offloaded_now_and_zenflow_are_named() -> None:
    for engine, words in (
        (engine_with(SimpleNamespace(offloaded_states={"hp_params"})), "reload_states"),
        (engine_with(SimpleNamespace(), zenflow=True), "zenflow"),
    ):
        found = kept_apart(engine)
        assert found is not None and words in found.remedy
    assert kept_apart(engine_with(None, zenflow=False)) is None

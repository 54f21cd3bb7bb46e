"""Which entries of quantized weights are live memory, of the kinds of weight that bitsandbytes has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_ckpt.core.quantized_weights import described_weights
from elastic_ckpt.engines.quantization import quantization_entries

#: Entries of each kind of weight -> whether writing to them changes the weight's values.
OF_FOUR = {"absmax": True, "quant_map": True, "quant_state.bitsandbytes__nf4": False}
OF_DOUBLE = {**OF_FOUR, "nested_absmax": True, "nested_quant_map": False}


@pytest.mark.parametrize("double", [False, True])
def test_scales_are_live_memory_and_packed_states_are_not(double: bool) -> None:
    quantized = pytest.importorskip("bitsandbytes").nn
    model = nn.ModuleDict()
    model["four"] = quantized.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=double)
    model["eight"] = quantized.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    model.to("cpu")
    saved = model.state_dict(keep_vars=True)
    weights = dict(model.named_parameters())
    described = described_weights(saved.keys() - weights.keys(), weights.keys())
    entries, in_memory = quantization_entries(model, described, saved)
    expected = {f"four.weight.{name}": is_live for name, is_live in (OF_DOUBLE if double else OF_FOUR).items()}
    expected |= {"eight.SCB": True, "eight.weight_format": False}
    assert {entry.name: entry.crc32 is None for entry in entries} == expected
    assert in_memory.keys() == {name for name, is_live in expected.items() if is_live}
    inputs = torch.ones(1, 64)
    before = {name: model[name](inputs) for name in ("four", "eight")}
    for name in ("four.weight.nested_absmax" if double else "four.weight.absmax", "eight.SCB"):
        in_memory[name].mul_(2)
    for name, outputs in before.items():
        assert not torch.allclose(model[name](inputs), outputs), "what was written is what the module computes with"


def test_memory_that_weights_share_is_compared_and_not_written() -> None:
    """What one weight is given would change the other."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.map = torch.arange(16.0)

        def state_dict(self, **more: bool) -> dict[str, torch.Tensor]:  # type: ignore[override]
            found = super().state_dict(**more)
            return {**found, "a.weight.quant_map": self.map, "b.weight.quant_map": self.map, "b.SCB": torch.ones(2)}

    model = Shared()
    saved = model.state_dict(keep_vars=True)
    described = {"a.weight.quant_map": "a.weight", "b.weight.quant_map": "b.weight", "b.SCB": "b.weight"}
    entries, in_memory = quantization_entries(model, described, saved)
    assert in_memory == {} and all(entry.crc32 is not None for entry in entries)
    crc32s = {entry.name: entry.crc32 for entry in entries}
    assert crc32s["a.weight.quant_map"] == crc32s["b.weight.quant_map"] != crc32s["b.SCB"]


def test_a_model_without_such_entries_is_asked_for_no_second_state_dict() -> None:
    class Once(nn.Linear):
        def state_dict(self, **more: bool) -> dict[str, torch.Tensor]:  # type: ignore[override]
            raise AssertionError("a second state dict")

    assert quantization_entries(Once(2, 2), {}, {}) == ((), {})

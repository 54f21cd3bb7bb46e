"""Which weight an entry of a state dict describes, by the names that bitsandbytes gives."""

from __future__ import annotations

import pytest
from torch import nn

from elastic_ckpt.core.quantized_weights import described_weights, weight_of


@pytest.mark.parametrize("double", [False, True])
def test_every_entry_that_bitsandbytes_adds_is_of_its_weight(double: bool) -> None:
    quantized = pytest.importorskip("bitsandbytes").nn
    model = nn.ModuleDict()
    model["four"] = quantized.Linear4bit(64, 64, bias=True, quant_type="nf4", compress_statistics=double)
    model["deep"] = nn.ModuleDict({"eight": quantized.Linear8bitLt(64, 64, bias=True, has_fp16_weights=False)})
    model.to("cpu")
    weights = dict(model.named_parameters())
    added = model.state_dict().keys() - weights.keys()
    found = described_weights(added, weights.keys())
    assert found.keys() == added
    assert {found[entry] for entry in added} == {"four.weight", "deep.eight.weight"}
    assert all(entry.startswith(weight.removesuffix("weight")) for entry, weight in found.items())


@pytest.mark.parametrize("name", ["a.weight", "absmax", "SCB", "a.quant_states.x", "quant_state", "a.kernel", ""])
def test_other_entries_describe_nothing(name: str) -> None:
    assert weight_of(name) is None
    assert described_weights([name], ["a.weight", "a", ""]) == {}

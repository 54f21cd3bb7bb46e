"""Entries that describe a quantized weight: restored, left out and compared with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.core.local_state import LocalState, QuantizationEntry
from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata
from elastic_ckpt.errors import MismatchError, UnsupportedError
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.simulation import live, names_of, saved

WEIGHT, SCALE, PACKED = "base.weight", "base.weight.absmax", "base.weight.quant_state.bitsandbytes__nf4"
CRC32 = 7
OF_WEIGHT = {(WEIGHT, FROZEN): ((8, 1), "uint8")}
OF_ENTRIES = {(SCALE, FROZEN): ((2,), "float32"), (PACKED, FROZEN): ((5,), "uint8")}


def checkpoint(wholes: dict[Any, Any], **more: Any) -> CheckpointMetadata:
    metadata = saved({"lora": (2, 5)}, wholes=wholes)
    return replace(metadata, **{"crc32s": {PACKED: (CRC32,)}, **more})


def engine(crc32: int = CRC32, shape: tuple[int, ...] = (5,)) -> LocalState:
    """An engine with a quantized weight, whose scale can be written."""
    own = live({"lora": (2, 5)}, wholes={**OF_WEIGHT, (SCALE, BUFFER): ((2,), "float32")})
    entries = (
        QuantizationEntry(SCALE, WEIGHT, "float32", (2,)),
        QuantizationEntry(PACKED, WEIGHT, "uint8", shape, crc32),
    )
    return replace(own, quantization=entries, others=frozenset({SCALE, PACKED}))


@pytest.mark.parametrize("strict", [True, False])
def test_scales_are_restored_with_their_weight(strict: bool) -> None:
    plan = plan_load(checkpoint({**OF_WEIGHT, **OF_ENTRIES}), engine(), LoadOptions(strict=strict))
    assert names_of(plan, FROZEN, "restored") == (WEIGHT,)
    assert names_of(plan, BUFFER, "restored") == (SCALE,)
    assert {target.name for target in plan.reads.targets} == {"", WEIGHT, SCALE}
    assert not [each for each in plan.outcomes if each.what == "ignored"]


@pytest.mark.parametrize("strict", [True, False])
def test_entries_are_left_out_with_their_weight(strict: bool) -> None:
    metadata = checkpoint(OF_ENTRIES)
    metadata = replace(metadata, source=replace(metadata.source, frozen_recorded=False))
    plan = plan_load(metadata, engine(crc32=CRC32 + 1), LoadOptions(strict=strict))
    assert {target.name for target in plan.reads.targets} == {""}
    assert names_of(plan, FROZEN, "fresh") == (WEIGHT,)
    assert names_of(plan, FROZEN, "ignored") == (SCALE, PACKED)


DIFFERENT = {
    "other values": (engine(crc32=CRC32 + 1), OF_ENTRIES, PACKED),
    "another shape": (engine(shape=(5, 1)), OF_ENTRIES, PACKED),
    "an entry that the live weight lacks": (
        engine(),
        {**OF_ENTRIES, ("base.weight.nested_absmax", FROZEN): ((1,), "float32")},
        "base.weight.nested_absmax",
    ),
    "no scale": (engine(), {(PACKED, FROZEN): ((5,), "uint8")}, SCALE),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("strict", [True, False])
def test_a_weight_that_was_quantized_otherwise_is_refused_by_name(case: str, strict: bool) -> None:
    own, entries, name = DIFFERENT[case]
    with pytest.raises(MismatchError, match="quantized in another way") as raised:
        plan_load(checkpoint({**OF_WEIGHT, **entries}), own, LoadOptions(strict=strict))
    assert name in str(raised.value) and "quant_type, block size" in str(raised.value)


def test_what_has_no_checksum_cannot_be_compared() -> None:
    with pytest.raises(UnsupportedError, match="no checksum") as raised:
        plan_load(checkpoint({**OF_WEIGHT, **OF_ENTRIES}, crc32s={}), engine(), LoadOptions())
    assert "exclude_frozen_parameters=True" in str(raised.value)

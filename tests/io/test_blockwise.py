"""Block-wise 8-bit codes, against every code tried by hand in float64, with bitsandbytes' own maps."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io import staging
from elastic_ckpt.io.staging import decode
from tests.quantization import own_maps

#: Rounding of a few fp32 operations, as a fraction of a scale.
ROUNDING = 1e-6
#: The negative end of bitsandbytes' signed map.
NEGATIVE_END = 0.99297

pytest.importorskip("bitsandbytes")

SIGNED, UNSIGNED = own_maps()["qmap1"], own_maps()["qmap2"]
both_maps = pytest.mark.parametrize("codebook", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
#: 16 codes below zero, 239 above, in steps of one size: a map unlike bitsandbytes' own.
LOPSIDED = Codebook(tuple(number / 239 for number in range(-16, 240)))


def nearest(
    values: NDArray[np.float32], scales: NDArray[np.float32], codebook: Codebook
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """The nearest code of each value, its distance as a fraction of the scale, and whether it is far from a tie."""
    stood_for = np.array(codebook.values, dtype=np.float64) * scales.astype(np.float64)[:, None, None]
    away = np.abs(stood_for - values.astype(np.float64)[:, :, None])
    away /= np.where(scales > 0, scales.astype(np.float64), 1.0)[:, None, None]
    ranked = np.sort(away, axis=2)
    return away.argmin(axis=2), ranked[:, :, 0], ranked[:, :, 1] - ranked[:, :, 0] > ROUNDING


def smallest_scales(values: NDArray[np.float32], codebook: Codebook) -> NDArray[np.float64]:
    """The least scale of each block that maps no value beyond an end of the map."""
    above = np.maximum(values.astype(np.float64).max(axis=1), 0.0)
    below = np.maximum(-values.astype(np.float64).min(axis=1), 0.0)
    return np.maximum(above, below / -codebook.values[0]) if codebook.values[0] else above


class Encoded(NamedTuple):
    codes: torch.Tensor
    scales: torch.Tensor
    worst_error: float


def encode(values: torch.Tensor, codebook: Codebook) -> Encoded:
    return Encoded(*staging.encode(values, codebook))


def check(values: NDArray[np.float32], codebook: Codebook) -> None:
    """Encode whole blocks, and compare with the oracle, element by element."""
    encoded = encode(torch.from_numpy(values), codebook)
    codes, scales = encoded.codes.numpy(), encoded.scales.numpy()
    assert (codes.dtype, scales.dtype, codes.shape) == (np.uint8, np.float32, values.shape)
    np.testing.assert_allclose(scales, smallest_scales(values, codebook), rtol=ROUNDING, atol=0)
    best, distance, clear = nearest(values, scales, codebook)
    np.testing.assert_array_equal(codes[clear & (scales > 0)[:, None]], best[clear & (scales > 0)[:, None]])
    assert distance.max() <= codebook.bound + ROUNDING
    each = np.repeat(scales, values.shape[1])
    decoded = decode(encoded.codes.flatten(), torch.from_numpy(each), codebook).numpy()
    expected = np.array(codebook.values, dtype=np.float32)[codes.flatten()] * each
    assert decoded.tobytes() == expected.tobytes(), "decoding is not table times scale in fp32"
    change = np.abs(decoded.astype(np.float64) - values.flatten()) / np.where(each > 0, each, 1.0)
    assert change.max() <= codebook.bound + ROUNDING
    assert encoded.worst_error == pytest.approx(change.max(), abs=ROUNDING)
    assert change.max() == pytest.approx(distance.max(), abs=ROUNDING)


# --- the map ----------------------------------------------------------------------------------------------------


def test_bitsandbytes_own_maps_are_usable_and_known() -> None:
    assert set(own_maps()) == {"qmap1", "qmap2"}
    assert (SIGNED.problem, UNSIGNED.problem, LOPSIDED.problem) == (None, None, None)
    assert (SIGNED.zero, UNSIGNED.zero, LOPSIDED.zero) == (127, 0, 16)
    assert (SIGNED.signed, UNSIGNED.signed, LOPSIDED.signed) == (True, False, True)
    assert SIGNED.values[0] == pytest.approx(-NEGATIVE_END, abs=1e-5)
    assert SIGNED.values[SIGNED.zero] == UNSIGNED.values[UNSIGNED.zero] == 0.0


def test_the_bound_is_half_the_widest_gap() -> None:
    assert SIGNED.bound == pytest.approx(0.9 / 128, rel=1e-4)
    assert UNSIGNED.bound == pytest.approx(0.9 / 256, rel=1e-4)
    assert LOPSIDED.bound == pytest.approx(1 / 478)


def changed(codebook: Codebook, **at: float) -> Codebook:
    values = list(codebook.values)
    for place, value in at.items():
        values[int(place[1:])] = value
    return Codebook(tuple(values))


@pytest.mark.parametrize(
    ("codebook", "problem"),
    [
        (Codebook(()), "0 values instead of 256"),
        (Codebook(SIGNED.values[1:]), "255 values instead of 256"),
        (Codebook((*SIGNED.values, 2.0)), "257 values instead of 256"),
        (changed(SIGNED, _7=float("nan")), "values that are not finite"),
        (changed(SIGNED, _255=float("inf")), "values that are not finite"),
        (changed(SIGNED, _0=float("-inf")), "values that are not finite"),
        (changed(SIGNED, _200=SIGNED.values[199]), "values that do not ascend"),
        (changed(SIGNED, _1=SIGNED.values[3]), "values that do not ascend"),
        (changed(SIGNED, _255=-1.0), "values that do not ascend"),
        (Codebook((0.0,) * 256), "values that do not ascend"),
        (changed(SIGNED, _255=1.5), f"values from {SIGNED.values[0]} to 1.5"),
        (changed(SIGNED, _255=0.9999), f"values from {SIGNED.values[0]} to 0.9999"),
        (changed(SIGNED, _0=-1.001), "values from -1.001 to 1.0"),
        (Codebook(tuple((number + 1) / 256 for number in range(256))), f"values from {1 / 256} to 1.0"),
        (changed(SIGNED, _127=SIGNED.values[128] / 2), "no code for zero"),
    ],
)
def test_a_map_that_cannot_be_used_says_why(codebook: Codebook, problem: str) -> None:
    assert codebook.problem == problem


def test_a_map_may_end_at_minus_one_and_may_begin_at_zero() -> None:
    assert changed(SIGNED, _0=-1.0).problem is None
    assert Codebook(tuple(number / 255 for number in range(256))).problem is None


@pytest.mark.parametrize(("numel", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_the_last_block_of_a_row_may_be_short(numel: int, blocks: int) -> None:
    assert BlockFormat(256, "absmax1", SIGNED).blocks(numel) == blocks


# --- decode and encode ------------------------------------------------------------------------------------------


@both_maps
def test_every_code_decodes_to_its_value_times_the_scale(codebook: Codebook) -> None:
    scales = np.float32([1.0, 0.1, 3.4e38, 1e-30, 1e-42, 0.0])
    codes = np.tile(np.arange(256, dtype=np.uint8), len(scales))
    each = np.repeat(scales, 256)
    decoded = decode(torch.from_numpy(codes), torch.from_numpy(each), codebook).numpy()
    assert decoded.tobytes() == (np.float32(codebook.values)[codes] * each).tobytes()


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([SIGNED, UNSIGNED, LOPSIDED]),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(-30, 30),
    st.sampled_from([0.0, 1.0, 4.0]),
)
def test_any_block_is_encoded_to_the_nearest_codes(
    seed: int, codebook: Codebook, blocks: int, numel: int, exponent: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=(blocks, numel)) * 10.0 ** (exponent + spread * random.normal(size=(blocks, numel)))
    values[random.random((blocks, numel)) < 0.1] = 0.0
    values[np.abs(values).max(axis=1) < 1e-36] = 0.0  # whole blocks of subnormal numbers: see below
    values = np.clip(values, -1e36, 1e36).astype(np.float32)
    check(values if codebook.signed else np.abs(values), codebook)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(-300, 300), st.data())
def test_values_around_the_midpoints_go_to_the_nearer_side(side: int, ulps: int, data: st.DataObject) -> None:
    codebook = data.draw(st.sampled_from([SIGNED, UNSIGNED, LOPSIDED]))
    scale = np.float32(data.draw(st.sampled_from([1.0, 0.3, 7e5, 2e-20])))
    table = np.array(codebook.values)
    middles = ((table[1:] + table[:-1]) / 2 * (1 + ulps * side * 2.0**-23)).astype(np.float32) * scale
    check(np.concatenate([[scale], middles]).astype(np.float32)[None], codebook)


@both_maps
def test_the_bound_is_nearly_reached_and_never_passed(codebook: Codebook) -> None:
    low = int(np.argmax(np.diff(codebook.values)))
    middle = (codebook.values[low] + codebook.values[low + 1]) / 2
    for scale in (1.0, 1e-20, 1e20):
        encoded = encode(torch.tensor([[scale, middle * scale, 0.0]]), codebook)
        assert 0.9999 * codebook.bound <= encoded.worst_error <= codebook.bound + ROUNDING


def test_the_worst_error_is_that_of_the_worst_block() -> None:
    low = int(np.argmax(np.diff(SIGNED.values)))
    middle = (SIGNED.values[low] + SIGNED.values[low + 1]) / 2
    for values in ([[1.0, 0.0], [1.0, middle], [1.0, 0.0]], [[8.0, 8.0 * middle], [0.0, 0.0], [1.0, 0.0]]):
        assert encode(torch.tensor(values), SIGNED).worst_error == pytest.approx(SIGNED.bound, rel=1e-4)


@both_maps
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_has_scale_zero_and_codes_for_zero(codebook: Codebook, zero: float) -> None:
    encoded = encode(torch.tensor([[zero] * 5, [1.0] * 5, [zero] * 5]), codebook)
    assert encoded.scales.tolist() == [0.0, 1.0, 0.0]
    assert encoded.codes.tolist() == [[codebook.zero] * 5, [255] * 5, [codebook.zero] * 5]
    assert encoded.worst_error == 0.0


@both_maps
@pytest.mark.parametrize("value", [1.0, 0.37, 3e38, 1e-38])
def test_a_block_of_one_element_is_exact(codebook: Codebook, value: float) -> None:
    encoded = encode(torch.tensor([[value]]), codebook)
    assert encoded.codes.tolist() == [[255]]
    assert encoded.scales.tolist() == torch.tensor([value]).tolist()
    assert encoded.worst_error == 0.0


def test_no_blocks_at_all_are_encoded_to_nothing() -> None:
    encoded = encode(torch.empty(0, 4), SIGNED)
    assert (encoded.codes.shape, encoded.scales.shape, encoded.worst_error) == ((0, 4), (0,), 0.0)


@pytest.mark.parametrize("value", [-1.0, -0.37, -1e30, -1e-30])
@pytest.mark.parametrize("codebook", [SIGNED, LOPSIDED], ids=["bitsandbytes", "lopsided"])
def test_a_negative_extreme_is_put_at_the_negative_end_of_the_map(codebook: Codebook, value: float) -> None:
    encoded = encode(torch.tensor([[value, -value / 32, 0.0]]), codebook)
    assert encoded.codes[0, 0] == 0
    assert encoded.scales.item() == pytest.approx(-value / -codebook.values[0], rel=ROUNDING)
    decoded = decode(encoded.codes[0], encoded.scales.expand(3), codebook)
    assert decoded[0].item() == pytest.approx(value, rel=ROUNDING)


def test_between_both_ends_the_scale_is_that_of_the_further_one() -> None:
    values = [[1.0, -0.99], [0.99, -1.0], [1.0, -0.9935], [0.5, -2.0]]
    scales = encode(torch.tensor(values), SIGNED).scales.tolist()
    expected = [1.0, 1.0 / NEGATIVE_END, 0.9935 / NEGATIVE_END, 2.0 / NEGATIVE_END]
    assert scales == pytest.approx(expected, rel=1e-5)
    check(np.float32(values), SIGNED)


@both_maps
def test_blocks_do_not_see_each_other(codebook: Codebook) -> None:
    random = np.random.default_rng(0)
    values = torch.from_numpy(np.abs(random.normal(size=(7, 16))) * 10.0 ** random.integers(-9, 9, (7, 1))).float()
    together = encode(values, codebook)
    alone = [encode(values[number : number + 1], codebook) for number in range(7)]
    assert torch.equal(together.codes, torch.cat([each.codes for each in alone]))
    assert torch.equal(together.scales, torch.cat([each.scales for each in alone]))
    assert together.worst_error == max(each.worst_error for each in alone)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([SIGNED, UNSIGNED, LOPSIDED]),
    st.integers(1, 30),
    st.floats(2.0**-100, 2.0**100, width=32),
    st.booleans(),
)
def test_codes_that_hold_the_extreme_of_their_block_come_back(
    seed: int, codebook: Codebook, numel: int, scale: float, negative: bool
) -> None:
    codes = np.random.default_rng(seed).integers(1, 256, numel).astype(np.uint8)
    codes[seed % numel] = 0 if negative and codebook.signed else 255
    each = torch.full((numel,), scale, dtype=torch.float32)
    once = decode(torch.from_numpy(codes), each, codebook)
    again = encode(once[None], codebook)
    assert again.codes[0].numpy().tolist() == codes.tolist()
    assert again.scales.item() == pytest.approx(each[0].item(), rel=2**-22)
    if 0 not in codes or not codebook.signed:
        assert again.scales[0] == each[0]
        assert again.worst_error == 0.0


@pytest.mark.parametrize("units", [1, 2, 3, 50])
@both_maps
def test_the_smallest_numbers_there_are_survive(codebook: Codebook, units: int) -> None:
    least = np.float32(2.0**-149)
    values = np.arange(units + 1, dtype=np.float32)[None] * least
    encoded = encode(torch.from_numpy(values), codebook)
    decoded = decode(encoded.codes[0], encoded.scales.expand(units + 1), codebook)
    assert decoded.numpy().tolist() == values[0].tolist()


@pytest.mark.parametrize(("codebook", "units"), [(SIGNED, 100), (UNSIGNED, 150), (UNSIGNED, 5000)])
def test_a_block_that_has_decayed_to_subnormal_numbers_is_encoded(codebook: Codebook, units: int) -> None:
    # second moments of gradients near 1e-21 are such numbers; a code may be half a unit further off than the bound
    values = torch.arange(units + 1.0)[None] * 2.0**-149
    encoded = encode(values, codebook)
    decoded = decode(encoded.codes[0], encoded.scales.expand(units + 1), codebook)
    assert ((decoded - values[0]).abs().double() * 2.0**149).max() <= codebook.bound * units + 0.5 + 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@both_maps
def test_values_that_are_not_finite_are_refused(codebook: Codebook, bad: float) -> None:
    for block in range(3):
        for place in range(4):
            values = torch.ones(3, 4)
            values[block, place] = bad
            with pytest.raises(DamagedError, match="8-bit format cannot express") as caught:
                encode(values, codebook)
            assert "finite values" in str(caught.value.expected)


@pytest.mark.parametrize("bad", [-1.0, -1e-30, -(2.0**-149)])
def test_negative_values_are_refused_where_the_map_has_none(bad: float) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = bad
    with pytest.raises(DamagedError, match="8-bit format cannot express") as caught:
        encode(values, UNSIGNED)
    assert caught.value.expected == "finite values that are not negative"
    assert caught.value.found == f"{values[1, 2].item()} to 1.0"
    assert encode(values, SIGNED).scales.tolist() == pytest.approx([1.0, max(1.0, -bad / NEGATIVE_END), 1.0], rel=1e-5)


def test_two_maps_of_equal_values_are_one() -> None:
    equal = replace(SIGNED, values=tuple(value + 0 for value in SIGNED.values))
    assert equal == SIGNED
    assert hash(equal) == hash(SIGNED)
    assert SIGNED not in (UNSIGNED, LOPSIDED)

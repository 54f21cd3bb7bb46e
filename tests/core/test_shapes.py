"""Shapes as files claim them."""

from __future__ import annotations

import pytest

from elastic_ckpt.core.flat_ranges import checked_shape


@pytest.mark.parametrize("sizes", [(), (0,), [3, 4], (1,) * 64, ((1 << 62) - 1,)])
def test_what_a_tensor_can_have_passes(sizes: tuple[int, ...]) -> None:
    assert checked_shape(sizes) == tuple(sizes)


@pytest.mark.parametrize("sizes", [(1,) * 65, (1 << 62,), (-1,), (True,), (2.0,), ("3",), (10**4298,)])
def test_what_none_can_have_is_refused_by_name(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^layer\.weight has"):
        checked_shape(sizes, "layer.weight")

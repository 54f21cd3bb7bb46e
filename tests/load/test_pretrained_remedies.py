"""Ways out that a load of pretrained weights names: none that only a load of a checkpoint can follow, and one at least."""

from __future__ import annotations

import pytest

from elastic_ckpt.errors import (
    ANOTHER_TAG,
    AT_ITS_DTYPE,
    AT_ITS_TOPOLOGY,
    BY_DEEPSPEED,
    NOT_STRICT,
    WEIGHTS_ALONE,
    WITHOUT_STATES,
    DamagedError,
    MismatchError,
    Remedy,
    UnsupportedError,
)
from elastic_ckpt.load.pretrained_remedies import with_ways_for_weights

OF_CHECKPOINTS = (
    *(ANOTHER_TAG, AT_ITS_DTYPE, AT_ITS_TOPOLOGY, BY_DEEPSPEED),
    *(NOT_STRICT, WEIGHTS_ALONE, WITHOUT_STATES),
)
OF_WEIGHTS = (
    Remedy("build it otherwise"),
    Remedy("takes the first", config={"replicated_params": "first"}),
    Remedy("loads what matches", arguments={"strict": False}, function="load_pretrained"),
)


@pytest.mark.parametrize("first", OF_CHECKPOINTS, ids=str)
@pytest.mark.parametrize("kind", [DamagedError, MismatchError, UnsupportedError])
def test_ways_of_checkpoints_are_left_out_and_others_stay(
    kind: type[DamagedError | MismatchError | UnsupportedError], first: Remedy
) -> None:
    error = with_ways_for_weights(kind("wrong", "file", remedy=(first, *OF_WEIGHTS)))
    assert error.remedies == OF_WEIGHTS
    for file in ("file", None):
        alone = with_ways_for_weights(kind("wrong", file, remedy=first))
        assert alone.remedies and first not in alone.remedies


@pytest.mark.parametrize("kind", [DamagedError, MismatchError, UnsupportedError])
def test_an_error_without_any_way_gets_one(kind: type[DamagedError | MismatchError | UnsupportedError]) -> None:
    for file in ("file", None):
        text = str(with_ways_for_weights(kind("wrong", file)).remedy)
        assert text != "None" and "tag" not in text and "topology" not in text

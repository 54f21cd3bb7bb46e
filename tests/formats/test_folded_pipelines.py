"""Whether a ``DualPipeVModule`` may have saved a pipeline, whose ranks then have two stages each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.formats.model_shards import model


@pytest.mark.parametrize(
    ("version", "micro_batches", "may_be"),
    [
        ("0.19.8", 4, True),
        ("0.19.8", 3, False),
        ("0.19.8+fork", None, True),
        ("0.20", 4, True),
        ("0.19.7", 4, False),
        ("unknown", 4, True),
    ],
)
def test_a_version_or_the_number_of_micro_batches_rules_dualpipev_out(
    version: str, micro_batches: int | None, may_be: bool
) -> None:
    saved = replace(model(), ds_version=version, micro_batches=micro_batches)
    assert saved.may_be_folded(2) == may_be

"""Weighted pipeline stages on real ranks, built and trained by DeepSpeed."""

from __future__ import annotations

from tests.distributed.conftest import Launch

METHODS = {
    "type:embed:3|block:1|head:1": [0, 2, 6],
    "weighted_type:embed:1|block:1|head:4": [0, 4, 6],
}


def test_a_model_is_cut_by_weight_and_trains_as_before(launch: Launch) -> None:
    launch(2, "pipe_partition_jobs.partition", {"methods": METHODS, "refused": "type:decoder:1"})

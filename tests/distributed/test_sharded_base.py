"""A frozen base weight of which each rank holds another shard, while checkpoints below ZeRO-3 have one rank's."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.conftest import Launch
from tests.distributed.model import Setup


def test_a_base_that_ranks_share_out_is_refused_by_name_and_each_rank_keeps_its_own(
    launch: Launch, tmp_path: Path
) -> None:
    """Whole ones load, and so do checkpoints that leave the base out."""
    cases = [
        {
            "setup": Setup(stage, groups="one"),
            "folder": str(tmp_path / f"{stage}-{sharding}-{leaves_out}"),
            "sharding": sharding,
            "leaves_out": leaves_out,
        }
        for stage in (0, 1, 2)
        for sharding, leaves_out in ((2, False), (2, True), (1, False))
    ]
    found = launch(2, "sharded_base_jobs.save_and_load", cases)
    assert len(found) >= len(cases)
    for each in found:
        if each.case["sharding"] == 2 and not each.case["leaves_out"]:
            assert type(each.error).__name__ == "UnsupportedError", each
            assert each.error.parameter == "q_proj.weight" and "base_weight_sharding: 2" in each.error.found
            assert each.kept_base and not each.has_lora, "the engine is untouched"
        else:
            assert each.error is None and each.has_base and each.has_lora, each

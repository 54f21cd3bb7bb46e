"""Weighted pipeline stages on real ranks, built and trained by DeepSpeed."""

from __future__ import annotations

from tests.distributed.conftest import Launch

#: Bounds of the stages, and the modules of each; the last layer but one is a function.
METHODS = {
    "type:embed:3|block:1|head:1": ([0, 2, 6], [["Embed", "Block"], ["Block", "Block", "Head"]]),
    "type:embed:1|block:1|head:4": ([0, 4, 6], [["Embed", "Block", "Block", "Block"], ["Head"]]),
}


def test_a_model_is_partitioned_by_weight_and_trains_as_before(launch: Launch) -> None:
    facts = launch(2, "pipe_partition_jobs.partition", {"methods": list(METHODS), "refused": "type:decoder:1"})
    for found in facts:
        if hasattr(found, "method"):
            parts, layers = METHODS[found.method]
            assert found.parts == parts and found.layers == layers[found.stage]
            assert found.losses == found.uniform_losses
        else:
            assert found.refused.startswith("ConfigError") and "decoder" in found.refused
            assert not found.is_wrapped, "uninstalled, and still there"
    assert len(facts) == 2 * (len(METHODS) + 1)

"""Weighted pipeline stages on real ranks, built and trained by DeepSpeed."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import Cell, cells

#: Bounds of the stages, and the modules of each; the last layer but one is a function.
METHODS = {
    "type:embed:3|block:1|head:1": ([0, 2, 6], [["Embed", "Block"], ["Block", "Block", "Head"]]),
    "type:embed:1|block:1|head:4": ([0, 4, 6], [["Embed", "Block", "Block", "Block"], ["Head"]]),
}
#: Where every test must fail, stages are as even as can be.
UNIFORM = (None, {"method": "uniform"})


@cells(
    [
        Cell(method, None, "pipe_partition_jobs.partition", 2, {"method": method}, expected=expected, fits=UNIFORM)
        for method, expected in METHODS.items()
    ]
)
def test_a_model_is_partitioned_by_weight_and_trains_as_before(cell: Cell, facts: list[Any]) -> None:
    parts, layers = cell.expected
    for stage, found in enumerate(facts):
        assert found.parts == parts and found.layers == layers[stage]
        assert found.losses == found.uniform_losses
        assert not found.is_wrapped, "uninstalled, and still there"
    assert len(facts) == cell.ranks


@cells([Cell("decoder", None, "pipe_partition_jobs.refuse", 2, {"method": "type:decoder:1"}, fits=UNIFORM)])
def test_a_weight_of_a_class_that_no_layer_has_is_refused(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.error.startswith("ConfigError") and "decoder" in found.error
        assert not found.is_wrapped, "uninstalled, and still there"
    assert len(facts) == cell.ranks

"""Are counters and optimizer states of the same step?

A job that dies while it overwrites a tag leaves model-states files of one step beside optimizer shards of another.
With ZeRO-1/2 the weights saved beside the masters tell (:mod:`elastic_ckpt.formats.spot_check`); with ZeRO-3 nothing
but the step counts does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic_ckpt.core.metadata import CheckpointMetadata, SavedParameter
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.zero0_index import PLAIN

_ONE_MORE = (
    "optimizer states are one step ahead of the counters, as after a phase without ZeRO in fp16 or bf16, whose "
    "optimizer steps once when it is built"
)


def with_progress_compared(metadata: CheckpointMetadata, model: ModelShard, check_shards: bool) -> CheckpointMetadata:
    """The metadata, with a note where counters and optimizer states differ; with ZeRO-3 that is an error.

    Raises:
        DamagedError: they differ in a checkpoint of ZeRO-3, and ``check_shards`` is set.
    """
    refuse = check_shards and metadata.source.zero_stage == 3
    dummy = model.optimizer is not None and model.optimizer.kind != PLAIN
    notes = compare_progress(metadata.parameters, model.counters, model.path, refuse, dummy)
    return replace(metadata, notes=metadata.notes + notes)


def compare_progress(
    parameters: Mapping[str, SavedParameter],
    counters: Mapping[str, Any],
    file: str,
    refuse: bool,
    model_counts_more: bool = False,
) -> tuple[str, ...]:
    """Compare the optimizer's ``step`` with ``global_steps - skipped_steps``.

    Args:
        parameters: the saved parameters, with their scalar states.
        counters: counters of the model-states file.
        file: that file, for the error.
        refuse: whether a difference is an error; if not, it is a note for the report.
        model_counts_more: whether one step more than the counters say is no difference at all.

    Raises:
        DamagedError: they differ, and ``refuse`` is set.
    """
    steps = {value for saved in parameters.values() for key, value in saved.scalars if key == "step"}
    expected = int(counters["global_steps"]) - int(counters["skipped_steps"])
    if not steps or steps == {expected}:
        return ()
    if steps == {expected + 1}:
        # FP16_Optimizer and FP16_UnfusedOptimizer step once, on zero gradients, when they are built
        return () if model_counts_more else (_ONE_MORE,)
    found = ", ".join(f"{step:g}" for step in sorted(steps))
    if not refuse:
        return (f"optimizer states are at step {found}, counters at {expected}: as after a reset of the optimizer",)
    raise DamagedError(
        "optimizer states and counters are of different steps: files of two saves may be mixed in this folder",
        file=file,
        expected=f"optimizer step {expected}, from global_steps and skipped_steps",
        found=f"optimizer step {found}",
        remedy=(
            "take another tag; if the optimizer was reset during the run, which explains it: "
            '"elastic_checkpoint": {"check_shards": false}'
        ),
    )

"""Does the resumed run cut its data as the saved one did? Local, changes nothing."""

from __future__ import annotations

from typing import Any

from elastic_ckpt.core.training_state import BatchSizes
from elastic_ckpt.errors import MismatchError


def compare_batches(engine: Any, saved: BatchSizes, refuse: bool) -> tuple[str, ...]:
    """Compare batch sizes of the checkpoint with those of the live engine.

    Args:
        engine: the live engine.
        saved: batch sizes of the run that saved the checkpoint.
        refuse: whether a change is an error.

    Returns:
        A warning for each change that matters: the global batch, and the micro-batches in a step.

    Raises:
        MismatchError: something changed, and ``refuse`` is set.
    """
    live = BatchSizes(
        engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    )
    changes = []
    if saved.global_batch is not None and saved.global_batch != live.global_batch:
        changes.append(
            f"the global batch was {saved.global_batch} samples and is {live.global_batch} now: steps and learning "
            "rate no longer mean the same"
        )
    if saved.accumulation_steps is not None and saved.accumulation_steps != live.accumulation_steps:
        changes.append(
            f"a step was {saved.accumulation_steps} micro-batches of {saved.micro_batch} samples a rank and is "
            f"{live.accumulation_steps} of {live.micro_batch} now"
        )
    if changes and refuse:
        raise MismatchError(
            "; ".join(changes),
            expected=_shown(saved) + ", as in the checkpoint",
            found=_shown(live) + " in the live engine",
            remedy=(
                'set "train_batch_size" and "gradient_accumulation_steps" to fit the number of ranks, or '
                '"elastic_checkpoint": {"on_batch_size_change": "warn"}'
            ),
        )
    return tuple(changes)


def _shown(sizes: BatchSizes) -> str:
    return (
        f'"train_batch_size": {sizes.global_batch}, "train_micro_batch_size_per_gpu": {sizes.micro_batch}, '
        f'"gradient_accumulation_steps": {sizes.accumulation_steps}'
    )

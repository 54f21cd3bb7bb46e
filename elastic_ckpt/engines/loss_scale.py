"""The fp16 loss scale of a live engine. Local.

The partitioned optimizers keep a ``LossScaler`` or ``DynamicLossScaler`` object, the others a ``LossScaleConfig``
(loss_scaler.py); both have the same numbers inside.
"""

from __future__ import annotations

import copy
from typing import Any

from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.core.training_state import LossScale, TrainingState

_ROLE = "loss scale"


def set_loss_scale(engine: Any, host: TrainingState, wanted: bool) -> list[Outcome]:
    """Restore the loss scaler, where checkpoint and config have one of the same kind.

    Args:
        engine: the live engine; its optimizer's loss scaler and overflow flag are set.
        host: what the checkpoint holds.
        wanted: whether it was asked for.

    Returns:
        What became of it; empty where neither side trains in fp16.
    """
    optimizer, saved = engine.optimizer, host.loss_scale
    live = _live_scaler(engine)
    if not wanted:
        return [] if saved is None else [Outcome(_ROLE, "skipped", (), "not asked for")]
    if hasattr(optimizer, "overflow"):
        optimizer.overflow = host.overflow
    if saved is None and live is None:
        return []
    if saved is None:
        return [
            Outcome(_ROLE, "fresh", (), f"the checkpoint was not trained in fp16; the config's {_kind(live)} scale")
        ]
    if live is None:
        return [Outcome(_ROLE, "ignored", (), f"the live engine does not train in fp16; saved: {_shown(saved)}")]
    if saved.kind != _kind(live):
        reason = (
            f"the checkpoint has a {_shown(saved)}, the config a {_kind(live)} one of {live.cur_scale:g}, which counts"
        )
        return [Outcome(_ROLE, "fresh", (), reason)]
    for key, value in saved.values.items():
        if hasattr(live, key):
            setattr(live, key, copy.deepcopy(value))
    return [Outcome(_ROLE, "restored", (), _shown(saved))]


def warn_of_unscaled_gradients(engine: Any, host: TrainingState, saved_zero_stage: int) -> tuple[str, ...]:
    """A warning where a load crosses into or out of fp16 without ZeRO, whose Adam moments have another unit.

    In DeepSpeed 0.19 ``engine.backward`` scales the loss for ``ZeROOptimizer`` only, but the step of
    ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer`` divides gradients by the scale all the same.
    """
    saved = host.loss_scale is not None and saved_zero_stage == 0
    live = engine.fp16_enabled() and engine.zero_optimization_stage() == 0
    if saved == live:
        return ()
    return (
        "DeepSpeed's fp16 without ZeRO divides gradients by a loss scale that it never multiplied the loss with: "
        f"{'the saved' if saved else 'the live'} run's gradients, and its Adam moments, are that much smaller than "
        f"{'the live' if saved else 'the saved'} run's; both are restored exactly, but they do not fit together",
    )


def _live_scaler(engine: Any) -> Any:
    """The object that scales the loss; ``None`` where the engine does not train in fp16."""
    if not engine.fp16_enabled():
        return None
    config = getattr(engine.optimizer, "loss_scale_config", None)
    return config if config is not None else getattr(engine.optimizer, "loss_scaler", None)


def _kind(live: Any) -> str:
    return "dynamic" if getattr(live, "dynamic_loss_scale", False) or getattr(live, "dynamic", False) else "static"


def _shown(saved: LossScale) -> str:
    return f"{saved.kind} scale of {saved.values['cur_scale']:g}"

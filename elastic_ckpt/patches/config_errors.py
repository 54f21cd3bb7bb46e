"""Options of elastic_ckpt in the wrong place of a DeepSpeed config, which DeepSpeed refuses without a hint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig

from elastic_ckpt.config import refuse_misplaced
from elastic_ckpt.patches import unwrap, wrap


def watch_config() -> None:
    """Watch for configs that DeepSpeed refuses. Idempotent."""
    wrap(DeepSpeedConfig, "__init__", _init)


def unwatch_config() -> None:
    """Undo :func:`watch_config`."""
    unwrap(DeepSpeedConfig, "__init__")


def _init(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(config, *args, **kwargs)
    except ValueError:  # of pydantic, too
        values = getattr(config, "_param_dict", None)
        if isinstance(values, Mapping):
            refuse_misplaced(values)
        raise

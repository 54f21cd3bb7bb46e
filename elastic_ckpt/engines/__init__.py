"""Live engines: which adapter fits, and the engine's own state beside its optimizer.

Private attributes of a live engine are touched here and in :mod:`elastic_ckpt.patches` alone; their names are those of
DeepSpeed 0.19, and ``tests/test_deepspeed_privates.py`` lists them.
"""

from __future__ import annotations

from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.select import select_adapter

__all__ = ["EngineAdapter", "select_adapter"]

"""Live engines: adapters, and the engine's state besides its optimizer.

Only this package and :mod:`elastic_ckpt.patches` use private attributes of DeepSpeed. Their names are those of 0.19,
listed in ``tests/test_deepspeed_privates.py``.
"""

from __future__ import annotations

from elastic_ckpt.engines.adapter import EngineAdapter
from elastic_ckpt.engines.select import select_adapter

__all__ = ["EngineAdapter", "select_adapter"]

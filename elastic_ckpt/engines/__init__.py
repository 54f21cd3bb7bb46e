"""Live engines: which adapter fits, and the engine's own state beside its optimizer.

This package and :mod:`elastic_ckpt.formats` are the only places that touch private attributes of DeepSpeed.
"""

from __future__ import annotations

from elastic_ckpt.engines.base import EngineAdapter
from elastic_ckpt.engines.select import select_adapter

__all__ = ["EngineAdapter", "select_adapter"]

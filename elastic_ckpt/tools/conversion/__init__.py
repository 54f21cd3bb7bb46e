"""Conversion of native checkpoints to DeepSpeed's universal format."""

from __future__ import annotations

from elastic_ckpt.tools.conversion.run import ConversionReport, convert

__all__ = ["ConversionReport", "convert"]

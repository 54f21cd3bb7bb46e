"""What the metadata of a checkpoint shows, without a live engine."""

from __future__ import annotations

from elastic_ckpt.tools.inspection.facts import Inspection
from elastic_ckpt.tools.inspection.look import inspect_checkpoint, inspect_folder

__all__ = ["Inspection", "inspect_checkpoint", "inspect_folder"]

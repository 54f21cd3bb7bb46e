"""What the metadata of a checkpoint tells, without a live engine."""

from __future__ import annotations

from elastic_ckpt.tools.inspection.facts import FileEntry, Inspection, ParameterEntry, SavedRun
from elastic_ckpt.tools.inspection.look import inspect_checkpoint, inspect_folder

__all__ = [
    "FileEntry",
    "Inspection",
    "ParameterEntry",
    "SavedRun",
    "inspect_checkpoint",
    "inspect_folder",
]

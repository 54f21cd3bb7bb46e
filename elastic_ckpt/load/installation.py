"""``install`` and ``uninstall``: the patch of DeepSpeed, behind a check of versions that imports nothing of it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from elastic_ckpt.engines import versions


def install() -> None:
    """Make every DeepSpeed engine of this process load checkpoints of any topology.

    Call it once, before or after ``deepspeed.initialize`` (before it, if ``"align_partitions"`` is set); idempotent.
    ``PipelineEngine`` inherits the patched method. Of versions that were not tried, it warns.

    Raises:
        UnsupportedError: torch, DeepSpeed or Python is too old, or an untried DeepSpeed lacks a name that is patched.
    """
    _check_versions()
    _hook().patch_engine()


def uninstall() -> None:
    """Undo :func:`install`, unless another wrapper is around the patch."""
    _hook().unpatch_engine()


def _hook() -> Any:
    importlib.import_module("deepspeed")  # may itself install: see elastic_ckpt.load.startup
    return importlib.import_module("elastic_ckpt.load.hook")


@cache
def _check_versions() -> None:
    versions.refuse_older()
    versions.warn_of_newer()

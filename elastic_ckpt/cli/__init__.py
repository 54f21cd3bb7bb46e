"""The command line: look at a checkpoint, plan its load, verify, convert and compare it, without a GPU."""

from __future__ import annotations

from elastic_ckpt.cli.app import app

__all__ = ["app"]

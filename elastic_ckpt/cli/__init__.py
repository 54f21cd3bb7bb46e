"""The command line: inspect, verify, convert and compare checkpoints, and plan loads, without a GPU."""

from __future__ import annotations

from elastic_ckpt.cli.app import app

__all__ = ["app"]

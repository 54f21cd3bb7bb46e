"""Verification that a checkpoint is complete, of one save and undamaged; lists all problems."""

from __future__ import annotations

from elastic_ckpt.tools.verification.run import Verification, verify

__all__ = ["Verification", "verify"]

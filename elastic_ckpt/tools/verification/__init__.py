"""Whether a checkpoint is whole, of one save, and undamaged: everything that is wrong with it is listed."""

from __future__ import annotations

from elastic_ckpt.tools.verification.run import Verification, verify

__all__ = ["Verification", "verify"]

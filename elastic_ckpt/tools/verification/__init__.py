"""Is a checkpoint whole, of one save, and undamaged? Looks at all of it, and lists everything that is wrong."""

from __future__ import annotations

from elastic_ckpt.tools.verification.findings import Finding, Verification
from elastic_ckpt.tools.verification.run import verify

__all__ = ["Finding", "Verification", "verify"]

"""Jobs that do not run: what their ranks would hold, and what they would read. Pure."""

from __future__ import annotations

from elastic_ckpt.tools.virtual.job import Topology, VirtualJob

__all__ = ["Topology", "VirtualJob"]

"""Virtual jobs: what the ranks of a topology would have and read, without running. Pure."""

from __future__ import annotations

from elastic_ckpt.tools.virtual.job import Topology, VirtualJob

__all__ = ["Topology", "VirtualJob"]

"""The versions that elastic_ckpt was tried on, and what is known of single ones.

Nothing here imports torch or DeepSpeed.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import Version

from elastic_ckpt.engines.tried import CELLS, RELEASES
from elastic_ckpt.errors import UnsupportedError

logger = logging.getLogger(__name__)


class Requirement(NamedTuple):
    """A range of versions that were tried, of ``name``, as people write it; of ``2.4``, every 2.4.x is in it."""

    name: str
    oldest: str
    newest: str

    @property
    def found(self) -> str | None:
        """The installed version, if any."""
        try:
            return platform.python_version() if self.name == "Python" else version(self.name)
        except PackageNotFoundError:
            return None

    def __str__(self) -> str:
        return f"{self.name} {self.oldest} to {self.newest}"

    def compare(self, found: str) -> int:
        """-1 if a version is older than the range, 1 if it is newer, else 0."""
        oldest, newest = Version(self.oldest).release, Version(self.newest).release
        release = Version(found).release
        return -1 if release[: len(oldest)] < oldest else int(release[: len(newest)] > newest)

    def was_tried(self, found: str) -> bool:
        """Whether a version is in the range and, of DeepSpeed, a release that was tried."""
        return self.compare(found) == 0 and (self.name != "DeepSpeed" or cells_of(found) is not None)


#: What ``launch/matrix.sh`` runs with ``--all`` and ``--releases``, and docs/versions.md shows.
REQUIREMENTS = (
    Requirement("Python", "3.10", "3.13"),
    Requirement("torch", "2.4", "2.15"),
    Requirement("DeepSpeed", "0.14.5", "0.19.8"),
)


#: What DeepSpeed itself does wrong, for those who save, convert or resume: the first and the last version, and what.
KNOWN_BUGS = (
    (
        "0.17.6",
        "0.17.6",
        "bf16 without ZeRO, and in ZeRO-1 with fp32 gradients, is saved without optimizer states: resume its weights",
    ),
    ("0.17.6", "0.17.6", "bf16 without ZeRO never clears gradients, which add up over steps"),
    ("0.18.9", "0.18.9", "ZeRO-1 and 2 fail in engine.step() on gloo: call it under torch.no_grad()"),
    ("0.14.5", "0.17.6", "ds_to_universal.py fails on ZeRO-3 with several param groups"),
)


def known_bugs(deepspeed: str | None) -> list[str]:
    """Known bugs of a version of DeepSpeed."""
    found = Version(deepspeed or "0").release
    return [text for first, last, text in KNOWN_BUGS if Version(first).release <= found <= Version(last).release]


def refuse_older() -> None:
    """Refuse versions older than the range (:class:`UnsupportedError`), before anything of DeepSpeed is imported."""
    for requirement in REQUIREMENTS:
        found = requirement.found
        if found is None or requirement.compare(found) < 0:
            raise UnsupportedError(
                f"this version of {requirement.name} is too old for elastic_ckpt",
                expected=requirement,
                found=f"{requirement.name} {found or '(not installed)'}",
                remedy=f"install {requirement.name} {requirement.oldest} or newer",
            )


def cells_of(deepspeed: str) -> dict[str, bool] | None:
    """By name, the loads that were tried on a release of DeepSpeed, and whether they pass; ``None``: none was tried."""
    found = Version(deepspeed).release
    failed = next((failed for release, failed in RELEASES.items() if Version(release).release == found), None)
    return None if failed is None else {cell: cell not in failed for cell in CELLS}


def untried() -> list[str]:
    """Installed versions that were not tried: newer than the range, or of DeepSpeed no release in it."""
    pairs = [(requirement, requirement.found) for requirement in REQUIREMENTS]
    return [f"{each.name} {found}" for each, found in pairs if found is not None and not each.was_tried(found)]


def check_untried(missing: Sequence[str], missing_for_loads: Sequence[str]) -> None:
    """Warn (on rank 0) of versions that were not tried; refuse them if what ``install()`` patches is ``missing``."""
    found, tried = ", ".join(untried()), ", ".join(map(str, REQUIREMENTS))
    if missing:
        raise UnsupportedError(
            f"private names of DeepSpeed that elastic_ckpt needs are missing or have changed: {'; '.join(missing)}",
            expected=tried,
            found=found,
            remedy="install a version that was tried, or a newer elastic_ckpt",
        )
    if os.environ.get("RANK", "0") == "0":
        refused = f"loads that need these are refused: {'; '.join(missing_for_loads)}"
        which = refused if missing_for_loads else "all the private names that it needs are there"
        logger.warning("elastic_ckpt was not tried on %s, but on %s; %s", found, tried, which)

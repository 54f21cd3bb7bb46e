"""The versions that elastic_ckpt was tried on, and what is known of single ones.

Nothing here imports torch or DeepSpeed.
"""

from __future__ import annotations

import logging
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import Version

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


#: What ``launch/matrix.sh`` runs with ``--all`` and ``--releases``, and docs/versions.md shows.
REQUIREMENTS = (
    Requirement("Python", "3.10", "3.13"),
    Requirement("torch", "2.4", "2.15"),
    Requirement("DeepSpeed", "0.14.5", "0.19.8"),
)
#: What DeepSpeed itself does wrong, for those who save, convert or resume: the first and the last version, and what.
KNOWN_BUGS = (
    ("0.17.6", "0.17.6", "bf16 in ZeRO-0, and in ZeRO-1 with fp32 gradients, saves no states: resume its weights"),
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
            name, remedy = requirement.name, f"install {requirement.name} {requirement.oldest} or newer"
            problem, found = (
                f"this version of {name} is too old for elastic_ckpt",
                f"{name} {found or '(not installed)'}",
            )
            raise UnsupportedError(problem, expected=requirement, found=found, remedy=remedy)


def warn_of_newer() -> None:
    """Warn (on rank 0) of versions that are newer than the range."""
    found = [f"{each.name} {each.found}" for each in REQUIREMENTS if each.found and each.compare(each.found) > 0]
    if found and os.environ.get("RANK", "0") == "0":
        tried = ", ".join(map(str, REQUIREMENTS))
        text = "elastic_ckpt was not tried on %s, but on %s; loads that lack a private name of DeepSpeed are refused"
        logger.warning(text, ", ".join(found), tried)

"""Where the JSON files of the repository's ``configs/`` lie, that are part of the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def config_folder(kind: str) -> Path:
    """The folder of one kind of them (``"rules"``): installed, in the package; in a checkout, at the top."""
    installed = Path(str(resources.files("elastic_ckpt"))) / "configs" / kind
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs" / kind

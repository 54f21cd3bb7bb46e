"""Rules of well-known code bases, as JSON files: ``configs/rules`` of the repository."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.ready_configs import config_folder
from elastic_ckpt.rules.kinds import Rule


class Preset(BaseModel):
    """One file of rules; the first rule that applies to a parameter counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    rules: list[Rule]


def preset_names() -> list[str]:
    """Names of the presets there are."""
    return sorted(path.stem for path in config_folder("rules").glob("*.json"))


def load_preset(name: str) -> Preset:
    """A preset by name, or from a file of the user's own (a path that ends in ``.json``).

    Raises:
        ConfigError: there is none of this name, or the file is no preset.
    """
    path = Path(name) if name.endswith(".json") else config_folder("rules") / f"{name}.json"
    if not name.endswith(".json") and name not in preset_names():
        raise ConfigError(
            f'there is no preset "{name}"',
            expected=f"one of {', '.join(preset_names())}, or the path of a JSON file",
            found=name,
            remedy=f'"elastic_checkpoint": {{"tp_preset": "{preset_names()[0]}"}}',
        )
    try:
        return Preset(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise ConfigError(
            "this file of tensor-parallel rules cannot be read",
            file=str(path),
            expected='{"name": ..., "description": ..., "rules": [{"pattern": ..., "kind": ...}]}',
            found=str(error),
        ) from error

"""Rules of well-known code bases, as JSON files: ``configs/rules`` of the repository."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from elastic_ckpt.core.tp_rules import Rule
from elastic_ckpt.sharding.ready_configs import ReadyConfigs


class Preset(BaseModel):
    """One file of rules; the first rule that applies to a parameter counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    rules: list[Rule]


_PRESETS = ReadyConfigs(
    kind="rules",
    form=Preset,
    what="preset",
    unreadable="this file of tensor-parallel rules cannot be read",
    expected='{"name": ..., "description": ..., "rules": [{"pattern": ..., "kind": ...}]}',
    remedy='"elastic_checkpoint": {"tp_preset": "{name}"}',
)


def preset_names() -> list[str]:
    """Names of the presets there are."""
    return _PRESETS.names()


def load_preset(name: str) -> Preset:
    """A preset by name, or from a file of the user's own (a path that ends in ``.json``).

    Raises:
        ConfigError: there is none of this name, or the file is no preset.
    """
    return _PRESETS.load(name)

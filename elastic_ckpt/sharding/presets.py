"""JSON files of ``configs/``, which the package ships, and the user's own of the same form."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from elastic_ckpt.core.tp_rules import Rule
from elastic_ckpt.errors import ConfigError


class ReadyConfig(BaseModel):
    """One such file; a subclass defines the fields, folder and error texts of one kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    FOLDER: ClassVar[str]
    CALLED: ClassVar[str]
    UNREADABLE: ClassVar[str]
    EXPECTED: ClassVar[str]
    #: How to select one; ``{name}`` is replaced by its name.
    REMEDY: ClassVar[str]

    @classmethod
    def _folder(cls) -> Path:
        installed = Path(str(resources.files("elastic_ckpt"))) / "configs" / cls.FOLDER
        return installed if installed.is_dir() else Path(__file__).parents[2] / "configs" / cls.FOLDER

    @classmethod
    def names(cls) -> list[str]:
        """Names of the files that the package ships."""
        return sorted(path.stem for path in cls._folder().glob("*.json"))

    @classmethod
    def load(cls, name: str) -> Self:
        """Load a shipped file by name, or any by its ``.json`` path; :class:`ConfigError` if absent or malformed."""
        is_path, names = name.endswith(".json"), cls.names()
        if not is_path and name not in names:
            raise ConfigError(
                f'there is no {cls.CALLED} "{name}"',
                expected=f"one of {', '.join(names)}, or the path of a JSON file",
                found=name,
                remedy=cls.REMEDY.replace("{name}", names[0]) if names else None,
            )
        path = Path(name) if is_path else cls._folder() / f"{name}.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
            raise ConfigError(cls.UNREADABLE, file=str(path), expected=cls.EXPECTED, found=str(error)) from error


class Preset(ReadyConfig):
    """Tensor-parallel rules of a well-known code base; the first rule that applies to a parameter wins."""

    FOLDER = "rules"
    CALLED = "preset"
    UNREADABLE = "this file of tensor-parallel rules cannot be read"
    EXPECTED = '{"name": ..., "description": ..., "rules": [{"pattern": ..., "kind": ...}]}'
    REMEDY = '"elastic_checkpoint": {"tp_preset": "{name}"}'

    name: str
    description: str
    rules: list[Rule]

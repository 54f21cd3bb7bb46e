"""The JSON files of the repository's ``configs/`` that are part of the package, and the user's own of the same form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from elastic_ckpt.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


def config_folder(kind: str) -> Path:
    """The folder of one kind of them (``"rules"``): installed, in the package; in a checkout, at the top."""
    installed = Path(str(resources.files("elastic_ckpt"))) / "configs" / kind
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs" / kind


@dataclass(frozen=True)
class ReadyConfigs(Generic[T]):
    """One kind of such files.

    Attributes:
        kind: name of their folder.
        form: what one of them is.
        what: what one of them is called (``"preset"``).
        unreadable: the sentence that says that a file is none.
        expected: what a good file would say.
        remedy: how one is asked for; ``{name}`` stands for its name.
    """

    kind: str
    form: type[T]
    what: str
    unreadable: str
    expected: str
    remedy: str

    def names(self) -> list[str]:
        """Names of those there are."""
        return sorted(path.stem for path in config_folder(self.kind).glob("*.json"))

    def load(self, name: str) -> T:
        """One by name, or from a file of the user's own (a path that ends in ``.json``).

        Raises:
            ConfigError: there is none of this name, or the file is none.
        """
        is_path = name.endswith(".json")
        names = self.names()
        if not is_path and name not in names:
            raise ConfigError(
                f'there is no {self.what} "{name}"',
                expected=f"one of {', '.join(names)}, or the path of a JSON file",
                found=name,
                remedy=self.remedy.replace("{name}", names[0]) if names else None,
            )
        path = Path(name) if is_path else config_folder(self.kind) / f"{name}.json"
        try:
            return self.form(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, ValidationError) as error:
            raise ConfigError(self.unreadable, file=str(path), expected=self.expected, found=str(error)) from error

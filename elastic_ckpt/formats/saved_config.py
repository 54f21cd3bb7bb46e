"""The DeepSpeed config of the run that saved a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.formats.pickled import PickledFile


def saved_config(file: PickledFile) -> Mapping[str, Any] | None:
    """The config, which may have been saved as a dict, a JSON string or a path; ``None``: a path, or not saved."""
    return config_in(file.tree)


def config_in(tree: Any) -> Mapping[str, Any] | None:
    """The config among the entries of a model-states file; see :func:`saved_config`."""
    config = tree.get("ds_config") if isinstance(tree, Mapping) else None
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None  # a path on the machine that saved it: the config is unknown, not empty
    return config if isinstance(config, Mapping) else None


def config_section(file: PickledFile, key: str) -> Mapping[str, Any]:
    """One section of the config, as ``zero_optimization``; empty where it is not known."""
    section = (saved_config(file) or {}).get(key)
    return section if isinstance(section, Mapping) else {}

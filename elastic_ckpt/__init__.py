"""Elastic checkpoint loading for DeepSpeed: resume checkpoints on another number of ranks.

Names are imported on first use: importing the package loads neither torch nor deepspeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ckpt.config import ElasticConfig as ElasticConfig
    from elastic_ckpt.core.batches import batch_for as batch_for
    from elastic_ckpt.core.batches import compute_elastic_config as compute_elastic_config
    from elastic_ckpt.errors import ElasticCkptError as ElasticCkptError
    from elastic_ckpt.load.data_position import register as register
    from elastic_ckpt.load.installation import add_arguments as add_arguments
    from elastic_ckpt.load.installation import install as install
    from elastic_ckpt.load.installation import uninstall as uninstall
    from elastic_ckpt.load.pretrained import load_pretrained as load_pretrained
    from elastic_ckpt.load.replicate import replicate as replicate
    from elastic_ckpt.report import LoadReport as LoadReport
    from elastic_ckpt.tools.export import export as export
    from elastic_ckpt.tools.latest import find_latest as find_latest
    from elastic_ckpt.tools.logical import open as open

__version__ = "0.1.0"

_MODULES = {
    "ElasticCkptError": "elastic_ckpt.errors",
    "ElasticConfig": "elastic_ckpt.config",
    "LoadReport": "elastic_ckpt.report",
    "add_arguments": "elastic_ckpt.load.installation",
    "batch_for": "elastic_ckpt.core.batches",
    "compute_elastic_config": "elastic_ckpt.core.batches",
    "export": "elastic_ckpt.tools.export",
    "find_latest": "elastic_ckpt.tools.latest",
    "install": "elastic_ckpt.load.installation",
    "load_pretrained": "elastic_ckpt.load.pretrained",
    "open": "elastic_ckpt.tools.logical",
    "register": "elastic_ckpt.load.data_position",
    "replicate": "elastic_ckpt.load.replicate",
    "uninstall": "elastic_ckpt.load.installation",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("elastic_ckpt.data")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Elastic checkpoint loading for DeepSpeed: resume any checkpoint on any number of ranks."""

from __future__ import annotations

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.flags import add_arguments, with_arguments
from elastic_ckpt.hook import install, uninstall
from elastic_ckpt.report import LoadReport

__version__ = "0.1.0"

__all__ = [
    "ElasticCkptError",
    "ElasticConfig",
    "LoadReport",
    "add_arguments",
    "install",
    "uninstall",
    "with_arguments",
]

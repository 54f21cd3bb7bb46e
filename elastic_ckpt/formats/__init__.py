"""On-disk formats, each read into the form of :mod:`elastic_ckpt.core.metadata`."""

from __future__ import annotations

from types import MappingProxyType

from elastic_ckpt.formats.base import Checkpoint, FormatReader, Found, MetadataOptions
from elastic_ckpt.formats.dcp import read_dcp
from elastic_ckpt.formats.native import read_native
from elastic_ckpt.formats.safetensors import read_safetensors
from elastic_ckpt.formats.universal import read_universal

#: :attr:`Found.format` -> its reader.
READERS: MappingProxyType[str, FormatReader] = MappingProxyType(
    {"native": read_native, "universal": read_universal, "dcp": read_dcp, "safetensors": read_safetensors}
)

__all__ = ["READERS", "Checkpoint", "FormatReader", "Found", "MetadataOptions"]

"""On-disk formats, each read into the form of :mod:`elastic_ckpt.core.metadata`. Pure functions of a folder.

:func:`elastic_ckpt.load.metadata.read_checkpoint` lets all ranks of a job read one together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from elastic_ckpt.formats.base import Checkpoint, CheckpointInfo, FormatReader, MetadataOptions
from elastic_ckpt.formats.dcp import dcp_reading
from elastic_ckpt.formats.native import native_reading
from elastic_ckpt.formats.safetensors import read_safetensors
from elastic_ckpt.formats.universal import universal_reading

#: :attr:`CheckpointInfo.format` -> what reads it.
READERS: Mapping[str, FormatReader] = MappingProxyType(
    {
        "native": native_reading,
        "universal": universal_reading,
        "dcp": dcp_reading,
        "safetensors": lambda found, options, _: read_safetensors(found, options),
    }
)

__all__ = ["READERS", "Checkpoint", "CheckpointInfo", "MetadataOptions"]

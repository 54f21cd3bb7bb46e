"""On-disk formats, each read into the form of :mod:`elastic_ckpt.core.metadata`. Pure functions of a folder.

:func:`elastic_ckpt.load.metadata.read_checkpoint` lets all ranks of a job read one together.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from elastic_ckpt.formats.base import Checkpoint, CheckpointInfo, Format, FormatReader, MetadataOptions
from elastic_ckpt.formats.dcp import dcp_reading, read_contents
from elastic_ckpt.formats.native import native_reading, survey_native
from elastic_ckpt.formats.safetensors import read_safetensors
from elastic_ckpt.formats.universal import universal_reading
from elastic_ckpt.formats.universal_files import list_parameters

#: :attr:`CheckpointInfo.format` -> what reads it.
READERS: MappingProxyType[str, Format | FormatReader] = MappingProxyType(
    {
        "native": Format(native_reading, survey_native),
        "universal": Format(universal_reading, lambda found, options: partial(list_parameters, found)),
        "dcp": Format(dcp_reading, lambda found, options: partial(read_contents, found, options)),
        "safetensors": read_safetensors,
    }
)

__all__ = ["READERS", "Checkpoint", "CheckpointInfo", "Format", "FormatReader", "MetadataOptions"]

"""Reads the resume sheet of a checkpoint, which is untrusted."""

from __future__ import annotations

import os

from elastic_ckpt.core.resume_sheet import MOST_SHEET_NBYTES, SHEET, ResumeSheet
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.safetensors import parse_json
from elastic_ckpt.storage import exists, open_stream
from elastic_ckpt.storage.local import pinned


def read_sheet(folder: str) -> ResumeSheet | None:
    """The resume sheet in a tag's folder, ``None`` if there is none; :class:`DamagedError` if it cannot be read."""
    path = os.path.join(folder, SHEET)
    if not exists(path):
        return None
    try:
        with pinned(), open_stream(path) as stream:  # whoever saves it anew disturbs no load
            text = stream.read(MOST_SHEET_NBYTES + 1)
        if len(text) > MOST_SHEET_NBYTES:
            raise ValueError(f"more than {MOST_SHEET_NBYTES} bytes")
        return ResumeSheet.model_validate(parse_json(text))
    except (ValueError, OSError) as error:
        expected = "what save_checkpoint writes there with elastic_ckpt"
        found = f"{type(error).__name__}: {error}"[:300]
        raise DamagedError("the resume sheet cannot be read", path, expected, found, remedy="remove it") from error

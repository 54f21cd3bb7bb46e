"""Writes the resume sheet of a save, and compares that of a checkpoint with the live run. Neither can fail a job."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.config import read_config
from elastic_ckpt.core.resume_sheet import LOSSES, RNG, SHEET, compare_sheets, goes_on
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.run_facts import sheet_of
from elastic_ckpt.formats.sheet import read_sheet

logger = logging.getLogger(__name__)


def write_sheet(engine: Any, given: Mapping[str, Any]) -> None:
    """Write the sheet of a save that has ended, on rank 0, or warn; ``given``: arguments of ``save_checkpoint``. Local.

    Losses are those under ``"losses"`` in the client state.
    """
    if distributed.rank():
        return
    tag, client_state = given.get("tag"), given.get("client_state")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)  # as DeepSpeed has it
    path = os.path.join(given["save_dir"], tag, SHEET)
    partial = f"{path}.{secrets.token_hex(4)}"
    try:
        if not read_config(compat.ds_config(engine)).sheet:
            return
        losses = client_state.get("losses") if isinstance(client_state, Mapping) else None
        text = json.dumps(sheet_of(engine, losses).model_dump())
        try:
            with open(partial, "x", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(partial, path)
        finally:
            with suppress(OSError):  # it has its name
                os.unlink(partial)
    except Exception as error:  # what was saved is whole without it
        logger.warning("elastic_ckpt could not write the resume sheet %s: %s", path, error)


def compare_run(engine: Any, folder: str) -> tuple[str, tuple[str, ...]]:
    """In words, what of the run that saved a loaded checkpoint goes on, and what is another now. Local.

    Neither generators, which a load does not touch, nor losses, of which there are none yet.
    """
    try:
        saved = read_sheet(folder)
        if saved is None:
            return "", ()
        if saved.step != engine.global_steps:
            return "", (f"not compared: the resume sheet is one of step {saved.step}",)
        live = sheet_of(engine)
        found = [each for each in compare_sheets(saved, live) if each.component not in (RNG, LOSSES)]
        # no control characters of the file
        return goes_on(saved, live, found), tuple(str(each).encode("unicode_escape").decode() for each in found)
    except Exception as error:  # what was loaded is right without it
        logger.warning("elastic_ckpt could not compare the resume sheet of %s: %s", folder, error)
        return "", ()

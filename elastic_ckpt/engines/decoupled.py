"""Saves that a decoupled checkpoint engine still writes in the background.

``DecoupledCheckpointEngine`` and DataStates' engine commit a save at the next boundary ``step()``. Until then its files
are incomplete, ``latest`` names an older save, and its writers read live tensors, which a load overwrites.
"""

from __future__ import annotations

import os
from typing import Any

from elastic_ckpt import distributed
from elastic_ckpt.errors import DamagedError


def commit_pending_save(engine: Any) -> None:
    """Commit a save of this engine that is still being written, as the next step would. Collective.

    Raises :class:`DamagedError` on every rank if the process that writes it is no longer there.
    """
    writer = getattr(engine, "checkpoint_engine", None)
    if writer is None or not getattr(writer, "is_decoupled", bool)():  # DeepSpeed before 0.18 has no such method
        return

    def look() -> bool:
        if writer.commit_info is None:
            return False
        process = getattr(writer, "ckpt_process", None)
        if process is not None and not process.is_alive():
            info = writer.commit_info
            raise DamagedError(
                "the last save of this engine is incomplete: the process that wrote it in the background has died",
                file=os.path.join(info.save_dir, info.tag),
                expected="a process that writes until the save is committed",
                found=f"exit code {process.exitcode}",
                remedy="start the job again and load an older tag; the process's output says why it died",
            )
        return True

    if any(distributed.all_gather("look for a save that is still being written", look)):
        engine._commit_decoupled_checkpoint()
        if writer.commit_info is not None:  # DataStates' engine, whose get_commit_info() DeepSpeed does not define
            writer.commit(writer.commit_info)

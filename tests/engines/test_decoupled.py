"""Which saves in the background are committed before a load; real ones are in ``tests/distributed/test_writers.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, DataStatesCheckpointEngine, TorchCheckpointEngine

from elastic_ckpt.engines.compat import commit_pending_save
from elastic_ckpt.errors import DamagedError

INFO = CheckpointCommitInfo(tag="step4", save_dir="/ckpt", save_latest=True)


class DataStates(DataStatesCheckpointEngine):
    """DeepSpeed's own class, around a list of the waits instead of the library."""

    def __init__(self) -> None:
        self.commit_info = None
        self.waits: list[bool] = []
        self.ckpt_engine = SimpleNamespace(wait=lambda *, persist: self.waits.append(persist))


def engine_with(writer: Any) -> Any:
    return SimpleNamespace(checkpoint_engine=writer, _commit_decoupled_checkpoint=lambda: None)


@pytest.mark.parametrize(
    "engine", [None, SimpleNamespace(), engine_with(None), engine_with(object()), engine_with(TorchCheckpointEngine())]
)
def test_engines_that_write_at_once_have_nothing_pending(engine: Any) -> None:
    commit_pending_save(engine)


def test_a_save_by_datastates_is_committed() -> None:
    writer = DataStates()
    commit_pending_save(engine_with(writer))
    assert writer.waits == []
    writer.create(INFO)
    commit_pending_save(engine_with(writer))
    assert writer.waits == [True] and writer.commit_info is None


def test_a_save_whose_process_is_gone_is_refused() -> None:
    process = SimpleNamespace(is_alive=lambda: False, exitcode=-9)
    writer = SimpleNamespace(is_decoupled=lambda: True, commit_info=INFO, ckpt_process=process)
    with pytest.raises(DamagedError, match="the process that wrote it in the background has died") as refused:
        commit_pending_save(engine_with(writer))
    assert (refused.value.file, refused.value.found) == ("/ckpt/step4", "exit code -9")

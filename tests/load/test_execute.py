"""What the loader makes of what ranks tell each other at the end, and how it leaves the process."""

from __future__ import annotations

import gc

import pytest

from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.formats.pickled import collector_off
from elastic_ckpt.load.execute import _of_all_stages
from elastic_ckpt.report import RankWork

WORK = RankWork(rank=0, nbytes_read=0, nbytes_received=0, read_calls=0, files_opened=0, seconds={})


def test_the_report_is_of_all_pipeline_stages_in_their_order() -> None:
    def done(stage: int, *names: str) -> tuple[RankWork, int, tuple[Outcome, ...], None]:
        return WORK, stage, tuple(Outcome("fp32", "restored", (name,)) for name in names), None

    assert _of_all_stages([done(1, "c"), done(0, "a", "b"), done(1), done(0)]) == (
        Outcome("fp32", "restored", ("a", "b", "c")),
    )
    assert _of_all_stages([done(0), done(0)]) == ()


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects: bool) -> None:
    was_enabled = gc.isenabled()

    @collector_off()
    def load() -> None:
        assert not gc.isenabled()
        raise KeyError

    try:
        (gc.enable if collects else gc.disable)()
        for _ in range(2):
            with pytest.raises(KeyError):
                load()
            assert gc.isenabled() == collects
    finally:
        (gc.enable if was_enabled else gc.disable)()

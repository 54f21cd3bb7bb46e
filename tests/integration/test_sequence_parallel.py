"""Trainer and Accelerate with DeepSpeed's sequence parallelism (Ulysses, ALST): saved at one degree, resumed at another.

A Trainer has to be told ``ignore_data_skip``: with sequence parallelism Transformers 5.23 cannot skip the data that were
seen, whoever loads and on any device (``skip_first_batches`` asks DeepSpeed's ``UlyssesSPDataLoaderAdapter`` for its
``dataset``). Each micro-batch of these runs holds the same texts, so that losses can be compared nevertheless.
"""

from __future__ import annotations

import pytest

from tests.integration.comparing import assert_reported_once, assert_restored, assert_same_tensors, assert_trains_on
from tests.integration.conftest import Job, Run

SCRIPT = "trainer.py"
TO_RESUME = ("--ignore_data_skip", "--resume_from_checkpoint")
STAGES = ("2", "3")
#: Ranks, and how many of them share their samples.
TWO_PLAIN, TWO_SHARING, FOUR = (2, 1), (2, 2), (4, 2)


def job_of(run: Run, topology: tuple[int, int], stage: str, *arguments: str, elastic: bool = False) -> Job:
    ranks, sp = topology
    return run(ranks, SCRIPT, "--stage", stage, "--sp", str(sp), *arguments, elastic=elastic)


@pytest.fixture(scope="module")
def trained(run: Run) -> dict[tuple[tuple[int, int], str], Job]:
    """Jobs that train to the end and save halfway, by topology and stage."""
    return {(topology, stage): job_of(run, topology, stage) for topology in (FOUR, TWO_PLAIN) for stage in STAGES}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("saved", "now"),
    [(FOUR, TWO_PLAIN), (FOUR, TWO_SHARING), (TWO_PLAIN, FOUR)],
    ids=lambda topology: "{} ranks, SP={}".format(*topology),
)
def test_trainer_resumes_exactly_at_another_sequence_parallel_degree(
    saved: tuple[int, int],
    now: tuple[int, int],
    stage: str,
    trained: dict[tuple[tuple[int, int], str], Job],
    run: Run,
) -> None:
    before = trained[saved, stage]
    resumed = job_of(run, now, stage, *TO_RESUME, str(before.output / "checkpoint-3"), elastic=True)
    held, loaded = before.holds("saved-3"), resumed.holds("loaded")
    assert held["counters"] == (3, 3 * 12, 0), "12 samples in each step, whoever shares them"
    assert_restored(held, loaded)
    assert_reported_once(resumed, saved[0] // saved[1], now[0] // now[1], saved_sp=saved[1], now_sp=now[1])
    assert "global batch" not in loaded["report"], "the global batch is the same"
    assert_trains_on(before, resumed)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_topology_resumes_with_elastic_ckpt_as_without(
    stage: str, trained: dict[tuple[tuple[int, int], str], Job], run: Run
) -> None:
    before = trained[FOUR, stage]
    folder = str(before.output / "checkpoint-3")
    without, resumed = (job_of(run, FOUR, stage, *TO_RESUME, folder, elastic=elastic) for elastic in (False, True))
    assert without.holds("loaded")["report"] is None
    for job in (without, resumed):
        assert_restored(before.holds("saved-3"), job.holds("loaded"))
        assert_trains_on(before, job, rel=0)
    assert_reported_once(resumed, 2, 2, saved_sp=2, now_sp=2)
    for kind in ("masters", "weights", "states"):
        assert_same_tensors(without.holds("saved-6")[kind], resumed.holds("saved-6")[kind])


@pytest.mark.parametrize(("stage", "saved", "now"), [("2", FOUR, TWO_SHARING), ("3", TWO_PLAIN, FOUR)])
def test_load_state_restores_exactly_at_another_sequence_parallel_degree(
    stage: str, saved: tuple[int, int], now: tuple[int, int], run: Run
) -> None:
    script = "accelerate_loop.py"
    before = run(saved[0], script, "--stage", stage, "--sp", str(saved[1]))
    arguments = ("--stage", stage, "--sp", str(now[1]), "--resume_from", str(before.output / "step_3"))
    resumed = run(now[0], script, *arguments, "--elastic")
    assert_restored(before.holds("saved-3"), resumed.holds("loaded"))
    assert_reported_once(resumed, saved[0] // saved[1], now[0] // now[1], saved_sp=saved[1], now_sp=now[1])
    assert_trains_on(before, resumed)

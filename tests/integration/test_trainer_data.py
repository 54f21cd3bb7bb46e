"""A resumed Trainer feeds the samples that the saved run had not seen, whatever the ranks and the batch, and says so."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from elastic_ckpt.data import ElasticSampler
from tests.integration.conftest import Job, Run
from tests.integration.scripts.trainer_data import LENGTH

#: Of trainer_loaders.py.
SAVED_AT = {"plain": 3, "stream": 3, "unsized": 3, "smaller": 3, "distributed": 3, "dropped": 4}
SAVED_AT |= {"shard": 3, "shards": 3, "bare": 4, "split": 3}

SCRIPT = "trainer_data.py"


def samples(job: Job) -> list[int]:
    """Of all steps, in their global order: Accelerate gives batch after batch to one rank after the other."""
    ranks = [json.loads(path.read_text()) for path in sorted(job.seen.glob("samples-*.json"))]
    return list(chain.from_iterable(batch for turn in zip(*ranks, strict=True) for _, _, batch in turn))


def checkpoint(job: Job, step: int) -> str:
    return str(Path(job.output) / f"checkpoint-{step}")


def test_a_trainer_goes_on_at_its_sample_over_2_1_and_3_ranks(run: Run) -> None:
    """It saves each seven steps: of six samples, then five, then three, or thirty."""
    whole = run(2, SCRIPT, "--micro", "3", "--save", "7")
    order = samples(whole)
    assert len(order) == 3 * LENGTH and sorted(order[LENGTH : 2 * LENGTH]) == list(range(LENGTH))
    at_42 = ("--save", "7", "--resume_from_checkpoint", checkpoint(whole, 7))
    resumed = run(1, SCRIPT, *at_42, "--micro", "5", "--steps", "17", elastic=True)
    assert samples(resumed) == order[42:]
    assert (
        "continues after sample 12 of 30 in epoch 1; by its own count of steps, it would be 7 samples off"
        in resumed.log
    )
    assert "the saved run's, whose seed and data_seed are not recorded" in resumed.log, "saved without elastic_ckpt"
    at_75 = ("--save", "7", "--resume_from_checkpoint", checkpoint(resumed, 14))
    again = run(3, SCRIPT, *at_75, "--micro", "1", elastic=True)
    assert samples(again) == order[75:]
    assert (
        "continues after sample 15 of 30 in epoch 2; by its own count of steps, it would be 33 samples off" in again.log
    )
    reordered = run(1, SCRIPT, *at_75, "--micro", "5", "--steps", "16", "--data_seed", "5", elastic=True)
    other = "of another order (SeedableRandomSampler of seed 5 instead of SeedableRandomSampler of seed 42)"
    assert other in reordered.log and "another order" not in again.log
    large = run(1, SCRIPT, *at_42, "--micro", "15", "--accumulation", "2", "--steps", "9", elastic=True)
    assert samples(large) == order[42:], "an epoch that its count of steps has left behind"
    assert json.loads((large.seen / "epochs.json").read_text()) == 2, "which begins like any other"
    at_84 = ("--save", "7", "--resume_from_checkpoint", checkpoint(whole, 14))
    by_steps = run(1, SCRIPT, *at_84, "--micro", "1", "--steps", "20", elastic=True)
    assert samples(by_steps) == order[84:], "its count of steps ends in an epoch that the data has left behind"


def test_an_unchanged_trainer_goes_on_in_the_order_of_its_epoch(run: Run) -> None:
    """As its own skipping has it, which is not said to be off."""
    arguments = ("--micro", "3", "--save", "7", "--drop_last")
    whole = run(2, SCRIPT, *arguments)
    resumed = run(2, SCRIPT, *arguments, "--resume_from_checkpoint", checkpoint(whole, 7), elastic=True)
    assert samples(resumed) == samples(whole)[LENGTH + 12 :]
    assert "continues after sample 12 of 30 in epoch 1" in resumed.log and "samples off" not in resumed.log


def test_no_loader_of_a_trainer_is_fed_otherwise(run: Run) -> None:
    """Neither in a run that never resumes, nor in one that does with the same batch; and none is said to be off."""
    plain, whole = run(2, "trainer_loaders.py"), run(2, "trainer_loaders.py", elastic=True)
    resumed = run(2, "trainer_loaders.py", "--resume_from", str(whole.output), elastic=True)
    found = [json.loads((job.seen / "loaders-0.json").read_text()) for job in (plain, whole, resumed)]
    assert found[0] == found[1]
    rest = {kind: [each for each in found[0][kind] if each[0] >= at] for kind, at in SAVED_AT.items()}
    assert found[2] == rest and all(rest.values())
    assert "samples off" not in resumed.log
    on_one = run(1, "trainer_loaders.py", "--resume_from", str(whole.output), elastic=True)
    said = said_of(on_one.log)
    # of "smaller": 6 of 15 batches were done, and 6 of 30 are left out
    assert (
        "leaves the data to the Trainer, which continues by its own count of steps, about 6 samples off"
        in said["smaller"]
    )
    batches, ranks = (
        "skips 6 batches of 2 samples; those of the saved run had 4",
        "depend on their number, 1 instead of 2",
    )
    assert all(batches in said[kind] for kind in ("stream", "shard", "shards", "unsized"))
    assert ranks in said["shards"] and ranks not in said["stream"]
    assert "global batch" in said["plain"] and "batch: 4 -> 2" not in said["split"] and "off" not in said["split"]


def said_of(log: str) -> dict[str, str]:
    """What was logged by each kind of loader."""
    return dict(part.split("\n", 1) for part in log.split("kind: ")[1:])


def test_a_sampler_goes_on_where_accelerate_divides_its_batches(run: Run) -> None:
    """Its own epoch counter begins anew, and a step ends with the epoch; the last one is of one micro-batch."""
    sizes = ("--micro", "3", "--accumulation", "2")
    whole = run(2, "accelerate_data.py", *sizes, "--batches", "8")  # five an epoch: 12, 12, and 6 samples a step
    resumed = run(1, "accelerate_data.py", *sizes, "--batches", "7", "--resume_from", str(whole.output / "saved"))
    found = [[json.loads(path.read_text()) for path in sorted(job.seen.glob("samples-*"))] for job in (whole, resumed)]
    assert [consumed for (consumed, _), *_ in found] == [42, 60]
    fed = [
        list(chain.from_iterable(part for turn in zip(*(each for _, each in job), strict=True) for part in turn))
        for job in found
    ]
    order = [number for epoch in range(2) for number in ElasticSampler(LENGTH, seed=5).order(epoch).tolist()]
    assert fed[0] == order[:48], "six samples of a step that is not done"
    assert fed[1] == order[42:] + ElasticSampler(LENGTH, seed=5).order(2).tolist()[:3]

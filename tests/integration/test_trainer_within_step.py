"""Saves of a Trainer within a step: nothing is trained on twice, and find_latest finds them."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import elastic_ckpt
from tests.integration.conftest import Job, Run
from tests.integration.scripts.trainer_within_step import SETUPS

SCRIPT = "trainer_within_step.py"


def steps(job: Job) -> dict[str, list[dict[str, Any]]]:
    """What each rank has noted, by setup."""
    ranks = [json.loads(path.read_text()) for path in sorted(job.seen.glob("steps-*.json"))]
    return {name: [rank[name] for rank in ranks] for name in SETUPS}


def behind(name: str, whole: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What follows the step within which a run was saved; the data, too, unless it begins anew."""
    saves_in, arguments = SETUPS[name]
    rest = [{**rank, "noted": [each for each in rank["noted"] if each[0] > saves_in]} for rank in whole]
    assert bool(rest[0]["noted"]) == (arguments.get("max_steps") != saves_in)
    return rest


def test_a_save_within_a_step_goes_on_behind_it(run: Run) -> None:
    """Saved without elastic_ckpt: samples, rates, weights and the random state are those of the whole run."""
    whole = run(2, SCRIPT)
    resumed = run(2, SCRIPT, "--resume_from", str(whole.output), elastic=True)
    assert "saved within a step" in resumed.log
    found, expected = steps(resumed), steps(whole)
    for name, (saves_in, arguments) in SETUPS.items():
        if arguments.get("ignore_data_skip"):  # which begins the epoch anew
            assert {each[0] for each in found[name][0]["noted"]} == set(range(saves_in + 1, 6))
        else:
            assert found[name] == behind(name, expected[name]), name
        folder = whole.output / name.replace(" ", "_")
        assert elastic_ckpt.find_latest(folder) == str(folder / f"checkpoint-{saves_in - 1}")


def test_it_goes_on_with_other_ranks_where_the_save_holds_the_position(run: Run) -> None:
    whole = run(2, SCRIPT, elastic=True)
    found, expected = steps(run(1, SCRIPT, "--resume_from", str(whole.output), elastic=True)), steps(whole)
    for name, (_, arguments) in SETUPS.items():
        if "stream" in name or arguments.get("ignore_data_skip"):
            continue
        ranks = [rank["noted"] for rank in behind(name, expected[name])]
        samples = [list(chain.from_iterable(each[3] for each in turn)) for turn in zip(*ranks, strict=True)]
        assert [each[3] for each in found[name][0]["noted"]] == samples, name
        assert [each[2] for each in found[name][0]["noted"]] == [each[2] for each in ranks[0]], name

"""Some minutes of what ``python -m tests.drawn`` draws for hours."""

from __future__ import annotations

import subprocess

import pytest

from tests.distributed.launch import REPO
from tests.drawn import draw, report_of, table_of
from tests.soak.table import HOPS
from tests.soak.walk import Stop, Walk

pytestmark = pytest.mark.nightly

#: What flows get, and what changes do.
_SECONDS = 150
_SECONDS_OF_CHANGES = 240


def test_what_deepspeed_completes_alone_completes_with_elastic_ckpt_and_leaves_the_same_bits(
    extensions_dir: str,
) -> None:
    # other flows for each commit, and the same where one is looked at again
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False).stdout
    seed = int(head[:8] or "0", 16)
    counted, failures = draw(table_of("flows", every=False), "flows", _SECONDS, seed, extensions_dir)
    assert failures == [], f"seed {seed}"
    assert counted["right"] > counted["void"] / 2, counted


def test_what_another_script_loads_is_right_by_names_or_refused_with_a_remedy_that_holds(extensions_dir: str) -> None:
    counted, failures = draw(table_of("changes"), "changes", _SECONDS_OF_CHANGES, 54, extensions_dir)
    assert failures == []
    assert counted["right"] > counted["refused"] > 0 and counted["remedied"] > 0, counted


def test_every_hop_of_random_walks_is_bit_exact(extensions_dir: str) -> None:
    counted, failures = draw(table_of("walks", hops=20), "walks", 400, 21, extensions_dir)
    assert failures == []
    assert counted[HOPS] == 20


def test_a_walk_that_fails_is_reported_by_its_shortest_path(extensions_dir: str) -> None:
    """Without ZeRO, states have no names: DeepSpeed's groups have to stay as they were."""
    family, table = "PoorerLM, Adam", table_of("walks")
    walk = Walk(family, (Stop(), Stop(stage=3), Stop(stage=0), Stop(groups="split"), Stop(stage=2)))
    (outcome,) = table.run([walk], extensions_dir)
    assert outcome.counted[HOPS] == 2 and "MismatchError" in outcome.wrong
    report = report_of(table, "walks", walk, outcome, extensions_dir)
    assert "MismatchError" in report
    assert Walk(family, (Stop(stage=0), Stop(groups="split"))).as_json() in report

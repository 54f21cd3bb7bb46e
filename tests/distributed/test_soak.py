"""Twenty hops of a random walk over topologies; ``python -m tests.soak`` takes hours of them."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import report_of, run_walk, soak
from tests.soak.walk import Stop, Walk

pytestmark = pytest.mark.nightly


def test_every_hop_of_random_walks_is_bit_exact(extensions_dir: str) -> None:
    hops, failures = soak(hops=20, seconds=400, seed=21, extensions_dir=extensions_dir)
    assert failures == []
    assert hops == 20


def test_a_walk_that_fails_is_reported_by_its_shortest_path(extensions_dir: str) -> None:
    """Without ZeRO, states have no names: DeepSpeed's groups have to stay as they were."""
    family = "PoorerLM, Adam"
    walk = Walk(family, (Stop(), Stop(stage=3), Stop(stage=0), Stop(groups="split"), Stop(stage=2)))
    hops, wrong = run_walk(walk, extensions_dir)
    assert hops == 2 and "MismatchError" in wrong
    report = report_of(walk, hops, wrong, extensions_dir)
    assert "MismatchError" in report
    assert Walk(family, (Stop(stage=0), Stop(groups="split"))).as_json() in report

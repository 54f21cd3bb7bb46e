"""One job of torchrun, of which a node is killed and another joins: every sample is used once, and losses go on.

torchrun starts these ranks, again and again, as it would on nodes: so this is no cell.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import Launch
from tests.distributed.elastic_nodes import Nodes, outcome_of
from tests.distributed.nodes_script import WAIT

pytestmark = pytest.mark.nightly

STEPS, LIMIT = 9, 180
#: Of float32 sums in another order.
ROUNDING = 1e-4


def test_nodes_that_are_lost_and_join_cost_no_sample(launch: Launch, extensions_dir: str, tmp_path: Path) -> None:
    """One of two ranks waits before step 4, after one that is not saved; the one that is left waits before step 7."""
    folder, alone = tmp_path / "elastic", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    nodes = Nodes(folder, STEPS, 2, extensions_dir, **{WAIT: "1:7"})
    try:
        nodes.begin(1, **{WAIT: "2:4"})
        nodes.wait(lambda: any(folder.glob("waiting-2-*")), LIMIT)
        nodes.lose(1)
        nodes.wait((folder / "waiting-1-0").exists, LIMIT)
        nodes.join()
        nodes.wait(lambda: nodes.has_ended, LIMIT)
    finally:
        nodes.close()
    launch(1, "nodes_script.uninterrupted", (str(alone), STEPS))
    found, expected = outcome_of(folder), outcome_of(alone)
    assert found.starts == 3 and list(found.worlds.values()) == [2, 2, 1, 1, 1, 1, 2, 2, 2]
    assert found.lost_or_twice == 0 and len(found.samples) == STEPS * 12
    assert found.losses == pytest.approx(expected.losses, abs=ROUNDING)
    restored = [log.read_text().count("checkpoint restored") for log in nodes.logs]
    assert sum(restored) == 2, "of each start but the first, one rank reports"

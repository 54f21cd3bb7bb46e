"""States that DeepSpeed keeps apart from its optimizer's, and loses: Twin-Flow's, ZenFlow's, and those it has offloaded.

DeepSpeed's own loader goes on without them and says nothing, so that it is no way out at the saved topology either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed import damage
from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.model import Setup

OFFLOADED = (("offload_optimizer", {"device": "cpu"}), ("sub_group_size", 150))
SPLIT = (("offload_optimizer", {"device": "cpu", "ratio": 0.5}), ("sub_group_size", 150))
PLAIN, TWIN = (Setup(3, "bf16", "cpuadam", zero=zero) for zero in (OFFLOADED, SPLIT))
ONE = Setup(1, "bf16", "cpuadam")


OF_PLAIN, OF_ONE, OF_TWIN = Save(PLAIN), Save(Setup(1, "bf16")), Save(TWIN, job="kept_apart_jobs.save_twin")


def with_zenflow(copy: Path) -> None:
    """The folder says that ZenFlow was on, as its config does."""
    for file in damage.tag(copy).glob("*_states.pt"):
        damage.edit(file.name, say_zenflow)(copy)


def say_zenflow(tree: dict[str, Any]) -> None:
    zero = tree["ds_config"]["zero_optimization"]
    tree["ds_config"] = {**tree["ds_config"], "zero_optimization": {**zero, "zenflow": {"topk_ratio": 0.1}}}


LIVE_TWIN = Refuses("UnsupportedError", ("offload_optimizer.ratio < 1", '"ratio": 1.0', "second optimizer"))
LIVE_ZENFLOW = Refuses("UnsupportedError", ("ZenFlow", 'leave "zenflow" out'))
SAVED_ZENFLOW = Refuses("UnsupportedError", ("ZenFlow", "are in no file"))
LOST = Refuses(
    "LayoutError", ("sub-groups are in no file", "none of 0", '{"ratio": 0.5}', "load_optimizer_states=False")
)
#: By name: what is loaded, the kind of engine and its setup, on how many ranks, and the error.
REFUSED = {
    "a second optimizer now": (OF_PLAIN, None, "twin", TWIN, 2, LIVE_TWIN),
    "a second optimizer now, on one rank": (OF_PLAIN, None, "twin", TWIN, 1, LIVE_TWIN),
    "a second optimizer now, of ZeRO-1": (OF_ONE, None, "twin", TWIN, 2, LIVE_TWIN),
    "a second optimizer then": (OF_TWIN, None, "plain", PLAIN, 2, LOST),
    "a second optimizer then, on one rank": (OF_TWIN, None, "plain", PLAIN, 1, LOST),
    "a second optimizer then, to ZeRO-1": (OF_TWIN, None, "plain", ONE, 2, LOST),
    "ZenFlow now": (OF_ONE, None, "zenflow", OF_ONE.setup, 2, LIVE_ZENFLOW),
    "ZenFlow then": (OF_ONE, with_zenflow, "plain", OF_ONE.setup, 2, SAVED_ZENFLOW),
    "ZenFlow then, on one rank": (OF_ONE, with_zenflow, "plain", OF_ONE.setup, 1, SAVED_ZENFLOW),
    "ZenFlow then and now": (OF_ONE, with_zenflow, "zenflow", OF_ONE.setup, 2, Refuses("UnsupportedError", ("ZenFlow",))),
}  # fmt: skip
FITS = (OF_ONE, {"kind": "plain", "setup": OF_ONE.setup})


@cells(
    [
        Cell(name, save, "kept_apart_jobs.refuse", ranks, {"kind": kind, "setup": setup}, change, (), error, FITS)
        for name, (save, change, kind, setup, ranks, error) in REFUSED.items()
    ]
)
def test_states_that_are_kept_apart_are_refused_at_every_topology(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@cells(
    [
        Cell(f"ZeRO-{stage}", Save(setup), "kept_apart_jobs.refuse_offloaded", 2, {"setup": setup})
        for stage in (1, 2)  # DeepSpeed offloads ZeRO-3's under its FusedAdam alone
        for setup in [Setup(stage, "bf16")]
    ]
)
def test_offloaded_states_are_refused_until_they_are_back(cell: Cell, facts: list[tuple[Refused, Loaded]]) -> None:
    for refused, loaded in facts:
        Refuses("UnsupportedError", ("offload_states", "engine.reload_states()")).check([refused])
        assert loaded.report is not None and loaded.differences == {}, loaded.where

"""Refusals that take an odd file, or an optimizer of a package that is not installed; with remedies for a program."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

from tests.distributed import damage
from tests.distributed.model import Setup
from tests.distributed.remedy_cells import (
    MADE_ANEW,
    MODEL,
    PLAIN,
    RANK0,
    RANK1,
    TRUST,
    UNKNOWN,
    WEIGHTS,
    ZERO3,
    Case,
    edits,
    of_base,
)
from tests.distributed.remedy_jobs import Cell

CPU_ADAM = Setup(1, optimizer="cpuadam")
#: Of whose states DeepSpeed's getters give codes.
CLIPPED = Setup(1, optimizer="clipped")


def state_wrong_checksum(copy: Path) -> None:
    """Of a record of moments, its archive states another checksum everywhere."""
    path = damage.tag(copy) / RANK0
    raw = path.read_bytes()
    start, nbytes = damage.record_of(path, "exp_avg_sq")
    checksum = zlib.crc32(raw[start : start + nbytes])
    right = struct.pack("<I", checksum)
    assert raw.count(right) > 1
    path.write_bytes(raw.replace(right, struct.pack("<I", checksum ^ 1)))


def without_bias_correction(base: dict[str, Any]) -> None:
    for group in base["param_groups"]:
        group["bias_correction"] = False


def diverge(tree: dict[str, Any]) -> None:
    """Moments overflow."""
    for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["exp_avg"][3] = float("inf")


def keep_a_long_number(tree: dict[str, Any]) -> None:
    tree["number"] = 1 << (8 << 10)


def another_table(copy: Path) -> None:
    """The second rank's table has other values."""

    def change(tree: dict[str, Any]) -> None:
        for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["table"] = state["table"] + 1

    damage.edit(RANK1, change)(copy)


CELLS: dict[str, Case] = {
    "values of names that are tied now": Case(PLAIN, Cell("", ZERO3), "MismatchError", model="UntiedLM"),
    "checksums that the writer got wrong": Case(
        PLAIN,
        Cell("", PLAIN, "BigLM", holds=("if its writer is known to leave wrong checksums in files",)),
        "PartialLoadError",
        change=state_wrong_checksum,
        overwrites=True,
        model="BigLM",
    ),
    "a hyperparameter that the live Adam lacks": Case(
        CPU_ADAM, Cell("", PLAIN, exact=WEIGHTS), "MismatchError", change=of_base(without_bias_correction)
    ),
    "a save in the middle of the load": Case(
        PLAIN,
        Cell("", PLAIN, replaced=f"step4/{RANK1}"),
        "SavedOverError",
        change=lambda copy: None,
    ),
    "an optimizer of torchao": Case(PLAIN, Cell("", Setup(1, optimizer="torchao")), "UnsupportedError"),
    "states that overflowed": Case(
        PLAIN,
        Cell("", Setup(1, optimizer="bnb.AdamW8bit@1"), config={"convert_optimizer": True}, exact=WEIGHTS),
        "PartialLoadError",
        change=edits(diverge),
        overwrites=True,
    ),
    "a number beyond the limit": Case(
        PLAIN, Cell("", PLAIN, holds=(TRUST,)), "UnsupportedError", change=edits(keep_a_long_number, MODEL)
    ),
    "a table of each rank": Case(UNKNOWN, Cell("", UNKNOWN, exact=WEIGHTS), "UnsupportedError", change=another_table),
    "norms of each rank": Case(CLIPPED, Cell("", CLIPPED, exact=WEIGHTS, holds=(MADE_ANEW,)), "UnsupportedError", 2),
    "fewer norms": Case(
        CLIPPED, Cell("", Setup(1, optimizer="briefly_clipped"), exact=WEIGHTS), "MismatchError", ranks=1
    ),
}

"""What a load did: one record, and one table of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from elastic_ckpt.catalog import BUFFER, FROZEN, MASTER, SourceFacts
from elastic_ckpt.destinations import Destinations
from elastic_ckpt.plan import Plan


@dataclass(frozen=True)
class LoadReport:
    """What an elastic load restored, on this rank.

    Attributes:
        source: where the checkpoint comes from.
        zero_stage, dp: stage and data-parallel degree of the live engine.
        rank: global rank that this report is of.
        restored: what was restored: kind -> number of tensors of the whole model (states: per state key).
        fresh: names that keep the live model's values, since the checkpoint does not have them.
        ignored: names in the checkpoint that the live model does not have.
        global_steps: the step to go on from.
        nbytes_read: bytes of tensors that this rank read.
        read_calls: system calls that took.
        files_opened: metadata files that this rank opened.
        seconds: wall-clock seconds of each phase on this rank.
        notes: what the user should know.
    """

    source: SourceFacts
    zero_stage: int
    dp: int
    rank: int
    restored: dict[str, int]
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]
    global_steps: int = 0
    nbytes_read: int = 0
    read_calls: int = 0
    files_opened: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report as plain containers, for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """The report as a rich table."""
        table = Table(title="elastic_ckpt: checkpoint restored", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        source = self.source
        table.add_row("from", escape(f"{source.format} {source.folder}"))
        table.add_row("saved", f"ZeRO-{source.zero_stage}, DP={source.dp}, DeepSpeed {source.ds_version}")
        table.add_row("now", f"ZeRO-{self.zero_stage}, DP={self.dp}, at step {self.global_steps}")
        restored = ", ".join(f"{what} {count}" for what, count in self.restored.items())
        table.add_row("restored", restored or "nothing")
        for what, names in (("fresh", self.fresh), ("ignored", self.ignored)):
            if names:
                table.add_row(what, escape(", ".join(names)))
        seconds = ", ".join(f"{phase} {value:.2f}" for phase, value in self.seconds.items())
        size = tqdm.format_sizeof(self.nbytes_read, suffix="B")
        table.add_row(f"rank {self.rank} read", f"{size} in {self.read_calls} calls")
        table.add_row("seconds", seconds)
        for note in self.notes:
            table.add_row("note", escape(note))
        return table

    def __str__(self) -> str:
        console = Console(width=110, force_terminal=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def count_restored(destinations: Destinations, plan: Plan) -> dict[str, int]:
    """How many tensors of the whole model a plan restores, by kind."""
    restored: Counter[str] = Counter()
    left_out = set(plan.fresh)
    trained = {name for flat in destinations.flats for name in flat.members} - left_out
    if trained:
        restored["fp32 masters"] = len(trained)
    stateful = {
        name
        for flat in destinations.flats
        if plan.scalars[flat.index] is not None
        for name in flat.members
        if name not in left_out
    }
    for key in sorted({slot.key for slot in plan.slots} - {MASTER, BUFFER, FROZEN}):
        restored[key] = len(stateful)
    for key, what in ((BUFFER, "buffers"), (FROZEN, "frozen parameters")):
        count = sum(1 for whole in destinations.wholes if whole.key == key and whole.name not in left_out)
        if count:
            restored[what] = count
    if plan.restores_states:
        restored["param groups"] = len(plan.hyperparameters)
    return dict(restored)

"""``python -m benchmarks.collectives``: rounds and bytes of a load's collectives, in jobs of 8 to 4,096 ranks.

All ranks of a job are played in one process (:mod:`benchmarks.played`). They exchange the metadata of a ZeRO-3
checkpoint of 70 billion parameters that as many ranks have saved, 512 at most, and what a load sends each other beside
it: digests of their configurations and plans, and what each has done. Tensors of replicated targets and the scheduler's
and client's state come on top.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import write_document
from benchmarks.played import PlayedJob, in_turn
from benchmarks.scale_models import ScaleModel, scale_files
from elastic_ckpt import distributed
from elastic_ckpt.core.checksums import PartialSum
from elastic_ckpt.formats.assembling import assemble
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.load.metadata import read_my_share
from elastic_ckpt.load.rank_plans import RankPlan
from elastic_ckpt.planning.live_names import name_states
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.report import RankWork, ReadStats
from elastic_ckpt.tools.virtual import Topology, VirtualJob

app = typer.Typer(add_completion=False)
_MOST_SOURCE_RANKS = 512
#: Success of :func:`elastic_ckpt.distributed.agree`: the scheduler, and the tensors.
_AGREEMENTS = 2


@dataclass(frozen=True)
class Collectives:
    """What one rank of a job takes part in; ``most_nbytes`` is the longest message of a rank to all others."""

    ranks: int
    source_ranks: int
    collectives: int
    sent_nbytes: int
    received_nbytes: int
    most_nbytes: int


def collectives_of(ranks: int, model: ScaleModel) -> Collectives:
    """Play a load of the model's checkpoint."""
    found, mp_ranks, files = scale_files(model)
    metadata = assemble(found, mp_ranks, files, MetadataOptions(), name_states).metadata
    saved = metadata.source
    virtual = VirtualJob(
        metadata, Topology(ranks // (saved.tp * saved.pp), saved.tp, saved.pp, saved.zero_stage), LoadOptions()
    )
    _, planned = virtual.planned(ranks // 2)
    digest, seconds = "0" * 64, dict.fromkeys(("plan", "metadata", "read", "exchange", "commit"), 0.123456789)
    read = {
        (file, number): PartialSum(1 << 31, 1 << 20, 1 << 63)
        for file in planned.reads.files_read
        for number in range(4)
    }

    def load() -> None:
        distributed.all_gather("read the configuration", lambda: bytes(32))
        distributed.broadcast("look for a checkpoint", lambda: found)
        distributed.all_gather("describe the live engine", lambda: None)
        assert len(read_my_share(in_turn(len(files)), lambda position: files[position])) == len(files)
        distributed.all_gather("fit the checkpoint's files together", lambda: (0, None))
        plan = RankPlan(0, digest, (), planned.may_differ, planned.notes, runs_code=True)
        distributed.all_gather("plan the load", lambda: plan)
        work = RankWork(distributed.rank(), ReadStats(1 << 30, 2169), 0, 2, seconds, 0, len(planned.reads.files_read))
        distributed.all_gather("set counters and client state", lambda: (work, 0, (), (read, 0)))

    job = PlayedJob(ranks)
    job.run_all(load)
    rounds, received_nbytes = job.cost
    gathered = [sent for number, sent in enumerate(job.rounds) if number not in job.broadcasts]
    sent_nbytes = max(sum(map(len, messages)) for messages in zip(*gathered, strict=True))
    most_nbytes = max(len(message) for sent in gathered for message in sent)
    return Collectives(ranks, saved.partition_degree, rounds + _AGREEMENTS, sent_nbytes, received_nbytes, most_nbytes)


def of_zero3(ranks: int) -> Collectives:
    """Of a job that resumes the 70B model with ZeRO-3."""
    model = ScaleModel.load("70b")
    saved = model.saved.model_copy(update={"dp": min(ranks, _MOST_SOURCE_RANKS)})
    return collectives_of(ranks, model.model_copy(update={"saved": saved}))


@app.command()
def main(
    ranks: Annotated[list[int] | None, typer.Option(help="8, 64, 512 and 4,096 by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("benchmark_results"),
) -> None:
    """Count collectives and bytes."""
    table = Table("ranks", "source ranks", "collectives", "a rank sends KiB", "longest KiB", "a rank receives KiB")
    points = [of_zero3(each) for each in ranks or (8, 64, 512, 4096)]
    for each in points:
        nbytes = (each.sent_nbytes, each.most_nbytes, each.received_nbytes)
        table.add_row(
            *(f"{value:,}" for value in (each.ranks, each.source_ranks, each.collectives)),
            *(f"{value / 1024:,.1f}" for value in nbytes),
        )
    write_document(out, "collectives", list(map(asdict, points)))
    Console(width=120).print(table)


if __name__ == "__main__":
    app()

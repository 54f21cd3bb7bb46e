"""Saves by every checkpoint writer of DeepSpeed that runs on CPU, resumed at other degrees and stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.verification import verify
from tests.distributed.cells import Cell, Save, Saves, cells, crossing
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.model import Setup


def written(stage: int, kind: str, by: str, decoupled: bool = False) -> Setup:
    """A setup that saves with a writer; ``by``: which ranks are data-parallel writers."""
    writer = {"type": kind, "data_parallel": by, "decoupled": decoupled, "io_buffer_size": 1 << 20}
    return replace(Setup(stage), config=(("checkpoint", {"writer": writer}),))


#: DeepSpeed 0.19.8 cannot save ZeRO-1 and 2 with ``decoupled``: torch sends no views of masters to another process.
SETUPS = {
    **{f"fast-{stage}": written(stage, "fast", "replica") for stage in range(4)},
    **{f"python-{stage}": written(stage, "python", "replica") for stage in range(4)},
    "fast-one-writer-0": written(0, "fast", "machine"),
    "decoupled-fast-0": written(0, "fast", "replica", decoupled=True),
    "decoupled-fast-3": written(3, "fast", "replica", decoupled=True),
    "decoupled-python-0": written(0, "python", "machine", decoupled=True),
    "decoupled-python-3": written(3, "python", "replica", decoupled=True),
}
SAVED = {
    name: Save(setup, 2, "writer_jobs.save_each", forks=name.startswith("decoupled")) for name, setup in SETUPS.items()
}
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{0}_mp_rank_00_optim_states.pt"


def test_the_fast_writer_gives_names_that_deepspeed_does_not_find(saves: Saves) -> None:
    saves.make(list(SAVED.values()))
    names = {
        name: {file.name for file in (saves.folder(save) / "step4").glob("*states*")} for name, save in SAVED.items()
    }
    copies = {f"{MODEL}-0.2", f"{MODEL}-1.2"}
    optimizers = {f"{OPTIMIZER.format(rank)}-{rank}.2" for rank in (0, 1)}
    assert names["fast-0"] == names["decoupled-fast-0"] == copies
    assert names["fast-1"] == names["fast-2"] == copies | optimizers
    assert names["fast-one-writer-0"] == {f"{MODEL}-0.1"}
    plain = {name for cell, found in names.items() if cell not in ("fast-0", "fast-1", "fast-2") for name in found}
    assert all(name.endswith(".pt") for name in plain - copies - {f"{MODEL}-0.1"})


@cells(
    [
        crossing(save, target, ranks, expected=Resumes(loss_gap=1e-5), note=name)
        for ranks, target in ((1, Setup(0)), (1, Setup(1)), (3, Setup(2)), (3, Setup(3)))
        for name, save in SAVED.items()
    ]
)
def test_saves_of_every_writer_resume_bit_exactly(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@pytest.mark.parametrize("name", ["fast-1", "fast-3"])
def test_verify_finds_nothing_wrong_with_them(name: str, saves: Saves) -> None:
    found = verify(str(saves.folder(SAVED[name])), None, ElasticConfig(), full=True)
    assert found.findings == ()
    assert not [note for note in found.notes if note.kind == "no-checksum"]


def by_writers(job: str, *names: str) -> list[Cell]:
    """Jobs that save themselves."""
    return [Cell(name, None, f"writer_jobs.{job}", 2, {"setup": SETUPS[name]}) for name in names]


@cells(by_writers("load_right_after_save", "decoupled-fast-0", "decoupled-python-3"))
def test_a_load_right_after_a_decoupled_save_commits_it_first(cell: Cell, facts: list[Loaded]) -> None:
    Resumes().check(facts)
    assert {load.report.source.tag for load in facts} == {"global_step4"}


@cells(by_writers("load_after_writer_died", "decoupled-python-3"))
def test_a_decoupled_save_whose_writer_died_is_refused_on_all_ranks(cell: Cell, facts: list[Refused]) -> None:
    folder = facts[0].case["folder"]
    words = (
        "the process that wrote it in the background has died",
        f"file:      {folder}/global_step2",
        "rank:      1",
    )
    Refuses("DamagedError", words).check(facts)


WRITTEN_OVER = ("this file may have been written over an older one", "bytes beside its records")


@cells(by_writers("save_twice", "fast-1", "fast-3"))
def test_a_file_that_the_fast_writer_appended_to_is_refused(cell: Cell, facts: list[Refused]) -> None:
    Refuses("DamagedError", WRITTEN_OVER).check(facts)
    assert facts[0].kinds[0] == "DamagedError"

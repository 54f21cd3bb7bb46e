"""Saves by every checkpoint writer of DeepSpeed that runs on CPU, resumed at other degrees and stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.verification import verify
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup


def written(stage: int, kind: str, by: str, decoupled: bool = False) -> Setup:
    """A setup that saves with a writer; ``by``: which ranks are data-parallel writers."""
    writer = {"type": kind, "data_parallel": by, "decoupled": decoupled, "io_buffer_size": 1 << 20}
    return replace(Setup(stage), config=(("checkpoint", {"writer": writer}),))


#: DeepSpeed 0.19.8 cannot save ZeRO-1 and 2 with ``decoupled``: torch sends no views of masters to another process.
CELLS = {
    **{f"fast-{stage}": written(stage, "fast", "replica") for stage in range(4)},
    **{f"python-{stage}": written(stage, "python", "replica") for stage in range(4)},
    "fast-one-writer-0": written(0, "fast", "machine"),
    "decoupled-fast-0": written(0, "fast", "replica", decoupled=True),
    "decoupled-fast-3": written(3, "fast", "replica", decoupled=True),
    "decoupled-python-0": written(0, "python", "machine", decoupled=True),
    "decoupled-python-3": written(3, "python", "replica", decoupled=True),
}
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{0}_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<cell>/<setup>-dp2/step4``."""
    folder = tmp_path_factory.mktemp("writers")
    launch(2, "writer_jobs.save", {"folder": str(folder), "cells": CELLS})
    return folder


def folder_of(saved: Path, cell: str) -> Path:
    return saved / cell / f"{CELLS[cell].name}-dp2"


def test_the_fast_writer_gives_names_that_deepspeed_does_not_find(saved: Path) -> None:
    names = {cell: {file.name for file in (folder_of(saved, cell) / "step4").glob("*states*")} for cell in CELLS}
    copies = {f"{MODEL}-0.2", f"{MODEL}-1.2"}
    optimizers = {f"{OPTIMIZER.format(rank)}-{rank}.2" for rank in (0, 1)}
    assert names["fast-0"] == names["decoupled-fast-0"] == copies
    assert names["fast-1"] == names["fast-2"] == copies | optimizers
    assert names["fast-one-writer-0"] == {f"{MODEL}-0.1"}
    plain = {name for cell, found in names.items() if cell not in ("fast-0", "fast-1", "fast-2") for name in found}
    assert all(name.endswith(".pt") for name in plain - copies - {f"{MODEL}-0.1"})


@pytest.mark.parametrize(("degree", "target"), [(1, Setup(0)), (1, Setup(1)), (3, Setup(2)), (3, Setup(3))])
def test_saves_of_every_writer_resume_bit_exactly_at(degree: int, target: Setup, launch: Launch, saved: Path) -> None:
    sources = [{"folder": str(folder_of(saved, cell)), "format": "native"} for cell in CELLS]
    targets: list[dict[str, Any]] = [{"setup": target, "sources": sources, "continue": [len(sources) - 1]}]
    for load in launch(degree, "load", {"targets": targets}):
        assert load.format == "native" and load.differences == {}, load.where
        assert load.loss_gap <= 1e-5, load.where


@pytest.mark.parametrize("cell", ["fast-1", "fast-3"])
def test_verify_finds_nothing_wrong_with_them(cell: str, saved: Path) -> None:
    found = verify(str(folder_of(saved, cell)), None, ElasticConfig(), full=True)
    assert found.findings == ()
    assert not [note for note in found.notes if note.kind == "no-checksum"]


def test_a_load_right_after_a_decoupled_save_commits_it_first(launch: Launch, tmp_path: Path) -> None:
    cells = {cell: CELLS[cell] for cell in ("decoupled-fast-0", "decoupled-python-3")}
    for load in launch(2, "writer_jobs.load_right_after_save", {"folder": str(tmp_path), "cells": cells}):
        assert load.differences == {}, load.where
        assert load.report is not None and load.report.source.tag == "global_step4"


def test_a_decoupled_save_whose_writer_died_is_refused_on_all_ranks(launch: Launch, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "setup": CELLS["decoupled-python-3"]}
    for refused in launch(2, "writer_jobs.load_after_writer_died", arguments):
        assert refused.kinds[:1] == ("DamagedError",) and not refused.changed
        (text,) = refused.texts
        assert "the process that wrote it in the background has died" in text
        assert f"file:      {tmp_path / 'global_step2'}" in text and "rank:      1" in text


@pytest.mark.parametrize("cell", ["fast-1", "fast-3"])
def test_a_file_that_the_fast_writer_appended_to_is_refused(cell: str, launch: Launch, tmp_path: Path) -> None:
    for refused in launch(2, "writer_jobs.save_twice", {"folder": str(tmp_path), "setup": CELLS[cell]}):
        assert refused.kinds[:1] == ("DamagedError",) and not refused.changed
        (text,) = refused.texts
        assert "this file was written over an older one" in text and "bytes of another archive inside it" in text

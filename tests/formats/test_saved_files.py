"""What a save notes of its files, and what of that a load compares."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from elastic_ckpt.core.resume_sheet import SHEET
from elastic_ckpt.errors import MixedSavesError
from elastic_ckpt.formats.merging import index_layer
from elastic_ckpt.formats.pickled import open_file
from elastic_ckpt.formats.saved_files import digests_of_save, refuse_other_files, versions_in

STEP = 4
LAYERS = [f"layer_{number:02d}-model_states.pt" for number in range(3)]


def save_layers(folder: Path, seed: int, names: list[str] = LAYERS) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        tensors = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed + number)), torch.zeros(0)
        torch.save({"weight": tensors[0], "bias": tensors[0][0], "none": tensors[1]}, folder / name)


def write_sheet(folder: Path, files: dict[str, str], step: int = STEP) -> None:
    facts = {"step": step, "world_size": 2, "global_batch": 12, "precision": "fp32", "files": files}
    (folder / SHEET).write_text(json.dumps(facts))


def check(folder: Path) -> None:
    files = [open_file(str(folder / name), trust_pickle=False) for name in LAYERS]
    layers = [index_layer(file, layer=number, tp_rank=0) for number, file in enumerate(files)]
    refuse_other_files(str(folder), STEP, [*layers, None])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A save with its sheet, and beside it another run's, ``other``."""
    folder = tmp_path / "run"
    save_layers(folder, 1)
    save_layers(tmp_path / "other", 10)
    files = digests_of_save(str(folder), {})
    assert sorted(files) == LAYERS and len(set(files.values())) == 3
    write_sheet(folder, files)
    return folder


def test_a_file_of_another_run_is_named(saved: Path) -> None:
    check(saved)
    shutil.copy(saved.parent / "other" / LAYERS[1], saved)
    with pytest.raises(MixedSavesError) as caught:
        check(saved)
    assert caught.value.file == str(saved / LAYERS[1]) and "1 of 3 files" in str(caught.value)
    torch.save({"weight": torch.zeros(0)}, saved / LAYERS[1])
    with pytest.raises(MixedSavesError, match="none; so it is"):
        check(saved)


def test_what_was_saved_again_with_the_same_tensors_is_the_same(saved: Path) -> None:
    torch.save({**torch.load(saved / LAYERS[1])}, saved / LAYERS[1])
    check(saved)


def test_a_sheet_of_another_save_says_nothing(saved: Path) -> None:
    files = digests_of_save(str(saved), {})
    save_layers(saved, 10)  # over it, without elastic_ckpt
    check(saved)
    save_layers(saved, 1, LAYERS[:1])
    write_sheet(saved, files, STEP + 1)
    check(saved)
    (saved / SHEET).write_text("{")  # the report of a load warns
    check(saved)
    (saved / SHEET).unlink()
    check(saved)


def test_only_what_the_save_has_written_is_noted(saved: Path) -> None:
    before = versions_in(str(saved))
    assert digests_of_save(str(saved), before) == {}
    save_layers(saved, 20, LAYERS[:2])
    assert sorted(digests_of_save(str(saved), before)) == LAYERS[:2]
    assert versions_in(str(saved / "nowhere")) == {}


def test_partitions_are_noted_where_they_alone_have_the_weights(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim") for rank in (0, 1)]
    save_layers(tmp_path, 1, names)
    assert sorted(digests_of_save(str(tmp_path), {})) == sorted(names)


def test_partitions_beside_weights_and_a_single_file_are_not_noted(saved: Path, tmp_path: Path) -> None:
    save_layers(tmp_path / "one", 1, ["mp_rank_00_model_states.pt"])
    assert digests_of_save(str(tmp_path / "one"), {}) == {}
    torch.save({}, saved / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert digests_of_save(str(saved), {}) == {}


def test_files_without_checksums_are_not_noted(saved: Path) -> None:
    torch.save({"weight": torch.ones(3)}, saved / LAYERS[0], _use_new_zipfile_serialization=False)
    (saved / LAYERS[1]).write_bytes(b"")
    os.mkfifo(saved / "layer_09-model_states.pt")
    assert sorted(digests_of_save(str(saved), {})) == LAYERS[2:]

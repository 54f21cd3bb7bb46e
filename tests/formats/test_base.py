"""Files that changed places, by the name that torch notes in an archive, and files of other saves."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import DamagedError, ElasticCkptError
from elastic_ckpt.formats.base import CheckpointInfo, refuse_other_saves, refuse_swapped, refuse_unsupported_folder
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import open_pickled
from tests.attacks.assembly import packed, records_of

SHARD = "zero_pp_rank_{}_mp_rank_{}_optim_states.pt"


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (SHARD.format(1, "00"), SHARD.format(0, "00")),
        (SHARD.format(0, "01"), SHARD.format(0, "00")),
        (SHARD.format(1, "00"), "bf16_" + SHARD.format(0, "00")),
        ("mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"),
        ("layer_03-model_00-model_states.pt", "layer_04-model_00-model_states.pt"),
    ],
)
def test_a_file_that_was_saved_as_another_is_refused(tmp_path: Path, was: str, now: str) -> None:
    torch.save({}, tmp_path / was)
    (tmp_path / was).rename(tmp_path / now)
    with pytest.raises(DamagedError, match="changed places") as caught:
        refuse_swapped(open_pickled(str(tmp_path / now)))
    assert was.removesuffix(".pt") in str(caught.value.found) and now in str(caught.value.expected)


@pytest.mark.parametrize(
    "root",
    [
        f"mp_rank_{'9' * 5000}_model_states",
        f"mp_rank_{'9' * 300}_model_states",
        "x" * 60_000,
        "..",
        "a\0b",
        "\udcff",
        "é",
    ],
    ids=["5000 digits", "300 digits", "long", "above", "a null", "no text", "another letter"],
)
def test_an_archive_may_have_any_name(tmp_path: Path, root: str) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    records = [(name.replace("file", root, 1), data) for name, data in records_of(pickle.dumps({}, 2))]
    path.write_bytes(packed(records))
    refuse_swapped(open_pickled(str(path)))


def test_a_state_that_was_copied_over_another_is_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "exp_avg.pt")
    (tmp_path / "exp_avg_sq.pt").write_bytes((tmp_path / "exp_avg.pt").read_bytes())
    refuse_swapped(open_pickled(str(tmp_path / "exp_avg.pt")))
    with pytest.raises(DamagedError, match="changed places"):
        refuse_swapped(open_pickled(str(tmp_path / "exp_avg_sq.pt")))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("mp_rank_0_model_states.pt", "mp_rank_00_model_states.pt"),
        (SHARD.format(1, "00"), "bf16_" + SHARD.format(1, "00")),
        ("checkpoint-20.tmp", SHARD.format(1, "00")),
        ("layer_03-model_states.pt", "layer_03-model_00-model_states.pt"),
        (SHARD.format(1, "00"), SHARD.format(1, "00")),
    ],
)
def test_a_file_that_was_renamed_for_another_reason_is_read(tmp_path: Path, was: str, now: str) -> None:
    torch.save({}, tmp_path / was)
    (tmp_path / was).rename(tmp_path / now)
    refuse_swapped(open_pickled(str(tmp_path / now)))


def test_a_file_that_was_saved_through_a_stream_has_no_name_of_its_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        with open(tmp_path / SHARD.format(rank, "00"), "wb") as stream:
            torch.save({}, stream)
    refuse_swapped(open_pickled(str(tmp_path / SHARD.format(0, "00"))))


@dataclass(frozen=True)
class Shard(SourceFile):
    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records")

    groups: Any


FIRST = Shard("0", 1, groups=({"lr": float("nan")},))
OTHER = Shard("1", 1, groups=({"lr": 0.5},))


@pytest.mark.parametrize(
    "shards",
    [
        [FIRST, OTHER],
        [FIRST, replace(FIRST, path="2"), OTHER],  # behind one that shares everything with the first
        [FIRST, replace(FIRST, path="2", groups=({"lr": float("nan")},)), OTHER, replace(OTHER, path="3")],
    ],
)
def test_the_first_file_of_another_save_is_refused(shards: list[Shard]) -> None:
    def groups(shard: Shard) -> dict[str, Any]:
        return {"groups differ": shard.groups}

    with pytest.raises(DamagedError, match="than 0: groups differ") as caught:
        refuse_other_saves(shards, groups)
    assert (caught.value.file, caught.value.found) == ("1", "({'lr': 0.5},)")
    refuse_other_saves([shard for shard in shards if shard.groups is not OTHER.groups], groups)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["bf16_" + SHARD.format(0, "00"), SHARD.format(0, "00")], "two saves are mixed in one folder"),
        (["layer_00-model_00-model_states.pt", "layer_00_expert_0_mp_rank_00_model_states.pt"], "pipeline parallelism"),
    ],
)
def test_folders_that_no_save_leaves_are_refused_by_their_names(names: list[str], words: str) -> None:
    files = sort_names([*names, "mp_rank_00_model_states.pt"], False)
    with pytest.raises(ElasticCkptError, match=words) as caught:
        refuse_unsupported_folder(CheckpointInfo("native", "/run/step4", "step4", files))
    assert str(caught.value.file).removeprefix("/run/step4/") in names

"""Who looks for a checkpoint, how long it is waited for, and which one follows a damaged one."""

# Covers elastic_ckpt/load/older.py, which the hook asks for the next checkpoint.

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt import errors
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.engines.training_state import LoadArguments
from elastic_ckpt.errors import (
    DamagedError,
    ElasticCkptError,
    LayoutError,
    MismatchError,
    MissingFilesError,
    MixedSavesError,
    NotFoundError,
    PartialLoadError,
    SavedOverError,
)
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.load import hook, retries
from elastic_ckpt.load.flow import LoadCall
from elastic_ckpt.load.retries import RetryPolicy

FOUND = CheckpointInfo("native", "/x/step4", "step4", sort_names([], is_universal=False))
MODEL = "mp_rank_00_model_states.pt"


def attempts(
    folder: Path, tag: str | None = None, node_local: bool = False, flag: bool = False, **section: Any
) -> RetryPolicy:
    engine = SimpleNamespace(use_node_local_storage=lambda: node_local)
    call = LoadCall(engine, LoadArguments(str(folder), tag), ElasticConfig(**section))
    return RetryPolicy(call, prefer_universal=flag)


def save(folder: Path, tag: str, step: int | None) -> None:
    """A tag's folder; without a step, its file is empty."""
    (folder / tag).mkdir(parents=True)
    if step is None:
        (folder / tag / MODEL).write_bytes(b"")
    else:
        torch.save({"global_steps": step}, folder / tag / MODEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 30, 20):
        save(tmp_path, f"global_step{step}", step)
    (tmp_path / "latest").write_text("global_step30")
    return tmp_path


DAMAGE = DamagedError("a file is torn", file="/x/a.pt", remedy="copy it again")
PREVIOUS: dict[str, Any] = {"on_damage": "previous"}


def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of two, whose work it does as rank 0, too."""
    rank = [1]

    def both(_doing: str, work: Any) -> list[Any]:
        rank[0] = 0
        first = work()
        rank[0] = 1
        return [first, work()]

    monkeypatch.setattr(retries.distributed, "rank", lambda: rank[0])
    monkeypatch.setattr(retries.distributed, "all_gather", both)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_looks_and_all_take_what_it_has_found(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(retries.detect, "find_checkpoint", lambda *arguments: looked.append(arguments) or FOUND)
    first = attempts(Path("/x"))
    assert first.find() == FOUND and len(looked) == 1
    if rank:
        as_rank_1(monkeypatch)
        assert attempts(Path("/x")).find() == FOUND and len(looked) == 2, "once more, for rank 0 alone"


def test_tags_that_no_latest_names_are_listed_and_a_script_starts_fresh(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "latest").unlink()
    assert attempts(folder).find() is None
    (line,) = caplog.messages
    assert all(f"global_step{step}" in line for step in (10, 20, 30)) and "tag=" in line and str(folder) in line
    assert attempts(folder, wait_for_files=1).find() is None, "after it has waited"
    for options in ({"mode": "require"}, PREVIOUS):
        with pytest.raises(NotFoundError, match="global_step30"):
            attempts(folder, **options).find()
    (folder / "latest").write_text("global_step31")
    with pytest.raises(NotFoundError, match="global_step31"):
        attempts(folder).find()


@pytest.mark.parametrize("options", [{}, PREVIOUS])
def test_a_lone_checkpoint_that_no_latest_names_is_loaded_where_one_is_asked_for(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The folder of a tag, and the folder that has nothing else in it, whatever is to be done after damage."""
    save(tmp_path, "global_step30", 30)
    itself = tmp_path / "global_step30"
    for folder, tag in ((tmp_path, "global_step30"), (itself, "")):
        for asked in ({"flag": True}, {"mode": "require"}):
            found = attempts(folder, **asked, **options).find()
            assert found is not None and (found.folder, found.tag) == (str(itself), tag)
            assert [note for note in found.notes if "no file 'latest'" in note]
    with pytest.raises(NotFoundError, match="load_dir is the folder of a checkpoint"):
        attempts(itself, **options).find()


def test_after_a_damaged_lone_checkpoint_nothing_is_left(tmp_path: Path) -> None:
    save(tmp_path, "global_step30", 30)
    tried = attempts(tmp_path / "global_step30", flag=True, **PREVIOUS)
    found, error = tried.find(), DamagedError("a file is torn", file="/x/a.pt")
    assert not tried.recover(error, found)
    assert f"elastic-ckpt latest {tmp_path}" in str(error.remedy)


def test_each_rank_finds_the_tag_in_a_folder_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries.detect, "find_checkpoint", lambda *_: FOUND)
    as_rank_1(monkeypatch)
    assert attempts(folder, node_local=True).find() == replace(FOUND, folder=str(folder / "step4"))


def test_a_folder_that_cannot_be_looked_into_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr(retries.detect, "find_checkpoint", broken)
    with pytest.raises(
        ElasticCkptError, match=r"failed to look for a checkpoint: PermissionError.*Permission"
    ) as caught:
        attempts(Path("/x")).find()
    assert (caught.value.rank, caught.value.file) == (0, "/x")


def test_the_next_older_one_by_its_step_follows_until_none_is_left(folder: Path) -> None:
    tried = attempts(folder, **PREVIOUS)
    found = tried.find()
    for tag, back in (("global_step20", 10), ("global_step10", 20)):
        assert tried.recover(DamagedError("a file is torn", file="/x/a.pt"), found)
        found = tried.find()
        assert found is not None and found.tag == tag
        assert found.notes[-1] == f"loaded {tag} instead, {back} steps back"
    assert found.notes[0] == "skipped global_step30: a file is torn (/x/a.pt)"
    last = DamagedError("a file is torn")
    assert not tried.recover(last, found)
    assert (
        "no older checkpoint" in str(last)
        and "skipped global_step30" in str(last)
        and "elastic-ckpt latest" in str(last)
    )


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_it_goes_back_for_each_kind_of_error_that_proves_damage_and_for_no_other(kind: Any, folder: Path) -> None:
    if not issubclass(kind, ElasticCkptError):
        return
    tried = attempts(folder, **PREVIOUS)
    error = kind("something is wrong")
    assert tried.recover(error, tried.find()) == kind.proves_damage
    proven = {"DamagedError", "MissingFilesError", "ConflictingCopiesError", "SavedOverError"}
    assert kind.proves_damage == (kind.__name__ in proven)
    if isinstance(error, DamagedError) and not kind.proves_damage:
        assert "only for proven damage" in str(error.remedy)


def test_a_checkpoint_of_the_same_step_may_come_from_the_damaged_one(folder: Path) -> None:
    save(folder, "copy", 30)
    tried = attempts(folder, **PREVIOUS)
    assert tried.recover(DamagedError("torn"), tried.find())
    assert tried.find().tag == "global_step20"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["global_step40", "", "\x07 noise", "../elsewhere"])
def test_a_latest_file_that_names_nothing_is_damage(name: str, folder: Path) -> None:
    (folder / "latest").write_text(name)
    with pytest.raises(NotFoundError):
        attempts(folder).find()
    tried = attempts(folder, **PREVIOUS)
    with pytest.raises(NotFoundError) as caught:
        tried.find()
    assert tried.recover(caught.value, None)
    assert tried.find().tag == "global_step30"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tag", "section", "error", "found"),
    [
        (None, {}, DamagedError("torn"), "global_step30"),
        (None, PREVIOUS, MismatchError("another model"), "global_step30"),
        (None, PREVIOUS, PartialLoadError("killed"), "global_step30"),
        ("global_step90", PREVIOUS, NotFoundError("no such tag"), None),
    ],
    ids=["not asked for", "another model", "no damage", "a tag that was never there"],
)
def test_nothing_else_is_tried(
    tag: str | None, section: dict[str, Any], error: ElasticCkptError, found: str | None, folder: Path
) -> None:
    before = error.remedy
    assert not attempts(folder, tag, **section).recover(error, found and look_at(str(folder), found))
    assert error.remedy == before


def test_on_a_suspicion_it_never_goes_back_and_else_rank_0_logs_which_steps_are_lost(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried, suspicion = attempts(folder, **PREVIOUS), MixedSavesError("it may be", remedy="look")
    assert not tried.recover(suspicion, tried.find())
    assert suspicion.remedy == 'look; "on_damage" goes back only for proven damage'
    assert not caplog.records and tried.find().tag == "global_step30"  # type: ignore[union-attr]
    tried.report_loss()
    assert not caplog.records, "nothing is lost"
    for older, lost in ((20, "steps 21 to 30"), (10, "steps 11 to 30")):
        caplog.clear()
        assert tried.recover(DamagedError("torn"), tried.find())
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "loaded" not in record.getMessage(), "it may be refused"
        tried.report_loss()
        record = caplog.records[-1]
        assert record.levelno == logging.ERROR and f"{lost} are lost" in record.getMessage()
        assert f"loaded global_step{older} instead of global_step30" in record.getMessage()


def test_an_older_one_that_is_suspected_is_refused_with_what_was_skipped(folder: Path) -> None:
    tried = attempts(folder, **PREVIOUS)
    assert tried.recover(DamagedError("torn"), tried.find())
    suspicion = MixedSavesError("it may be", remedy="look")
    assert not tried.recover(suspicion, tried.find())
    assert suspicion.remarks == ('"on_damage" goes back only for proven damage', "skipped global_step30: torn")


@pytest.mark.parametrize("step", [0, 7])
@pytest.mark.parametrize(
    ("tags", "how"),
    [
        (("after8", "after9", "after10"), "the numbers in their names"),
        (("epoch1-step9", "epoch2-step3", "epoch2-step5"), "the numbers in their names"),
        (("begin", "middle", "end"), "the times of writing"),
        (("z1", "y2", "x3"), "the times of writing"),
    ],
)
def test_where_counters_stand_still_numbers_or_times_tell_what_is_older(
    tags: tuple[str, ...], how: str, step: int, tmp_path: Path
) -> None:
    """As under Lightning Fabric, whose optimizer steps beside the engine."""
    for number, tag in enumerate(tags):
        save(tmp_path, tag, step)
        # numbers count more than times, which a copy changes
        written = 1000 + (number if how == "the times of writing" else -number)
        os.utime(tmp_path / tag / MODEL, (written, written))
    (tmp_path / "latest").write_text(tags[2])
    tried = attempts(tmp_path, **PREVIOUS)
    for older in (tags[1], tags[0]):
        assert tried.recover(DamagedError("torn"), tried.find())
        found = tried.find()
        assert found is not None and found.tag == older
        assert any(how in note and f"count {step} steps" in note for note in found.notes), found.notes
    last = DamagedError("torn")
    assert not tried.recover(last, found) and "no older checkpoint" in str(last.remedy)
    limited, error = attempts(tmp_path, on_damage=100), DamagedError("torn")
    assert not limited.recover(error, limited.find()), "how many steps it is back is not known"
    assert "unknown number of steps" in str(error.remedy)


def test_the_numbers_of_own_tags_are_steps_where_counters_stand_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (20, 9, 100):
        save(tmp_path, f"global_step{number}", 0)
    (tmp_path / "latest").write_text("global_step100")
    for limit, works in ((80, True), (79, False)):
        tried, error = attempts(tmp_path, on_damage=limit), DamagedError("torn")
        assert tried.recover(error, tried.find()) == works
    tried = attempts(tmp_path, **PREVIOUS)
    assert tried.recover(DamagedError("torn"), tried.find()) and tried.find().tag == "global_step20"  # type: ignore[union-attr]
    tried.report_loss()
    assert "steps 21 to 100 are lost" in caplog.messages[-1]
    # a damaged one whose files tell nothing is older than none of them
    (tmp_path / "global_step100" / MODEL).write_bytes(b"")
    tried = attempts(tmp_path, **PREVIOUS)
    assert tried.recover(DamagedError("torn"), tried.find()) and tried.find().tag == "global_step20"  # type: ignore[union-attr]


def test_a_tag_of_the_same_step_in_another_format_is_not_taken(tmp_path: Path) -> None:
    """It may have been converted from the damaged files, whatever a copy makes of times."""
    save(tmp_path, "global_step30", 30)
    save(tmp_path, "global_step30_universal", 30)
    (tmp_path / "global_step30_universal" / "zero" / "weight").mkdir(parents=True)
    (tmp_path / "global_step30_universal" / "zero" / "weight" / "fp32.pt").write_bytes(b"")
    os.utime(tmp_path / "global_step30_universal" / MODEL, (1000, 1000))
    (tmp_path / "latest").write_text("global_step30")
    tried = attempts(tmp_path, **PREVIOUS)
    assert not tried.recover(DamagedError("torn"), tried.find())


def test_no_further_back_than_allowed(folder: Path) -> None:
    for limit, works in ((10, True), (9, False)):
        tried, error = attempts(folder, on_damage=limit), DamagedError("torn")
        assert tried.recover(error, tried.find()) == works
    assert '"on_damage" allows 9' in str(error.remedy)


def test_where_no_file_tells_the_step(folder: Path) -> None:
    (folder / "global_step20" / MODEL).write_bytes(b"")
    tried = attempts(folder, "global_step20", on_damage=10)
    assert tried.recover(DamagedError("torn"), tried.find()), "its tag tells it"
    assert tried.find().tag == "global_step10"  # type: ignore[union-attr]
    save(folder, "mine", None)
    for tag, section in (("mine", PREVIOUS), (None, {"on_damage": 10})):
        (folder / "latest").write_text("mine")
        tried, error = attempts(folder, tag, **section), DamagedError("torn")
        assert not tried.recover(error, tried.find())
        assert "which checkpoints are older is not known" in str(error.remedy)
    tried = attempts(folder, **PREVIOUS)
    assert tried.recover(DamagedError("torn"), tried.find()), "latest names the newest"
    assert tried.find().notes[-1] == "loaded global_step30 instead, at step 30"  # type: ignore[union-attr]


def test_once_the_engine_is_overwritten_every_error_says_so(folder: Path) -> None:
    tried = attempts(folder, **PREVIOUS)
    partial = PartialLoadError("torn")
    partial.__cause__ = DamagedError("torn")
    assert tried.recover(partial, tried.find()) and tried.partly_overwritten
    with pytest.raises(PartialLoadError, match="another model: the engine is partly overwritten"):
        tried.recover(MismatchError("another model"), tried.find())


def test_missing_files_are_waited_for_but_not_longer_than_allowed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    tried = attempts(folder, wait_for_files=20)
    found = tried.find()
    tries = 0
    while tried.recover(DAMAGE, found):
        tries += 1
    assert now == [120.0] and 5 <= tries <= 12
    assert not attempts(folder, wait_for_files=20).recover(MismatchError("another model"), found)
    assert now == [120.0]


@pytest.mark.parametrize(("cause", "waits"), [(SavedOverError("moved"), True), (DAMAGE, False)])
def test_a_tag_that_was_saved_over_is_loaded_again_even_into_an_overwritten_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cause: DamagedError, waits: bool
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    partial = PartialLoadError(cause.problem)
    partial.__cause__ = cause
    tried = attempts(folder, wait_for_files=20)
    assert tried.recover(partial, tried.find()) == waits
    assert tried.partly_overwritten and tried.find().tag == "global_step30"  # type: ignore[union-attr]


def test_a_folder_that_must_be_there_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "late"
    monkeypatch.setattr(time, "sleep", lambda seconds: save(folder, "step4", 4))
    assert attempts(folder, wait_for_files=20).find() is None, "a run may start anew"
    assert not os.path.exists(folder)
    assert attempts(folder, "step4", wait_for_files=20).find().tag == "step4"  # type: ignore[union-attr]


def test_a_number_is_a_tag(tmp_path: Path) -> None:
    save(tmp_path, "4", 4)
    found = attempts(tmp_path, tag=4).find()  # type: ignore[arg-type]
    assert found is not None and found.tag == "4"


@pytest.mark.parametrize("section", [{}, PREVIOUS])
@pytest.mark.parametrize(
    "second",
    [
        None,
        MissingFilesError("gone"),
        DamagedError("torn"),
        LayoutError("odd"),
        MixedSavesError("weights"),
        MismatchError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_proof_beside_a_suspicion_counts(
    second: ElasticCkptError | None, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for ``elastic-ckpt latest``, which looks at all of a checkpoint."""

    def prepare(call: LoadCall, found: CheckpointInfo) -> Any:
        if call.config.verify != "bytes":
            raise MixedSavesError("counts")
        if second is not None:
            raise second

    monkeypatch.setattr(hook, "prepare", prepare)
    monkeypatch.setattr("elastic_ckpt.load.older.prepare", prepare)
    monkeypatch.setattr(hook, "on_own_disks", lambda *_: False)
    monkeypatch.setattr(hook, "deepspeed_loads_it_right", lambda *_, **__: False)
    call = LoadCall(SimpleNamespace(), LoadArguments("/x"), ElasticConfig(**section))
    policy = SimpleNamespace(is_asked=False, partly_overwritten=False)
    with pytest.raises(ElasticCkptError) as caught:
        hook._load(call, FOUND, policy, lambda: None)  # type: ignore[arg-type]
    proves = bool(section) and second is not None and second.proves_damage
    assert caught.value.problem == (second.problem if proves and second else "counts")

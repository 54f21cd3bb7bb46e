"""Which checkpoint a folder holds: names of files, ``latest``, ``latest_universal``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from elastic_ckpt.errors import DamagedError, NotFoundError
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.detect import find_checkpoint, list_tags, look_at

ZERO12 = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
BF16 = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
ZERO3 = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def native(root: Path, tag: str, names: Sequence[str] = ZERO12, steps: int | None = None) -> Path:
    """A tag's folder with the right names in it; model-states files hold ``global_steps`` where they are opened."""
    folder = root / tag
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
        if steps is not None and "model_states" in name:
            torch.save({"global_steps": steps}, folder / name)
    return folder


def universal(root: Path, tag: str, names: Sequence[str] = ZERO12[:1], steps: int | None = None) -> Path:
    folder = native(root, tag, names, steps)
    (folder / "zero" / "weight").mkdir(parents=True)
    (folder / "zero" / "optimizer_state.pt").touch()
    (folder / "zero" / "weight" / "fp32.pt").touch()
    return folder


def point(root: Path, tag: str, name: str = "latest") -> None:
    (root / name).write_text(tag)


def find(
    root: Path, tag: str | None = None, prefer_universal: bool = False, without_latest: bool = False
) -> CheckpointInfo | None:
    return find_checkpoint(str(root), tag, prefer_universal, without_latest=without_latest)


def found_at(root: Path, tag: str | None = None, prefer_universal: bool = False) -> CheckpointInfo:
    found = find(root, tag, prefer_universal)
    assert found is not None
    return found


@pytest.mark.parametrize("names", [ZERO12, BF16, ZERO3])
def test_latest_names_a_native_checkpoint(tmp_path: Path, names: Sequence[str]) -> None:
    folder = native(tmp_path, "global_step4", names)
    native(tmp_path, "global_step8", names)
    point(tmp_path, "global_step4")
    found = found_at(tmp_path)
    assert (found.format, found.folder, found.tag, found.notes) == ("native", str(folder), "global_step4", ())
    assert found.path("x") == str(folder / "x")


def test_white_space_around_the_tag_in_latest_does_not_matter(tmp_path: Path) -> None:
    native(tmp_path, "global_step4")
    point(tmp_path, " global_step4\n")
    assert found_at(tmp_path).tag == "global_step4"


def test_latest_may_name_a_universal_checkpoint(tmp_path: Path) -> None:
    universal(tmp_path, "global_step4")
    point(tmp_path, "global_step4")
    assert found_at(tmp_path).format == "universal"


@pytest.mark.parametrize("prefer_universal", [True, False])
def test_latest_universal_alone_is_followed(tmp_path: Path, prefer_universal: bool) -> None:
    folder = universal(tmp_path, "global_step4_universal")
    point(tmp_path, "global_step4_universal", "latest_universal")
    found = found_at(tmp_path, prefer_universal=prefer_universal)
    assert (found.format, found.folder) == ("universal", str(folder))


@pytest.mark.parametrize("prefer_universal", [True, False])
def test_latest_alone_is_followed(tmp_path: Path, prefer_universal: bool) -> None:
    native(tmp_path, "global_step4")
    universal(tmp_path, "global_step4_universal")
    point(tmp_path, "global_step4")
    assert found_at(tmp_path, prefer_universal=prefer_universal).tag == "global_step4"


@pytest.mark.parametrize(("prefer_universal", "tag"), [(True, "step4_universal"), (False, "step4")])
@pytest.mark.parametrize("names", [ZERO12, ZERO3])
def test_where_both_are_equally_far_the_preference_decides(
    tmp_path: Path, names: Sequence[str], prefer_universal: bool, tag: str
) -> None:
    native(tmp_path, "step4", names, steps=4)
    universal(tmp_path, "step4_universal", names[:1], steps=4)
    point(tmp_path, "step4")
    point(tmp_path, "step4_universal", "latest_universal")
    found = found_at(tmp_path, prefer_universal=prefer_universal)
    other = {"step4", "step4_universal"} - {tag}
    assert found.tag == tag
    assert [f"loaded {tag} (step 4); {other.pop()} (step 4) is there too"] == list(found.notes)


@pytest.mark.parametrize("prefer_universal", [True, False])
def test_a_native_checkpoint_that_is_further_wins_whatever_is_preferred(tmp_path: Path, prefer_universal: bool) -> None:
    folder = native(tmp_path, "step9", steps=9)
    universal(tmp_path, "step4_universal", steps=4)
    point(tmp_path, "step9")
    point(tmp_path, "step4_universal", "latest_universal")
    found = found_at(tmp_path, prefer_universal=prefer_universal)
    assert (found.format, found.folder) == ("native", str(folder))
    assert list(found.notes) == ["loaded step9 (step 9); step4_universal (step 4) is there too"]


def test_a_universal_checkpoint_that_is_preferred_and_further_is_taken(tmp_path: Path) -> None:
    native(tmp_path, "step4", steps=4)
    universal(tmp_path, "step9_universal", steps=9)
    point(tmp_path, "step4")
    point(tmp_path, "step9_universal", "latest_universal")
    assert found_at(tmp_path, prefer_universal=True).tag == "step9_universal"


def test_where_both_files_name_one_folder_nothing_is_opened(tmp_path: Path) -> None:
    universal(tmp_path, "step4")
    point(tmp_path, "step4")
    point(tmp_path, "step4", "latest_universal")
    found = found_at(tmp_path)
    assert (found.tag, found.format, found.notes) == ("step4", "universal", ())


def test_a_tag_that_is_asked_for_is_taken_whatever_latest_says(tmp_path: Path) -> None:
    folder = native(tmp_path, "best")
    universal(tmp_path, "step4_universal")
    point(tmp_path, "gone")
    point(tmp_path, "step4_universal", "latest_universal")
    found = found_at(tmp_path, tag="best", prefer_universal=True)
    assert (found.format, found.folder, found.tag) == ("native", str(folder), "best")
    assert found_at(tmp_path, tag="step4_universal").format == "universal"


def test_a_tag_may_be_a_number(tmp_path: Path) -> None:
    native(tmp_path, "100")
    assert found_at(tmp_path, tag=100).tag == "100"  # type: ignore[arg-type]


def test_a_wrong_tag_is_an_error_that_lists_the_tags_and_how_to_load_the_newest(tmp_path: Path) -> None:
    for age, tag in enumerate(["step2", "step10", "step1"]):
        os.utime(native(tmp_path, tag), (1000 - age, 1000 - age))
    (tmp_path / "logs").mkdir()
    point(tmp_path, "step2")
    with pytest.raises(NotFoundError) as caught:
        find(tmp_path, tag="step3")
    assert "'step3'" in str(caught.value.expected)
    assert str(caught.value.found) == "checkpoints under the tags step2, step10, step1"
    assert caught.value.remedy == f"load_checkpoint({str(tmp_path)!r}, tag='step2')"
    assert caught.value.file == str(tmp_path / "step3")


def test_a_tag_whose_folder_is_gone_is_an_error_although_there_is_no_other(tmp_path: Path) -> None:
    """As Accelerate asks for it, by name; DeepSpeed would end in an AssertionError without a word."""
    assert find(tmp_path, tag="pytorch_model") is None
    point(tmp_path, "pytorch_model")
    with pytest.raises(NotFoundError) as caught:
        find(tmp_path, tag="pytorch_model")
    assert caught.value.file == str(tmp_path / "pytorch_model")
    assert caught.value.found == f"no checkpoint in {tmp_path}"


def test_tags_without_a_latest_file_are_an_error_that_lists_them(tmp_path: Path) -> None:
    native(tmp_path, "step4")
    with pytest.raises(NotFoundError) as caught:
        find(tmp_path)
    assert "'latest'" in str(caught.value.expected)
    assert "step4" in str(caught.value.found)
    assert caught.value.file == str(tmp_path / "latest")


@pytest.mark.parametrize("make", [native, universal])
def test_a_folder_that_is_a_checkpoint_itself_is_taken_with_a_note_where_one_is_asked_for(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    folder = make(tmp_path, "step4")
    found = find(folder, without_latest=True)
    assert found is not None and (found.format, found.folder, found.tag) == (make.__name__, str(folder), "")
    assert found.notes == (f"{folder} has no file 'latest' and is a checkpoint itself: loaded it",)
    with pytest.raises(NotFoundError, match="load_dir is the folder of a checkpoint") as caught:
        find(folder)
    assert caught.value.found == f"the files of a {make.__name__} checkpoint"
    assert f"load_checkpoint({str(tmp_path)!r}, tag='step4')" in str(caught.value.remedy)
    assert "--universal-checkpoint" in str(caught.value.remedy)


@pytest.mark.parametrize("make", [native, universal])
def test_the_only_checkpoint_in_a_folder_is_taken_with_a_note_where_one_is_asked_for(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    make(tmp_path, "step4")
    (tmp_path / ".git").mkdir()
    found = find(tmp_path, without_latest=True)
    assert found is not None and (found.format, found.tag) == (make.__name__, "step4")
    assert found.notes == (f"{tmp_path} has no file 'latest': loaded step4, the only checkpoint in it",)
    assert found.folder == str(tmp_path / "step4")
    native(tmp_path, "step8")
    with pytest.raises(NotFoundError, match="step8"):
        find(tmp_path, without_latest=True)


def test_a_checkpoint_with_others_in_it_is_not_chosen_over_them(tmp_path: Path) -> None:
    folder = native(tmp_path, "step4")
    native(folder, "step5")
    with pytest.raises(NotFoundError, match="step5"):
        find(folder, without_latest=True)


def test_a_latest_file_counts_where_a_checkpoint_is_asked_for(tmp_path: Path) -> None:
    folder = native(tmp_path, "step4")
    native(folder, "step5")
    point(folder, "step5")
    found = find(folder, without_latest=True)
    assert found is not None and (found.tag, found.notes) == ("step5", ())
    point(tmp_path, "gone")
    with pytest.raises(NotFoundError, match="gone"):
        find(tmp_path, without_latest=True)


@pytest.mark.parametrize("name", ["latest", "latest_universal"])
def test_a_latest_file_that_names_a_missing_tag_is_an_error_that_lists_the_tags(tmp_path: Path, name: str) -> None:
    native(tmp_path, "step4")
    point(tmp_path, "step9", name)
    with pytest.raises(NotFoundError) as caught:
        find(tmp_path)
    assert str(caught.value.expected) == f"the tag 'step9' that {tmp_path / name} names"
    assert caught.value.file == str(tmp_path / "step9")
    assert "step4" in str(caught.value.found)


@pytest.mark.parametrize("name", ["latest", "latest_universal"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("..", "outside"),
        ("../other/step4", "outside"),
        ("/somewhere/step4", "outside"),
        ("step4\nstep5", r"'step4\nstep5'"),
        ("\ufeffstep4", r"'\ufeffstep4'"),
        ("a\0b", r"'a\x00b'"),
        ("x" * 4000, "'xxxx"),
    ],
)
def test_a_latest_file_that_leads_to_no_checkpoint_below_is_an_error_that_says_why(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    native(tmp_path / "run", "step4")
    native(tmp_path / "other", "step4")
    point(tmp_path / "run", text, name)
    with pytest.raises(NotFoundError) as caught:
        find(tmp_path / "run")
    assert said in str(caught.value.expected) and str(tmp_path / "run" / name) in str(caught.value.expected)
    assert caught.value.remedy == f"load_checkpoint({str(tmp_path / 'run')!r}, tag='step4')"
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("text", ["of_may/step4\r\n", "./of_may/step4/", "{}/of_may/step4", "../run/of_may//step4"])
def test_a_latest_file_may_hold_a_path_to_what_is_below(tmp_path: Path, text: str) -> None:
    native(tmp_path / "run" / "of_may", "step4")
    point(tmp_path / "run", text.format(tmp_path / "run"))
    found = found_at(tmp_path / "run")
    assert (found.tag, found.folder) == ("of_may/step4", str(tmp_path / "run" / "of_may" / "step4"))


def test_an_empty_latest_file_beside_a_checkpoints_files_names_their_folder(tmp_path: Path) -> None:
    native(tmp_path, "run")
    point(tmp_path / "run", "")
    assert found_at(tmp_path / "run").folder == str(tmp_path / "run")


@pytest.mark.parametrize("content", [b"x" * 10_000_000, b"\xff\xfe\x00step", os.urandom(300) + b"\xff"])
def test_a_latest_file_that_is_none_is_damage(tmp_path: Path, content: bytes) -> None:
    native(tmp_path, "step4")
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(DamagedError, match="names the newest tag cannot be read") as caught:
        find(tmp_path)
    assert len(str(caught.value)) < 1500


def test_a_latest_file_in_a_folder_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    point(tmp_path, "step9")
    with pytest.raises(NotFoundError, match="no checkpoint in"):
        find(tmp_path)


def test_a_universal_checkpoint_that_was_removed_does_not_stop_a_native_resume(tmp_path: Path) -> None:
    native(tmp_path, "step9", steps=9)
    point(tmp_path, "step9")
    point(tmp_path, "step4_universal", "latest_universal")  # DeepSpeed never looks at this file without load_universal
    assert found_at(tmp_path, prefer_universal=False).tag == "step9"


def test_a_native_checkpoint_that_was_removed_does_not_stop_a_preferred_universal_one(tmp_path: Path) -> None:
    universal(tmp_path, "step4_universal", steps=4)
    point(tmp_path, "step4")
    point(tmp_path, "step4_universal", "latest_universal")
    assert found_at(tmp_path, prefer_universal=True).tag == "step4_universal"


@pytest.mark.parametrize("prefer_universal", [True, False])
@pytest.mark.parametrize("removed", ["latest", "latest_universal"])
def test_a_latest_file_that_leads_nowhere_is_never_passed_over_in_silence_where_it_was_asked_for(
    tmp_path: Path, removed: str, prefer_universal: bool
) -> None:
    native(tmp_path, "step9", steps=9)
    universal(tmp_path, "step4_universal", steps=4)
    point(tmp_path, "step9")
    point(tmp_path, "step4_universal", "latest_universal")
    point(tmp_path, "gone", removed)
    asked_for = "latest_universal" if prefer_universal else "latest"
    if removed != asked_for:
        assert found_at(tmp_path, prefer_universal=prefer_universal).tag != "gone"
        return
    try:
        found = found_at(tmp_path, prefer_universal=prefer_universal)
    except NotFoundError as error:
        assert "gone" in str(error)
        return
    assert any("gone" in note for note in found.notes), "the run resumes from another checkpoint, and nobody is told"


@pytest.mark.parametrize("tag", [None, "step4"])
def test_an_empty_folder_holds_nothing(tmp_path: Path, tag: str | None) -> None:
    assert find(tmp_path, tag) is None


@pytest.mark.parametrize("tag", [None, "step4"])
def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path, tag: str | None) -> None:
    assert find(tmp_path / "not there", tag) is None


def test_a_file_instead_of_a_folder_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert find(tmp_path / "model.bin") is None


@pytest.mark.parametrize("tag", [None, "step4"])
def test_folders_of_others_hold_nothing(tmp_path: Path, tag: str | None) -> None:
    folder = tmp_path / "step4"
    folder.mkdir()
    for name in ("pytorch_model.bin", "optimizer.pt", "rng_state_0.pth", "zero_to_fp32.py", "model_states.pt"):
        (folder / name).touch()
    assert find(tmp_path, tag) is None


def test_a_hugging_face_checkpoint_folder_is_followed_to_its_deepspeed_tag(tmp_path: Path) -> None:
    inner = native(tmp_path / "checkpoint-500", "global_step500", BF16)
    for name in ("trainer_state.json", "rng_state_0.pth", "scheduler.pt", "zero_to_fp32.py"):
        (tmp_path / "checkpoint-500" / name).touch()
    point(tmp_path / "checkpoint-500", "global_step500")
    found = found_at(tmp_path / "checkpoint-500")
    assert (found.format, found.folder, found.tag) == ("native", str(inner), "global_step500")
    assert find(tmp_path) is None, "the output folder above it is not a DeepSpeed folder"


def test_folders_are_absolute_even_when_asked_for_relatively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = native(tmp_path / "run", "step4")
    point(tmp_path / "run", "step4")
    monkeypatch.chdir(tmp_path)
    found = find_checkpoint("run", None, prefer_universal=False)
    assert found is not None
    assert found.folder == str(folder)


def test_files_are_sorted_into_their_kinds_by_rank(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (10, 2, 0) for kind in ("model", "optim")]
    found = look_at(str(tmp_path), native(tmp_path, "step4", [*names, "mp_rank_01_model_states.pt", "notes.txt"]).name)
    assert found is not None
    assert set(found.files.optimizer) == {(0, 0), (2, 0), (10, 0)} == set(found.files.model_zero3)
    assert found.files.optimizer[10, 0] == "zero_pp_rank_10_mp_rank_00_optim_states.pt"
    assert found.files.model == {1: "mp_rank_01_model_states.pt"}
    assert found.files.mp_ranks == {0, 1}
    assert found.files.clashes == ()
    assert not found.files.is_universal


def test_a_bf16_and_an_fp32_save_in_one_folder_clash(tmp_path: Path) -> None:
    found = look_at(str(tmp_path), native(tmp_path, "step4", [*ZERO12, BF16[1]]).name)
    assert found is not None
    assert len(found.files.clashes) == 1


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("layer_00-model_states.pt", (0, 0)),
        ("layer_12-model_01-model_states.pt", (12, 1)),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", None),
        ("expp_rank_0_mp_rank_00_optim_states.pt", None),
    ],
)
def test_files_of_pipeline_layers_and_experts_are_recognised(
    tmp_path: Path, name: str, place: tuple[int, int] | None
) -> None:
    found = look_at(str(tmp_path), native(tmp_path, "step4", [*ZERO12, name]).name)
    assert found is not None
    assert found.files.layers == ({} if place is None else {place: name})
    assert found.files.of_experts == ((name,) if place is None else ())


def test_tags_are_listed_newest_first(tmp_path: Path) -> None:
    for age, tag in enumerate(["b", "c", "a"]):
        os.utime(native(tmp_path, tag), (1000 + age, 1000 + age))
    (tmp_path / "d").mkdir()
    (tmp_path / "latest").touch()
    assert list_tags(str(tmp_path)) == ["a", "c", "b"]
    assert list_tags(str(tmp_path / "not there")) == []


def test_folders_that_cannot_be_looked_into_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``lost+found`` of a disk, which only root may read, and a link to nothing."""
    native(tmp_path, "a")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    real = os.listdir

    def listdir(path: str) -> list[str]:
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert list_tags(str(tmp_path)) == ["a"]


def test_metadata_of_dcp_beside_files_of_deepspeed_is_not_the_checkpoint(tmp_path: Path) -> None:
    """As where a script saves its dataloader with torch.distributed.checkpoint into the tag's folder."""
    for folder in (native(tmp_path, "step8"), universal(tmp_path, "step8_universal")):
        (folder / ".metadata").touch()
        found = look_at(str(tmp_path), folder.name)
        assert found is not None and found.format == ("universal" if "universal" in folder.name else "native")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    found = look_at(str(tmp_path), "dcp")
    assert found is not None and found.format == "dcp"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_lone_checkpoint_is_not_taken_where_latest_is_no_file(tmp_path: Path, make: Callable[[Path], object]) -> None:
    native(tmp_path, "step4")
    found = find_checkpoint(str(tmp_path), None, False, without_latest=True)
    assert found is not None and found.tag == "step4"
    make(tmp_path / "latest")
    with pytest.raises((NotFoundError, DamagedError)):
        find_checkpoint(str(tmp_path), None, False, without_latest=True)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: (path / "weight").mkdir(parents=True)])
def test_a_universal_checkpoint_without_parameters_is_not_one_of_weights_alone(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    folder = native(tmp_path, "step4", ZERO12[:1])
    assert look_at(str(tmp_path), "step4") is not None
    make(folder / "zero")
    with pytest.raises(DamagedError, match="has lost its parameters") as caught:
        look_at(str(tmp_path), "step4")
    assert caught.value.file == str(folder / "zero")
    (folder / ZERO12[1]).touch()
    assert look_at(str(tmp_path), "step4") is not None, "a native one, whatever is beside it"

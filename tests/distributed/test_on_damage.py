"""``"on_damage": "previous"``: a damaged checkpoint is no dead end, and leaves nothing of itself in the engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import damage
from tests.distributed.conftest import Launch
from tests.distributed.facts import Loaded, Refused
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

NEWEST, MIDDLE, OLDEST = (f"global_step{step}" for step in (4, 3, 2))
RANK0, RANK1 = (damage.OPTIMIZER.format(rank) for rank in (0, 1))
MODEL = "mp_rank_00_model_states.pt"
FP16 = Setup(2, "fp16")
PREVIOUS = {"on_damage": "previous"}
Change = Callable[[Path], Any]


def both(change: Change, other: Change) -> dict[str, Change]:
    return {NEWEST: change, MIDDLE: other}


def live(stage: int, precision: str = "fp32", **section: Any) -> Setup:
    return Setup(stage, precision, config=(("elastic_checkpoint", PREVIOUS | section),))


NO_FILE = both(damage.remove(RANK1), damage.truncate(RANK0, 0.5))
#: Saved setup, live setup, what happens to each tag, and more about the load.
CASES: dict[str, tuple[Setup, Setup, dict[str, Change], dict[str, Any]]] = {
    "z1 to z2, bits of masters": (Setup(1), live(2), both(damage.flip_bit(RANK1, "fp32", 0.4), damage.flip_bit(RANK0, "fp32", 0.9)), {}),
    "z3, a bit, then a file of zeros": (Setup(3), live(3), both(damage.flip_bit(RANK1, "fp32", 0.4), damage.truncate(RANK0, 0)), {}),
    "z0, a bit of masters": (Setup(0), live(0), both(damage.flip_bit(MODEL, "module", 0.4), damage.rewrite_pickle(MODEL)), {}),
    "fp16, files missing": (FP16, live(1, "fp16"), NO_FILE, {}),
    "fp16, a bit": (FP16, live(3, "fp16"), both(damage.flip_bit(RANK0, "fp32", 0.4), damage.remove(MODEL)), {}),
    "a tag": (Setup(1), live(1), {MIDDLE: damage.remove(RANK1)}, {"arguments": {"tag": MIDDLE}}),
    "a disk that one rank cannot read": (Setup(1), live(3), {MIDDLE: damage.remove(RANK1)}, {"sick": NEWEST}),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thrice")
    launch(2, "damage_jobs.save_thrice", {"folder": str(folder), "setups": [Setup(0), Setup(1), Setup(3), FP16]})
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return copier(saved, tmp_path_factory)


def copier(saved: Path, factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a copy of a setup's three saves with some of them changed."""

    def make(setup: Setup, changes: dict[str, Change]) -> Path:
        folder = factory.mktemp("damaged") / "copy"
        shutil.copytree(saved / setup.name, folder)
        for tag, change in changes.items():
            (folder / "only").mkdir()
            (folder / tag).rename(folder / "only" / tag)
            change(folder / "only")
            (folder / "only" / tag).rename(folder / tag)
            (folder / "only").rmdir()
        return folder

    return make


@pytest.fixture(scope="module")
def loads(launch: Launch, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Loaded]]:
    make, found = copier(saved, tmp_path_factory), {}
    cases = [
        {"name": name, "folder": str(make(source, changes)), "setup": setup, **more}
        for name, (source, setup, changes, more) in CASES.items()
    ]
    for loaded in launch(3, "damage_jobs.fall_back", cases):
        found.setdefault(loaded.case["name"], []).append(loaded)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_newest_whole_checkpoint_replaces_everything_bit_by_bit(name: str, loads: dict[str, list[Loaded]]) -> None:
    assert len(loads[name]) == 3
    for loaded in loads[name]:
        assert loaded.differences == {}, loaded.where
        assert loaded.report is not None and loaded.report.source.folder.endswith(OLDEST)
        assert loaded.report.global_steps == 2
        skipped = {MIDDLE} if name == "a tag" else {NEWEST, MIDDLE}
        notes = [note for note in loaded.report.notes if "skipped" in note]
        assert {tag for tag in (NEWEST, MIDDLE) if any(tag in note for note in notes)} == skipped
        assert any(f"loaded {OLDEST} instead" in note for note in loaded.report.notes)
    lines = [line for loaded in loads[name] for line in loaded.lines if "skipped" in line]
    assert len(lines) == len(skipped), "rank 0 warns, once for each"
    lost = [line for loaded in loads[name] for line in loaded.lines if "lost" in line]
    assert len(lost) == 1 and f"loaded {OLDEST} instead" in lost[0], "and says what is lost, once"
    assert not any("loaded" in line for line in lines), "not before it is"


def test_there_may_be_nothing_else_to_load(launch: Launch, copy: Callable[..., Path]) -> None:
    bit, gone = damage.flip_bit(RANK1, "fp32", 0.4), damage.remove(RANK1)
    no_names = damage.edit(MODEL, lambda tree: tree.pop("buffer_names"))
    one_more = damage.edit(MODEL, lambda tree: tree["param_shapes"].append({}))
    no_scheduler = damage.edit(MODEL, lambda tree: tree.update(lr_scheduler=None))
    cases: list[dict[str, Any]] = [
        {"folder": copy(Setup(1), {NEWEST: gone}), "setup": live(1, on_damage=0)},
        {"folder": copy(Setup(1), {NEWEST: gone, MIDDLE: gone, OLDEST: gone}), "setup": live(1)},
        {"folder": copy(Setup(1), {NEWEST: bit, MIDDLE: gone, OLDEST: no_scheduler}), "setup": live(2)},
        {"folder": copy(Setup(1), {NEWEST: bit, MIDDLE: gone, OLDEST: gone}), "setup": live(3)},
        {"folder": copy(Setup(1), {NEWEST: gone}), "setup": Setup(1)},
        {"folder": copy(Setup(1), {}), "setup": live(1), "arguments": {"tag": "global_step9"}},
        # which a version of DeepSpeed may not write, or a writer of another kind
        {"folder": copy(Setup(1), {NEWEST: no_names}), "setup": live(3)},
        {"folder": copy(Setup(1), {NEWEST: one_more}), "setup": live(3)},
    ]
    found: list[Refused] = launch(2, "damage_jobs.give_up", [{**case, "folder": str(case["folder"])} for case in cases])
    limit, none, left, last, plain, tag, *unproven = found
    assert [refused.kinds[0] for refused in unproven] == ["UnknownLayoutError", "LayoutError"]
    for refused in unproven:
        assert refused.changed == set()
        assert all("goes back for proven damage alone" in text for text in refused.texts)
    assert all(len(refused.texts) == 1 for refused in found)
    assert all("on_damage" in text for text in limit.texts) and limit.kinds[0] == "MissingFilesError"
    assert all(NEWEST in text and MIDDLE in text and OLDEST in text for text in none.texts)
    assert limit.changed == none.changed == plain.changed == tag.changed == set()
    assert left.kinds[0] == last.kinds[0] == "PartialLoadError"
    assert all("does not replace all" in text and "lr scheduler" in text for text in left.texts)
    assert plain.kinds[0] == "MissingFilesError" and tag.kinds[0] == "NotFoundError"


def test_pipelines_fall_back_too(launch: Launch, tmp_path: Path) -> None:
    setup = Parallel("pipeline", "uniform", pp=2, stage=1)
    launch(2, "parallel_jobs.save", {"folder": str(tmp_path), "setups": [setup]})
    (folder,) = tmp_path.iterdir()
    newest = Path(shutil.copytree(folder / "step4", folder / "global_step9"))
    for path in newest.glob("*_states.pt"):  # other moments and counters
        tree = torch.load(path, weights_only=False)
        if "optim" in path.name:
            for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                state["exp_avg"].mul_(3)
        elif not path.name.startswith("layer"):
            tree |= {"global_steps": 9, "skipped_steps": 5}
        torch.save(tree, path)
    shutil.copytree(newest, tmp_path / "only" / newest.name)
    damage.flip_bit(RANK0.replace("mp_rank_00", "mp_rank_01"), "fp32", 0.4)(tmp_path / "only")
    shutil.copytree(tmp_path / "only" / newest.name, newest, dirs_exist_ok=True)
    (folder / "latest").write_text(newest.name)
    target = {"setup": setup, "config": {"elastic_checkpoint": PREVIOUS}, "sources": [{"folder": str(folder)}]}
    for loaded in launch(2, "parallel_jobs.load", [target]):
        assert loaded.differences == {} and loaded.report.source.folder == str(folder / "step4"), loaded.where
        assert loaded.report.notes[0].startswith(
            "skipped global_step9: bytes of the checkpoint are not those that were saved"
        )


def test_files_that_arrive_late_are_waited_for(launch: Launch, native: Path, tmp_path: Path) -> None:
    source = native / "z3-fp32-adamw-dp2"
    late = tmp_path / "late"
    (late / "step4").mkdir(parents=True)
    for name in ("latest", "truth.pt"):
        shutil.copy(source / name, late / name)
    setup = Setup(1, config=(("elastic_checkpoint", {"wait_for_files": 60}),))
    for found in launch(
        2, "damage_jobs.arrive_late", {"folder": str(late), "whole": str(source / "step4"), "setup": setup}
    ):
        assert found.differences == {} and 1 < found.seconds < 60

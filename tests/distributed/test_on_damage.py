"""``"on_damage": "previous"``: a damaged checkpoint is no dead end, and leaves nothing of itself in the engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.distributed import damage
from tests.distributed.cells import Cell, Change, Save, cells
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

NEWEST, MIDDLE, OLDEST = (f"global_step{step}" for step in (4, 3, 2))
RANK0, RANK1 = map(damage.OPTIMIZER.format, range(2))
MODEL = "mp_rank_00_model_states.pt"
FP16 = Setup(2, "fp16")
PREVIOUS = {"on_damage": "previous"}


def thrice(setup: Setup) -> Save:
    return Save(setup, 2, "damage_jobs.save_thrice")


def live(stage: int, precision: str = "fp32", **section: Any) -> Setup:
    return Setup(stage, precision, config=(("elastic_checkpoint", PREVIOUS | section),))


def in_tags(changes: Mapping[str, Change]) -> Change:
    """Some of the saves of a folder are changed, each as if it were the only one."""

    def apply(copy: Path) -> None:
        for tag, change in changes.items():
            (copy / "only").mkdir()
            (copy / tag).rename(copy / "only" / tag)
            change(copy / "only")
            (copy / "only" / tag).rename(copy / tag)
            (copy / "only").rmdir()

    return apply


def falls_back(name: str, source: Setup, target: Setup, newest: Change | None, middle: Change, **case: Any) -> Cell:
    """A load of the oldest of three saves; ``expected``: the tags that it skips."""
    changes = {MIDDLE: middle} if newest is None else {NEWEST: newest, MIDDLE: middle}
    skipped = {MIDDLE} if case.get("arguments") else {NEWEST, MIDDLE}
    more = {"setup": target, **case}
    return Cell(name, thrice(source), "damage_jobs.fall_back", 3, more, in_tags(changes), expected=skipped)


GONE = damage.remove(RANK1)
BIT = damage.flip_bit(RANK1, "fp32", 0.4)
BIT0 = damage.flip_bit(RANK0, "fp32", 0.4)
BIT_OF_MODEL = damage.flip_bit(MODEL, "module", 0.4)


@cells(
    [
        falls_back("z1 to z2, bits of masters", Setup(1), live(2), BIT, damage.flip_bit(RANK0, "fp32", 0.9)),
        falls_back("z3, a bit, then a file of zeros", Setup(3), live(3), BIT, damage.truncate(RANK0, 0)),
        falls_back("z0, a bit of masters", Setup(0), live(0), BIT_OF_MODEL, damage.rewrite_pickle(MODEL)),
        falls_back("fp16, files missing", FP16, live(1, "fp16"), GONE, damage.truncate(RANK0, 0.5)),
        falls_back("fp16, a bit", FP16, live(3, "fp16"), BIT0, damage.remove(MODEL)),
        falls_back("a tag", Setup(1), live(1), None, GONE, arguments={"tag": MIDDLE}),
        falls_back("a disk that one rank cannot read", Setup(1), live(3), None, GONE, sick=NEWEST),
    ]
)
def test_the_newest_whole_checkpoint_replaces_everything_bit_by_bit(cell: Cell, facts: list[Loaded]) -> None:
    for loaded in facts:
        assert loaded.differences == {}, loaded.where
        assert loaded.report is not None and loaded.report.source.folder.endswith(OLDEST)
        assert loaded.report.global_steps == 2
        notes = [note for note in loaded.report.notes if "skipped" in note]
        assert {tag for tag in (NEWEST, MIDDLE) if any(tag in note for note in notes)} == cell.expected
        assert any(f"loaded {OLDEST} instead" in note for note in loaded.report.notes)
    lines = [line for loaded in facts for line in loaded.lines if "skipped" in line]
    assert len(lines) == len(cell.expected), "rank 0 warns, once for each"
    lost = [line for loaded in facts for line in loaded.lines if "lost" in line]
    assert len(lost) == 1 and f"loaded {OLDEST} instead" in lost[0], "and says what is lost, once"
    assert not any("loaded" in line for line in lines), "not before it is"
    assert len(facts) == cell.ranks


def gives_up(
    name: str, target: Setup, changes: Mapping[str, Change], error: str, *words: str, arguments: Any = None
) -> Cell:
    """A load for which there is no other checkpoint."""
    save, case = thrice(Setup(1)), {"setup": target}
    return Cell(
        name,
        save,
        "refusal_jobs.refuse",
        3,
        case | ({"arguments": arguments} if arguments else {}),
        in_tags(changes),
        expected=Refuses(error, words),
        fits=(save, case),
    )


MISSING = {NEWEST: GONE, MIDDLE: GONE, OLDEST: GONE}
#: Which a version of DeepSpeed may not write, or a writer of another kind.
NO_NAMES = damage.edit(MODEL, lambda tree: tree.pop("buffer_names"))
ONE_MORE = damage.edit(MODEL, lambda tree: tree["param_shapes"].append({}))
UNPROVEN = "goes back only for proven damage"


@cells(
    [
        gives_up("a limit", live(1, on_damage=0), {NEWEST: GONE}, "MissingFilesError", "on_damage"),
        gives_up("none is whole", live(1), MISSING, "DamagedError", NEWEST, MIDDLE, OLDEST),
        gives_up("not asked for", Setup(1), {NEWEST: GONE}, "MissingFilesError"),
        gives_up("no such tag", live(1), {}, "NotFoundError", arguments={"tag": "global_step9"}),
        gives_up("no names of buffers", live(3), {NEWEST: NO_NAMES}, "UnknownLayoutError", UNPROVEN),
        gives_up("a param group more", live(3), {NEWEST: ONE_MORE}, "LayoutError", UNPROVEN),
    ]
)
def test_there_may_be_nothing_else_to_load(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)
    if cell.name != "none is whole":
        assert [refused.kinds[0] for refused in facts] == [cell.expected.error]


NO_SCHEDULER = damage.edit(MODEL, lambda tree: tree.update(lr_scheduler=None))
LEFT = {NEWEST: BIT, MIDDLE: GONE, OLDEST: NO_SCHEDULER}
WORDS = ("does not replace all", "lr scheduler")


@cells(
    [
        gives_up("an older one that has less", live(2), LEFT, "PartialLoadError", *WORDS),
        gives_up("no older one that is whole", live(3), {**MISSING, NEWEST: BIT}, "PartialLoadError"),
    ]
)
def test_an_engine_that_was_overwritten_is_not_left_to_a_checkpoint_with_less(cell: Cell, facts: list[Refused]) -> None:
    for refused in facts:
        (text,) = refused.texts
        assert refused.kinds[:1] == (cell.expected.error,), text
        assert [words for words in cell.expected.words if words not in text] == [], text


PIPELINE = Parallel("pipeline", "uniform", pp=2, stage=1)


def add_a_damaged_one(folder: Path) -> None:
    """A newer save, with other moments and counters, of which a bit of a master is flipped."""
    newest = Path(shutil.copytree(folder / "step4", folder / "only" / "global_step9"))
    for path in newest.glob("*_states.pt"):
        tree = torch.load(path, weights_only=False)
        if "optim" in path.name:
            for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                state["exp_avg"].mul_(3)
        elif not path.name.startswith("layer"):
            tree |= {"global_steps": 9, "skipped_steps": 5}
        torch.save(tree, path)
    damage.flip_bit(RANK0.replace("mp_rank_00", "mp_rank_01"), "fp32", 0.4)(folder / "only")
    newest.rename(folder / newest.name)
    (folder / "only").rmdir()
    (folder / "latest").write_text(newest.name)


@cells(
    [
        Cell(
            "a pipeline",
            Save(PIPELINE, 2, "parallel_jobs.save_each"),
            "parallel_jobs.resume",
            2,
            {"setup": PIPELINE, "config": {"elastic_checkpoint": PREVIOUS}},
            add_a_damaged_one,
        )
    ]
)
def test_pipelines_fall_back_too(cell: Cell, facts: list[Loaded]) -> None:
    for loaded in facts:
        assert loaded.differences == {} and loaded.report.source.folder.endswith("/step4"), loaded.where
        assert loaded.report.notes[0].startswith(
            "skipped global_step9: bytes of the checkpoint are not those that were saved"
        )


WAITING = Setup(1, config=(("elastic_checkpoint", {"wait_for_files": 60}),))


@cells([Cell("half-written files", Save(Setup(3)), "damage_jobs.arrive_late", 2, {"setup": WAITING})])
def test_files_that_arrive_late_are_waited_for(cell: Cell, facts: list[Loaded]) -> None:
    for loaded in facts:
        assert loaded.differences == {}, loaded.where
    assert [line for line in facts[0].lines if "waits up to 60 s for files" in line], "they were not there at first"

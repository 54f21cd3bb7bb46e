"""Checkpoints that no node sees whole: saved by DeepSpeed to disks of nodes, resumed on others.

A folder stands for the disk of each node. What commands say of them takes no ranks, and shares the saves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from tests.distributed.cells import Cell, Change, Save, Saves, cells
from tests.distributed.damage import flip_bit
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.model import Setup

SETUPS = [Setup(0), Setup(1), Setup(2, precision="bf16"), Setup(3), Setup(3, precision="bf16")]
MEMORY = [Setup(1), Setup(2, precision="bf16"), Setup(3)]
FOUR = "abcd"
DAMAGED = "was damaged in another copy"


def saved_of(setup: Setup) -> Save:
    """Saved on two nodes of two ranks each, at steps 2 and 4."""
    return Save(setup, 4, "node_jobs.save_each", {"nodes": [*"aabb"], "older": True})


def replicated(setup: Setup, nodes: str = FOUR, source: Save | None = None, **more: Any) -> Save:
    """Saved on nodes of one rank each; each node has the next one's files, too."""
    return Save(setup, len(nodes), "node_jobs.save_each", {"nodes": [*nodes], "replicas": 1, **more}, source=source)


def on(nodes: str, save: Save, setup: Setup, name: str = "", change: Change | None = None, **case: Any) -> Cell:
    """A load into this engine by one rank of each of these nodes, in their order."""
    title = f"{name or f'{save.setup.name} to {setup.name}'} on {nodes}"
    case = {"setup": setup, "nodes": [*nodes], **case}
    return Cell(title, save, "node_jobs.load_on_nodes", len(nodes), case, change)


def refused(
    nodes: str,
    save: Save,
    setup: Setup,
    error: str,
    *words: str,
    change: Change | None = None,
    whole: str = "",
    **case: Any,
) -> Cell:
    """Such a load that must fail. ``whole``: as many nodes that have all files, if these would not."""
    fits = {"setup": setup, "nodes": [*(whole or nodes)]}
    return Cell(
        f"{[*words, error][0]}, {save.setup.name} to {setup.name} on {nodes}",
        save,
        "node_jobs.refuse_on_nodes",
        len(nodes),
        {"setup": setup, "nodes": [*nodes], **case},
        change,
        expected=Refuses(error, words),
        fits=(save, fits),
    )


def assert_exact(cell: Cell, facts: list[Loaded]) -> None:
    assert len(facts) == cell.ranks
    for each in facts:
        assert each.differences == {} and each.loss_gap < (5e-3 if "bf16" in each.where else 1e-5), each.where


def file_of(setup: Setup, rank: int) -> str:
    """A rank's masters and states."""
    return f"{'bf16_' if setup.precision == 'bf16' else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@cells([on(nodes, saved_of(setup), setup) for nodes in ("baba", "abb", "ba") for setup in SETUPS])
def test_ranks_resume_on_any_of_the_nodes(cell: Cell, facts: list[Loaded]) -> None:
    assert_exact(cell, facts)
    for each in facts:
        if cell.case["setup"].stage:  # else each node has all, of which DeepSpeed's own loader takes its node's
            assert " on 2 nodes, of which " in each.text, each.where


@pytest.mark.parametrize("setup", SETUPS[1:], ids=lambda setup: setup.name)
def test_no_node_sees_the_whole_checkpoint(setup: Setup, saves: Saves) -> None:
    saved = saves.folder(saved_of(setup))
    names = [{path.name for path in (saved / node / "run" / "step4").glob("*optim*")} for node in "ab"]
    assert names[0] and names[1] and not names[0] & names[1]


#: Each checkpoint in memory, and an engine of another stage.
MOVED = [(one, Setup(other.stage, one.precision)) for one, other in zip(MEMORY, MEMORY[1:] + MEMORY[:1], strict=True)]


def without(*nodes: str) -> Change:
    """These nodes are lost."""
    return lambda disks: [shutil.rmtree(disks / node) for node in nodes]


@cells(
    [on(FOUR.replace(lost, ""), replicated(one), other, change=without(lost)) for lost in FOUR for one, other in MOVED]
)
def test_a_job_goes_on_from_memory_without_a_node(cell: Cell, facts: list[Loaded]) -> None:
    assert_exact(cell, facts)


#: Whether the first and the last parameter are in the third of four partitions: both, where each is partitioned.
WHERE = [(True, True), (False, True), (False, False)]
THIRD = ("zero_pp_rank_2_mp_rank_00", "files on all nodes: ", "(rank 0) has ")


@cells(
    [
        refused("ad", replicated(one), other, "ElasticCkptError", *THIRD, change=without("b", "c"), whole="ac")
        for one, other in MOVED
    ]
)
def test_two_neighbours_lost_are_refused_by_name(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)
    for each in facts:
        (text,) = each.texts
        (parameters,) = re.findall(r"parameter: +(.*)", text)  # of ZeRO-1 and 2, those in the third partition alone
        assert ("embedding.weight" in parameters, "norm.bias" in parameters) in WHERE, parameters


def flip_bits(name: str, disk: Path) -> None:
    """Flip bits all over a file's masters, so that whoever reads of them reads one."""
    for part in range(100):
        flip_bit(name, "fp32", part / 100)(disk)


def flip_in_memory(setup: Setup) -> Change:
    """Bits of the second rank's masters in the memory of its node, wherever ranks on other nodes read."""

    def change(disks: Path) -> None:
        run, name = disks / "b" / "run", file_of(setup, 1)
        written = (run / "step4" / name).stat().st_mtime_ns
        for tenth in range(10):
            flip_bit(name, "fp32", tenth / 10)(run)
        os.utime(run / "step4" / name, ns=(written, written))  # as memory that has lost bits leaves it

    return change


@cells([on("bda", replicated(one), other, change=flip_in_memory(one)) for one, other in MOVED])
def test_a_copy_with_a_flipped_bit_is_left_out(cell: Cell, facts: list[Loaded]) -> None:
    assert_exact(cell, facts)
    assert all(DAMAGED in each.text for each in facts)


def other_client_state(disks: Path) -> None:
    """Both nodes have all files, of which one is longer on one of them."""
    for one, other in (("a", "b"), ("b", "a")):
        for file in (disks / one / "run").rglob("*_optim_states.pt"):
            shutil.copy2(file, disks / other / "run" / file.parent.name / file.name)
    file = disks / "b" / "run" / "step4" / "mp_rank_00_model_states.pt"
    tree = torch.load(file, weights_only=False)
    torch.save({**tree, "longer": "x" * 9999}, file)
    shutil.copy(disks / "a" / "run" / "latest", disks / "b" / "run")


def same_names(disks: Path) -> None:
    """Both nodes have all files, each in a folder of its own name."""
    other_client_state(disks)
    name = Path("run") / "step4" / "mp_rank_00_model_states.pt"
    shutil.copy2(disks / "a" / name, disks / "b" / name)


def one_node_has_it(disks: Path) -> None:
    """A universal checkpoint that was converted on one of the nodes, which alone names it."""
    folders = [disks / node / "run" for node in "ab"]
    result = CliRunner().invoke(app, ["convert", *map(str, folders), str(folders[1] / "universal")])
    assert result.exit_code == 0, result.output
    for latest in disks.glob("*/run/latest"):
        latest.unlink()


def odd_things(disks: Path) -> None:
    """What is in no save: a pipe, links in a circle, a link to nothing, a folder of the same save under another name."""
    run = disks / "a" / "run"
    os.mkfifo(run / "step4" / "pipe")
    (run / "step4" / "around").symlink_to(run)
    (run / "step4" / "far").symlink_to("/")
    (run / "loop").symlink_to(run / "loop")
    (run / "gone").symlink_to("nothing")
    for each in disks.glob("*/run"):
        (each / "again").symlink_to("step4")


def deep_tag(disks: Path) -> None:
    for run in disks.glob("*/run"):
        (run / "deep").mkdir()
        (run / "step4").rename(run / "deep" / "step4")
        (run / "latest").write_text("deep/step4")


def both_folders(disks: Path) -> None:
    """Node b is lost, but for a folder on a disk that all share."""
    (disks / "b" / "run").rename(disks / "shared")


STAGE1 = saved_of(Setup(1))


def odd(name: str, change: Change, **case: Any) -> Cell:
    cell = on("bab", STAGE1, Setup(3), name, change, **case)
    return replace(cell, fits=(STAGE1, {"setup": Setup(3), "nodes": [*"bab"]}))


@cells(
    [
        odd("universal", one_node_has_it),
        odd("tag", one_node_has_it, arguments={"tag": "universal"}),
        odd("things", odd_things, section={"mode": "require"}),
        odd("spelling", odd_things, arguments={"tag": "./again/"}),
        odd("deep", deep_tag),
        odd("sizes", other_client_state),
        odd("names", same_names),
        odd("fallback", both_folders, fallbacks=["none", "shared"]),
    ]
)
def test_odd_folders_are_loaded_from_all_nodes(cell: Cell, facts: list[Loaded]) -> None:
    assert_exact(cell, facts)


def two_saves(disks: Path) -> None:
    """Under one name, node a has another rank's file of the save before, as after a restart that moved ranks."""
    name = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy2(disks / "b/run/step2" / name, disks / "a/run/step4" / name)
    os.utime(disks / "a/run/step4" / name)


def newest_is_damaged(disks: Path) -> None:
    """A file of the newest tag is cut short, and in the older one a copy has a flipped bit."""
    name, run = "zero_pp_rank_2_mp_rank_00_optim_states.pt", disks / "b" / "run"
    (run / "step4" / name).write_bytes((run / "step4" / name).read_bytes()[:4000])
    shutil.copy2(run / "step2" / name, disks / "a" / "run" / "step2")
    flip_bits(name, disks / "a" / "run")  # whose first tag is the older one


DIFFERENT = ("different files under one name", "/a/run/step4 on ", "/b/run/step4 on ")


@cells(
    [
        refused("ba", STAGE1, Setup(3), "ElasticCkptError", *DIFFERENT, change=two_saves),
        refused("ba", STAGE1, Setup(3), "ElasticCkptError", "step9", "step4", arguments={"tag": "step9"}),
    ]
)
def test_what_is_of_no_one_save_is_refused_on_all_nodes(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@cells([on("ba", STAGE1, Setup(3), "an older one", newest_is_damaged, section={"on_damage": "previous"})])
def test_an_older_checkpoint_is_taken_from_all_nodes_and_from_other_copies(cell: Cell, facts: list[Loaded]) -> None:
    for each in facts:
        assert "loaded step2 instead, 2 steps back" in each.text and DAMAGED in each.text, each.text


def of_command(name: str, *words: object) -> Any:
    result = CliRunner().invoke(app, [name, *map(str, words)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize("setup", SETUPS[1:], ids=lambda setup: setup.name)
def test_commands_see_the_folders_of_all_nodes_as_one(setup: Setup, saves: Saves, tmp_path: Path) -> None:
    saved = saves.folder(saved_of(setup))
    folders = [saved / node / "run" for node in "ba"]
    assert of_command("verify", folders[0])[0] == 1
    code, text = of_command("verify", *folders, "--full")
    assert code == 0 and f" in 2 folders, of which {folders[0]} has " in text, text
    assert of_command("verify", *(folder / "step2" for folder in folders))[0] == 0
    assert of_command("latest", *folders) == (0, f"{folders[0] / 'step4'}\n")
    assert elastic_ckpt.find_latest(folders) == str(folders[0] / "step4")
    code, text = of_command("inspect", *folders, "--json")
    found = json.loads(text)
    assert code == 0 and {Path(file["path"]).parents[1] for file in found["files"]} == {*folders}
    assert of_command("plan", *folders, "--dp", 3)[0] == 0
    masters = torch.load(saved / "truth.pt", weights_only=False)["masters"]
    out = tmp_path / "weights"
    assert of_command("export", *folders, out)[0] == 0
    for checkpoint in (elastic_ckpt.open(folders), elastic_ckpt.open(out)):
        assert masters and all(torch.equal(checkpoint[name], values) for name, values in masters.items())
    if setup.stage == 1:
        assert of_command("convert", *folders, tmp_path / "universal")[0] == 0
        assert of_command("verify", tmp_path / "universal", "--full")[0] == 0
    code, text = of_command("export", *folders, folders[1] / "step4" / "weights")
    assert code == 2 and f"a folder inside {folders[1] / 'step4'}" in text, text


@pytest.mark.parametrize("setup", MEMORY, ids=lambda setup: setup.name)
def test_verify_names_what_no_folder_has_and_the_copy_that_is_damaged(
    setup: Setup, saves: Saves, tmp_path: Path
) -> None:
    memory = shutil.copytree(saves.folder(replicated(setup)), tmp_path / "memory")
    folders = [memory / node / "run" for node in FOUR]
    assert of_command("verify", *folders, "--full")[0] == 0
    name = file_of(setup, 2)
    for folder in folders[:3]:
        if (folder / "step4" / name).exists():
            changed = folder  # the last copy, which nothing else reads
    times = (changed / "step4" / name).stat()
    flip_bit(name, "fp32", 0.5)(changed)
    os.utime(changed / "step4" / name, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it
    code, text = of_command("verify", *folders, "--full")
    assert code == 1 and text.count("checksum: ") == 1 and f"{changed}/step4/{name}" in text, text
    assert of_command("verify", *folders[3:], *folders[:1])[0] == 1
    code, text = of_command("verify", *folders[3:], folders[0])
    assert f"{name}: no such file in any of these folders" in text, text
    code, text = of_command("verify", *folders, tmp_path / "none")
    assert code == 3 and "there is no such folder" in text


AGAIN = [Setup(1), Setup(3)]


def saved_twice(setup: Setup) -> Save:
    """A tag that another run has saved before."""
    return replicated(setup, "abc", source=replicated(setup, "abc", first=30))


@cells(
    [
        *(on("abc", saved_twice(setup), setup) for setup in AGAIN),
        *(on("ca", saved_twice(setup), setup, change=without("b")) for setup in AGAIN),
    ]
)
def test_a_tag_that_is_saved_over_and_replicated_again_is_one_save(
    cell: Cell, facts: list[Loaded], saves: Saves
) -> None:
    for node in "abc":
        (tag,) = (saves.folder(saved_twice(cell.case["setup"])) / node / "run" / ".replicas").glob("step*")
        assert tag.name == "step4" and not [*tag.glob("*.partial")]
    assert_exact(cell, facts)


def flip_a_moment(setup: Setup) -> Change:
    """In the memory of one node; and files that no loader reads differ between all."""

    def change(disks: Path) -> None:
        flip_bit(file_of(setup, 1), "exp_avg", 0.5)(disks / "b" / "run")
        for node in FOUR:
            (disks / node / "run" / "step4" / "log.pt").write_text(node)

    return change


def save_over_one(disks: Path, other: Path) -> None:
    """One node has another run's files, whose copies are of this one's."""
    shutil.rmtree(disks / "b" / "run" / "step4")
    shutil.copytree(other / "b" / "run" / "step4", disks / "b" / "run" / "step4")


@cells([on(FOUR, replicated(setup), setup, change=flip_a_moment(setup)) for setup in MEMORY])
def test_at_the_same_topology_nothing_is_left_to_a_loader_that_compares_less(cell: Cell, facts: list[Loaded]) -> None:
    assert_exact(cell, facts)
    assert all(DAMAGED in each.text for each in facts), "not what is in b's file"


def of_another_run(setup: Setup) -> Cell:
    cell = refused(FOUR, replicated(setup), setup, "ConflictingCopiesError", change=save_over_one)
    other = Save(setup, 4, "node_jobs.save_each", {"nodes": [*FOUR], "first": 30})
    return replace(cell, others=(other,))


@cells([of_another_run(setup) for setup in MEMORY])
def test_at_the_same_topology_a_node_of_another_run_is_refused(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


def of_one_rank_each(setup: Setup, **more: Any) -> Save:
    """Saved on four nodes of one rank each, which have no other files."""
    return Save(setup, 4, "node_jobs.save_each", {"nodes": [*FOUR], **more})


def partitions_of_another_run(*nodes: str) -> Change:
    """The same steps of the same model, on other data."""

    def change(disks: Path, other: Path) -> None:
        for node in nodes:
            for path in (other / node / "run" / "step4").glob("*_optim_states.pt"):
                shutil.copy2(path, disks / node / "run" / "step4")

    return change


def exchanged(disks: Path, other: Path) -> None:
    """Two nodes have each other's partition, under the name of their own."""
    first, second = (next((disks / node / "run" / "step4").glob("*_optim_states.pt")) for node in "ab")
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def mixed(setup: Setup, what: str, change: Change) -> Cell:
    cell = refused(FOUR, of_one_rank_each(setup), setup, "DamagedError", change=change)
    return replace(cell, name=f"{setup.name}, {what}", others=(of_one_rank_each(setup, first=30),))


MIXED = [
    *(mixed(setup, "exchanged", exchanged) for setup in MEMORY),
    *(
        mixed(setup, f"of another run: {nodes}", partitions_of_another_run(*nodes))
        for setup in MEMORY[:2]
        for nodes in ("b", FOUR)
    ),
]


@cells(MIXED)
def test_at_the_same_topology_partitions_of_no_one_save_are_refused(cell: Cell, facts: list[Refused]) -> None:
    """Below ZeRO-3, weights beside the masters tell whose they are."""
    cell.expected.check(facts)

"""Checkpoints that no node sees whole: saved by DeepSpeed to disks of nodes, resumed on others."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.damage import flip_bit
from tests.distributed.facts import Loaded, Refused
from tests.distributed.model import Setup

SETUPS = [Setup(0), Setup(1), Setup(2, precision="bf16"), Setup(3), Setup(3, precision="bf16")]
TWO_BY_TWO = ["a", "a", "b", "b"]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved on two nodes of two ranks each, at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("nodes")
    launch(4, "node_jobs.save_on_nodes", {"folder": str(folder), "setups": SETUPS, "nodes": TWO_BY_TWO, "older": True})
    return folder


def cases(folder: Path, nodes: list[str], **more: Any) -> list[dict[str, Any]]:
    return [{"folder": str(folder / setup.name), "setup": setup, "nodes": nodes, **more} for setup in SETUPS]


def assert_exact(found: list[Loaded], count: int) -> None:
    assert len(found) == count
    for each in found:
        assert each.differences == {} and each.loss_gap < (5e-3 if "bf16" in each.where else 1e-5), each.where


def test_no_node_sees_the_whole_checkpoint(saved: Path) -> None:
    for setup in SETUPS[1:]:
        names = [{path.name for path in (saved / setup.name / node / "run" / "step4").glob("*optim*")} for node in "ab"]
        assert names[0] and names[1] and not names[0] & names[1]


@pytest.mark.parametrize("nodes", [["b", "a", "b", "a"], ["a", "b", "b"], ["b", "a"]], ids="-".join)
def test_ranks_resume_on_any_of_the_nodes(saved: Path, launch: Launch, nodes: list[str]) -> None:
    found = launch(len(nodes), "node_jobs.load_on_nodes", cases(saved, nodes))
    assert_exact(found, len(nodes) * len(SETUPS))
    for each in found:
        if each.case["setup"].stage:  # else each node has all, of which DeepSpeed's own loader takes its node's
            assert " on 2 nodes, of which " in each.text, each.where


FOUR = ["a", "b", "c", "d"]
MEMORY = [Setup(1), Setup(2, precision="bf16"), Setup(3)]


@pytest.fixture(scope="module")
def replicated(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved on four nodes of one rank each; each node has the next one's files, too."""
    folder = tmp_path_factory.mktemp("memory")
    launch(4, "node_jobs.save_on_nodes", {"folder": str(folder), "setups": MEMORY, "nodes": FOUR, "replicas": 1})
    return folder


@pytest.fixture
def memory(replicated: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(replicated, tmp_path / "memory")


def elsewhere(folder: Path, nodes: list[str], **more: Any) -> list[dict[str, Any]]:
    """Each checkpoint at another stage."""
    pairs = zip(MEMORY, MEMORY[1:] + MEMORY[:1], strict=True)
    moved = [(one, Setup(other.stage, one.precision)) for one, other in pairs]
    return [{"folder": str(folder / one.name), "setup": other, "nodes": nodes, **more} for one, other in moved]


@pytest.mark.parametrize("lost", FOUR)
def test_a_job_goes_on_from_memory_without_a_node(memory: Path, launch: Launch, lost: str) -> None:
    for setup in MEMORY:
        shutil.rmtree(memory / setup.name / lost)
    left = [node for node in FOUR if node != lost]
    assert_exact(launch(3, "node_jobs.load_on_nodes", elsewhere(memory, left)), 3 * len(MEMORY))


#: Whether the first and the last parameter are in the third of four partitions: both, where each is partitioned.
WHERE = [(True, True), (False, True), (False, False)]


def test_two_neighbours_lost_are_refused_by_name(memory: Path, launch: Launch) -> None:
    for setup in MEMORY:
        for node in "bc":
            shutil.rmtree(memory / setup.name / node)
    found: list[Refused] = launch(2, "node_jobs.refuse_on_nodes", elsewhere(memory, ["a", "d"]))
    for each in found:
        assert len(each.texts) == 1 and each.changed == frozenset(), each
        (text,) = each.texts
        assert "zero_pp_rank_2_mp_rank_00" in text and "files on all nodes: " in text and "(rank 0) has " in text, text
        (parameters,) = re.findall(r"parameter: +(.*)", text)  # of ZeRO-1 and 2, those in the third partition alone
        assert ("embedding.weight" in parameters, "norm.bias" in parameters) in WHERE, parameters


def flip_bits(name: str, disk: Path) -> None:
    """Flip bits all over a file's masters, so that whoever reads of them reads one."""
    for part in range(100):
        flip_bit(name, "fp32", part / 100)(disk)


def test_a_copy_with_a_flipped_bit_is_left_out(memory: Path, launch: Launch) -> None:
    for setup in MEMORY:
        name = f"{'bf16_' if setup.precision == 'bf16' else ''}zero_pp_rank_1_mp_rank_00_optim_states.pt"
        run = memory / setup.name / "b" / "run"
        written = (run / "step4" / name).stat().st_mtime_ns
        for tenth in range(10):  # ranks on other nodes may read another copy
            flip_bit(name, "fp32", tenth / 10)(run)
        os.utime(run / "step4" / name, ns=(written, written))  # as memory that has lost bits leaves it
    found = launch(3, "node_jobs.load_on_nodes", elsewhere(memory, ["b", "d", "a"]))
    assert_exact(found, 3 * len(MEMORY))
    for each in found:
        assert "was damaged in another copy" in each.text


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


#: By name: what is done to the nodes' disks, and arguments and options of the load.
ODD: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "universal": (one_node_has_it, {}),
    "tag": (one_node_has_it, {"arguments": {"tag": "universal"}}),
    "things": (odd_things, {"section": {"mode": "require"}}),
    "spelling": (odd_things, {"arguments": {"tag": "./again/"}}),
    "deep": (deep_tag, {}),
    "sizes": (other_client_state, {}),
    "names": (same_names, {}),
    "fallback": (both_folders, {"section": {"fallback_dirs": ["{disks}/none", "{disks}/shared"]}}),
}


def test_odd_folders_are_loaded_from_all_nodes(saved: Path, launch: Launch, tmp_path: Path) -> None:
    found = []
    for name, (change, more) in ODD.items():
        disks = tmp_path / name / SETUPS[1].name
        shutil.copytree(saved / SETUPS[1].name, disks)
        change(disks)
        given = json.loads(json.dumps(more).replace("{disks}", str(disks)))
        found += [{"folder": str(disks), "setup": Setup(3), "nodes": ["b", "a", "b"], **given}]
    assert_exact(launch(3, "node_jobs.load_on_nodes", found), 3 * len(ODD))


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


#: What is done, and by the words of the outcome.
REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], list[str]]] = {
    "two saves": (two_saves, {}, ["different files under one name", "/a/run/step4 on ", "/b/run/step4 on "]),
    "no such tag": (lambda disks: None, {"arguments": {"tag": "step9"}}, ["step4", "step9"]),
}


def test_what_is_of_no_one_save_is_refused_on_all_nodes(saved: Path, launch: Launch, tmp_path: Path) -> None:
    cases = []
    for name, (change, more, _) in REFUSED.items():
        disks = shutil.copytree(saved / SETUPS[1].name, tmp_path / name / SETUPS[1].name)
        change(disks)
        cases.append({"folder": str(disks), "setup": Setup(3), "nodes": ["b", "a"], **more})
    for each, (_, _, words) in zip(launch(2, "node_jobs.refuse_on_nodes", cases), [*REFUSED.values()] * 2, strict=True):
        assert len(each.texts) == 1 and each.changed == frozenset(), each
        assert all(word in next(iter(each.texts)) for word in words), each.texts


def test_an_older_checkpoint_is_taken_from_all_nodes_and_from_other_copies(
    saved: Path, launch: Launch, tmp_path: Path
) -> None:
    disks = shutil.copytree(saved / SETUPS[1].name, tmp_path / SETUPS[1].name)
    newest_is_damaged(disks)
    case = {"folder": str(disks), "setup": Setup(3), "nodes": ["b", "a"], "section": {"on_damage": "previous"}}
    for each in launch(2, "node_jobs.load_on_nodes", [case]):
        assert "loaded step2 instead, 2 steps back" in each.text and "was damaged in another copy" in each.text, (
            each.text
        )


def of_command(name: str, *words: object) -> Any:
    result = CliRunner().invoke(app, [name, *map(str, words)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_commands_see_the_folders_of_all_nodes_as_one(saved: Path, tmp_path: Path) -> None:
    for setup in SETUPS[1:]:
        folders = [saved / setup.name / node / "run" for node in "ba"]
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
        masters = torch.load(saved / setup.name / "truth.pt", weights_only=False)["masters"]
        out = tmp_path / setup.name
        assert of_command("export", *folders, out)[0] == 0
        for checkpoint in (elastic_ckpt.open(folders), elastic_ckpt.open(out)):
            assert masters and all(torch.equal(checkpoint[name], values) for name, values in masters.items())
        if setup.stage == 1:
            assert of_command("convert", *folders, tmp_path / "universal")[0] == 0
            assert of_command("verify", tmp_path / "universal", "--full")[0] == 0
        code, text = of_command("export", *folders, folders[1] / "step4" / "weights")
        assert code == 3 and f"a folder inside {folders[1] / 'step4'}" in text, text


def test_verify_names_what_no_folder_has_and_the_copy_that_is_damaged(memory: Path, tmp_path: Path) -> None:
    for setup in MEMORY:
        folders = [memory / setup.name / node / "run" for node in FOUR]
        assert of_command("verify", *folders, "--full")[0] == 0
        name = f"{'bf16_' if setup.precision == 'bf16' else ''}zero_pp_rank_2_mp_rank_00_optim_states.pt"
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


def test_a_tag_that_is_saved_over_and_replicated_again_is_one_save(launch: Launch, tmp_path: Path) -> None:
    setups = [Setup(1), Setup(3)]
    arguments = {"folder": str(tmp_path), "setups": setups, "nodes": ["a", "b", "c"], "replicas": 1}
    launch(3, "node_jobs.save_on_nodes", {**arguments, "first": 30})
    launch(3, "node_jobs.save_on_nodes", arguments)
    for setup in setups:
        for node in "abc":
            (tag,) = (tmp_path / setup.name / node / "run" / ".replicas").glob("step*")
            assert tag.name == "step4" and not [*tag.glob("*.partial")]
    cases = [{"folder": str(tmp_path / one.name), "setup": one} for one in setups]
    whole = [{**case, "nodes": ["a", "b", "c"]} for case in cases]
    assert_exact(launch(3, "node_jobs.load_on_nodes", whole), 3 * len(setups))
    for setup in setups:
        shutil.rmtree(tmp_path / setup.name / "b")
    assert_exact(
        launch(2, "node_jobs.load_on_nodes", [{**case, "nodes": ["c", "a"]} for case in cases]), 2 * len(setups)
    )


def test_at_the_same_topology_nothing_is_left_to_a_loader_that_compares_less(
    memory: Path, launch: Launch, tmp_path: Path
) -> None:
    for setup in MEMORY:
        prefix = "bf16_" if setup.precision == "bf16" else ""
        flip_bit(f"{prefix}zero_pp_rank_1_mp_rank_00_optim_states.pt", "exp_avg", 0.5)(
            memory / setup.name / "b" / "run"
        )
        for node in FOUR:  # which no loader reads
            (memory / setup.name / node / "run" / "step4" / "log.pt").write_text(node)
    same = [{"folder": str(memory / setup.name), "setup": setup, "nodes": FOUR} for setup in MEMORY]
    found = launch(4, "node_jobs.load_on_nodes", same)
    assert_exact(found, 4 * len(MEMORY))
    assert all("was damaged in another copy" in each.text for each in found), "not what is in b's file"
    other = {"folder": str(tmp_path / "other"), "setups": MEMORY, "nodes": FOUR, "first": 30}
    launch(4, "node_jobs.save_on_nodes", other)
    for setup in MEMORY:  # saved over on one node, whose copies are of the save before
        shutil.rmtree(memory / setup.name / "b" / "run" / "step4")
        shutil.copytree(tmp_path / "other" / setup.name / "b/run/step4", memory / setup.name / "b" / "run" / "step4")
    for each in launch(4, "node_jobs.refuse_on_nodes", same):
        assert "ConflictingCopiesError" in each.kinds and each.changed == frozenset() and len(each.texts) == 1

"""Ranges of files that ranks exchange: on real processes, in drawn geometries, and beside a training."""

# Covers elastic_ckpt/io/exchanged_reads.py, which is how plans are executed by such ranges.

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.conftest import Launch
from tests.distributed.facts import Loaded
from tests.distributed.launch import end, environment, free_port, run_ranks, start
from tests.distributed.model import Setup


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_gets_what_it_wants_or_is_told_why_not(launch: Launch, tmp_path: Path, ranks: int) -> None:
    found = launch(ranks, "exchange_jobs.draw", {"folder": str(tmp_path), "seed": 71, "count": 60})
    assert found == [[]] * ranks


def spread(save: Save, setup: Setup, nodes: str, format: str = "native", model: str = "TinyLM") -> Cell:
    """A load by one rank of each of these nodes, over which the files are spread."""
    case = {"setup": setup, "nodes": [*nodes], "format": format, "model": model}
    saved = save.setup if isinstance(save.setup, str) else save.name
    return Cell(f"{format} {saved} to {setup.name} on {nodes}", save, "exchange_jobs.resume_spread", len(nodes), case)


#: FSDP2 trains without clipping.
UNCLIPPED = Setup(3, config=(("gradient_clipping", 0.0),))
STAGES = [Setup(stage) for stage in range(4)]


@cells(
    [
        *(spread(Save(setup), other, "abc") for setup, other in zip(STAGES, STAGES[::-1], strict=True)),
        *(spread(Save(setup), setup, "ab") for setup in STAGES),
        spread(Save(Setup(2, "bf16")), Setup(3, "bf16"), "aab"),
        spread(Save(Setup(1), converted=True), Setup(3), "abc", "universal"),
        spread(Save(Setup(3), converted=True), Setup(2), "bab", "universal"),
        spread(Save("plain", 2, "dcp_jobs.save_fsdp"), UNCLIPPED, "abc", "dcp", "UntiedLM"),
        spread(Save("plain", 2, "dcp_jobs.save_fsdp"), UNCLIPPED, "bba", "dcp", "UntiedLM"),
    ]
)
def test_files_may_be_on_any_nodes(cell: Cell, facts: list[Loaded]) -> None:
    assert len(facts) == cell.ranks
    for load in facts:
        assert load.differences == {} and load.loss_gap < (5e-3 if "bf16" in load.where else 1e-5), load.where
        assert f"on {len({*cell.case['nodes']})} nodes, of which " in load.text


EIGHT_BITS = [Setup(1, optimizer="bnb.AdamW8bit@64"), Setup(3, "bf16", optimizer="bnb.AdamW8bit@64")]


@pytest.mark.parametrize("setup", EIGHT_BITS, ids=lambda setup: setup.name)
def test_blocks_that_are_quantized_again_are_those_of_one_folder(
    launch: Launch, saves: Saves, setup: Setup, tmp_path: Path
) -> None:
    """Values, scales and codes of one block may be on different nodes."""
    save = Save(setup, 4, "node_jobs.save_each", {"nodes": [*"aabb"], "without_truth": True})
    for live in EIGHT_BITS:
        folder = shutil.copytree(saves.folder(save), tmp_path / live.name)
        found = launch(3, "exchange_jobs.load_alike", {"folder": str(folder), "setup": live, "nodes": [*"aba"]})
        assert found == [{}] * 3


@pytest.mark.parametrize("after", [0, 1, 5, 9])
def test_a_range_that_its_holder_cannot_read_is_one_error(
    launch: Launch, saves: Saves, tmp_path: Path, after: int
) -> None:
    save = Save(EIGHT_BITS[0], 4, "node_jobs.save_each", {"nodes": [*"aabb"], "without_truth": True})
    folder = shutil.copytree(saves.folder(save), tmp_path / "run")
    case = {"folder": str(folder), "setup": EIGHT_BITS[1], "nodes": [*"aba"], "fails": 1, "after": after}
    (found,) = set(launch(3, "exchange_jobs.fail_in_a_round", case))
    kind, text = found
    assert kind in ("DamagedError", "PartialLoadError") and "a disk fails" in text and "rank:      1" in text, found


def test_copies_are_made_while_the_training_goes_on(launch: Launch, tmp_path: Path) -> None:
    found = launch(3, "exchange_jobs.copy_beside_training", {"folder": str(tmp_path)})
    assert all(steps >= 5 and right == [True] * 3 for steps, right in found), found


def test_a_process_that_ends_while_it_copies_ends_as_any_other(tmp_path: Path, extensions_dir: str) -> None:
    port = free_port()
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        env = environment(extensions_dir) | {key: str(value) for key, value in place.items()}
        command = [sys.executable, "-m", "tests.distributed.exchange_jobs", str(tmp_path)]
        processes.append(start(command, env, tmp_path / f"{rank}.log"))
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            end(process)
    texts = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert codes == [0, 0] and all("ends" in text for text in texts), texts


LEFT = "tests.distributed.exchange_jobs:end_while_copying"


def test_who_leaves_the_process_group_is_told_that_copies_may_lack(tmp_path: Path, extensions_dir: str) -> None:
    case = {"folder": str(tmp_path), "how": "destroy"}
    found = run_ranks(2, LEFT, case, extensions_dir, timeout=240)
    assert len(found) == 2 and all(text == "" or "no longer answers" in text for text in found), found
    whole = list(tmp_path.rglob(".replicas/step1/*.pt"))
    assert len(whole) == found.count("") and not [*tmp_path.rglob("*.partial")]


def test_the_end_of_a_node_ends_the_wait_for_its_copies(tmp_path: Path, extensions_dir: str) -> None:
    case = {"folder": str(tmp_path), "how": "kill"}
    found = run_ranks(3, LEFT, case, extensions_dir, timeout=240, killed=1)
    assert len(found) == 2
    for text in found:
        assert "no longer answers" in text or "a collective failed" in text, text

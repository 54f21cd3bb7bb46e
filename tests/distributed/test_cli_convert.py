"""``elastic-ckpt convert``: what it writes is loaded by DeepSpeed alone, and by elastic_ckpt."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.tools import conversion
from tests.distributed.conftest import MATRIX, ROUND_ROBIN, Convert, Launch
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

LLAMA, GPT = ("megatron", "llama"), ("megatron", "gpt")
PIPELINE, PIPELINE_OF_ONE = (Parallel("pipeline", "uniform", pp=pp, stage=1) for pp in (2, 1))
#: What is converted: every stage, at two degrees.
SETUPS = [setup for setup in MATRIX if not setup.zero]


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, words)], catch_exceptions=False)


def convert_all(native: Path, universal: Path, names: list[str]) -> None:
    for name in names:
        result = run(native / name, universal / name / "step4_universal")
        assert result.exit_code == 0, result.output
        shutil.copy(native / name / "truth.pt", universal / name / "truth.pt")


@pytest.fixture(scope="module")
def ours(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every stage as universal ones."""
    folder = tmp_path_factory.mktemp("ours")
    convert_all(native, folder, [f"{setup.name}-dp{degree}" for setup in SETUPS for degree in (2, 3)])
    return folder


def test_deepspeed_alone_loads_it_at_another_degree(launch: Launch, ours: Path, universal: Path) -> None:
    for degree, saved in ((3, 2), (2, 3)):
        targets = []
        for setup in SETUPS:
            name = f"{setup.name}-dp{saved}"
            targets.append({"setup": setup, "folders": [str(ours / name), str(universal / name)]})
        for found in launch(degree, "convert_jobs.deepspeed_loads", targets):
            assert found.differences == {} and found.epochs == [3, 3] and not found.has_report
            assert found.losses[0] == found.losses[1], "of ours, and of DeepSpeed's own conversion"


def test_elastic_ckpt_restores_everything_from_it_into_another_stage(launch: Launch, ours: Path) -> None:
    targets = []
    for setup in (Setup(1), Setup(3)):
        sources = [
            {"folder": str(ours / f"{saved.name}-dp3"), "format": "universal"}
            for saved in SETUPS
            if saved.precision == "fp32"
        ]
        targets.append({"setup": setup, "sources": sources, "continue": [0, 2]})
    for load in launch(2, "load", {"targets": targets}):
        assert load.format == "universal" and load.differences == {}, load.where
        assert load.loss_gap <= 1e-5, load.where


def test_a_run_in_round_robin_order_gets_its_true_order(launch: Launch, native: Path, tmp_path: Path) -> None:
    """DeepSpeed's own converter gives almost every parameter of such a run the data of others."""
    name = f"{Setup(2, zero=ROUND_ROBIN).name}-dp2"
    convert_all(native, tmp_path, [name])
    source = {"folder": str(tmp_path / name), "format": "universal"}
    (load,) = launch(1, "load", {"targets": [{"setup": Setup(1), "sources": [source]}]})
    assert load.format == "universal" and load.differences == {}
    assert load.loss_gap <= 1e-5


def tensors_of(folder: Path) -> dict[str, Any]:
    """Every tensor below ``zero/``, with what is noted beside it."""
    found = {}
    for path in sorted((folder / "zero").glob("*/*.pt")):
        found[str(path.relative_to(folder))] = torch.load(path, weights_only=False)
    return found


def noted(value: Any) -> set[str]:
    return set(value) if isinstance(value, dict) else set()


@pytest.fixture(scope="module")
def megatron(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensor-parallel checkpoints that declare their patterns as Megatron-DeepSpeed's do, and one of a pipeline."""
    folder = tmp_path_factory.mktemp("megatron")
    setups = [Parallel(*LLAMA, tp=2, stage=1), Parallel(*GPT, tp=2, stage=1)]
    launch(2, "parallel_jobs.save", {"folder": str(folder), "setups": setups, "declares": True})
    launch(2, "parallel_jobs.save", {"folder": str(folder), "setups": [PIPELINE]})
    return folder


def test_deepspeed_alone_cuts_it_for_another_tensor_and_pipeline_parallel_degree(
    launch: Launch, megatron: Path, tmp_path: Path
) -> None:
    """DeepSpeed reads how from what is noted beside the tensors."""
    notes, targets = {}, []
    kinds = [Parallel(*LLAMA, tp=2, stage=1), Parallel(*GPT, tp=2, stage=1), PIPELINE]
    for saved, live in zip(kinds, (Parallel(*LLAMA, stage=1), Parallel(*GPT, stage=2), PIPELINE_OF_ONE), strict=True):
        name = f"{saved.name}-dp1"
        result = run(megatron / name, tmp_path / name / "out", "--tp-preset", "megatron-core", "--json")
        notes[saved.kind] = " ".join(json.loads(result.stdout)["notes"])
        shutil.copy(megatron / name / "truth.pt", tmp_path / name / "truth.pt")
        targets.append({"setup": live, "folder": str(tmp_path / name)})
    for found in launch(1, "convert_jobs.deepspeed_loads_parallel", targets):
        assert found.path is not None and found.differences == {} and not found.has_report
    assert "are lost: 3.trace, 6.trace" in notes["pipeline"] and "lost" not in notes["megatron"]


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_tensor_parallel_shards_are_put_together_as_deepspeeds_converter_does(
    style: str, megatron: Path, convert: Convert, tmp_path: Path
) -> None:
    name = f"{Parallel('megatron', style, tp=2, stage=1).name}-dp1"
    convert(megatron, tmp_path, [name])
    result = run(megatron / name, tmp_path / "ours", "--tp-preset", "megatron-core")
    assert result.exit_code == 0, result.output
    theirs, mine = tensors_of(tmp_path / name / "step4_universal"), tensors_of(tmp_path / "ours")
    assert mine.keys() == theirs.keys()
    for path, expected in theirs.items():
        found = mine[path]
        if not isinstance(expected, dict):
            assert found == expected, path
            continue
        rows = expected["param"].shape[0]  # theirs drops padding of the vocabulary
        assert torch.equal(found["param"][:rows], expected["param"]), path
        assert found["param"].shape[0] == rows or expected.get("vocab_tensor"), path
        beside = {key: value for key, value in found.items() if key != "param"}
        assert beside == {key: value for key, value in expected.items() if key != "param"}, path
    both = [str(megatron / name), str(tmp_path / "ours"), "--tp-preset", "megatron-core"]
    assert CliRunner().invoke(app, ["diff", *both]).exit_code == 0
    both[1] = str(tmp_path / name)
    outcome = json.loads(CliRunner().invoke(app, ["diff", *both, "--json"]).stdout)
    padded = {item["name"] for item in outcome["differences"] if "shape" in item["detail"]}
    assert padded == {item["name"] for item in outcome["differences"]}
    assert padded == {path.split("/")[1] for path, value in theirs.items() if "vocab_tensor" in noted(value)}


def test_the_name_of_a_format_is_a_place_beside_the_checkpoint(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(native / "z1-fp32-adamw-dp2", saved)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("universal", "dcp"):
        assert run(saved, name).exit_code == 0
        assert (saved / f"step4_{name}").is_dir()
    assert (saved / "latest_universal").read_text() == "step4_universal" and not list(Path().iterdir())
    assert run(saved, "universal", "--to", "dcp").exit_code == 2
    assert run(saved, "./universal").exit_code == 0 and Path("universal").is_dir()


def test_a_folder_with_a_slash_is_the_one_to_load_from(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = native / "z1-fp32-adamw-dp2"
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    report = json.loads(run(source, "universal/", "--json").stdout)
    folder = tmp_path / "universal"
    assert report["folder"] == str(folder / "step4_universal") and str(folder) in report["to_load"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest_universal", "step4_universal"]
    assert (folder / "latest_universal").read_text() == "step4_universal"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "universal"]
    inspected = CliRunner().invoke(app, ["inspect", "universal", "--json"])
    assert json.loads(inspected.stdout)["source"]["tag"] == "step4_universal"
    assert run(source, "universal/").exit_code == 2  # it exists
    assert run(source, "universal/again").exit_code == 0  # beside one that is named
    assert (folder / "latest_universal").read_text() == "again"


@pytest.mark.parametrize("beside", ["a file", "a run", "nothing", "latest"])
def test_only_folders_of_checkpoints_get_a_file_that_names_one(native: Path, tmp_path: Path, beside: str) -> None:
    names = {"a file": "train.py", "a run": "run7", "latest": "latest"}
    if beside in names:
        (tmp_path / names[beside]).mkdir() if beside == "a run" else (tmp_path / names[beside]).touch()
    report = json.loads(run(native / "z1-fp32-adamw-dp2", tmp_path / "out", "--json").stdout)
    is_named = beside in ("nothing", "latest")
    assert (tmp_path / "latest_universal").exists() == is_named
    assert ("tag='out'" in report["to_load"]) != is_named
    shown = run(native / "z1-fp32-adamw-dp2", tmp_path / "new" / "out").stdout
    assert "to load it" in shown and (tmp_path / "new" / "latest_universal").read_text() == "out"


def test_every_checksum_is_right(ours: Path) -> None:
    """torch never looks at them; others do."""
    files = sorted(ours.rglob("*.pt"))
    assert len(files) > 200
    for path in files:
        if path.name != "truth.pt":
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None, path


def test_a_full_disk_leaves_nothing_behind(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, write, calls = native / "z1-fp32-adamw-dp3", conversion.save, []

    def dies(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 20:
            raise OSError(28, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(conversion, "save", dies)
    failed = run(source, tmp_path / "out")
    assert failed.exit_code == 3 and "No space left" in failed.stderr and "same command" in failed.stderr
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    report = json.loads(run(source, tmp_path / "out", "--json").stdout)
    assert report["files"] == len([path for path in (tmp_path / "out").rglob("*") if path.is_file()])
    assert (tmp_path / "latest_universal").read_text() == "out"
    again = run(source, tmp_path / "out")
    assert again.exit_code == 2 and "cannot be written there" in again.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [("z0-bf16-adamw-dp2", "without ZeRO"), ("z1-bf16_fp32acc-adamw-dp2", "")],
)
def test_without_partitions(name: str, says: str, unpartitioned: Path, tmp_path: Path) -> None:
    result = run(unpartitioned / name, tmp_path / "out")
    assert result.exit_code == (3 if says else 0), result.output
    assert says in result.stderr.replace("\n", " ")


def test_a_universal_checkpoint_is_one_already(universal: Path, tmp_path: Path) -> None:
    result = run(universal / "z1-fp32-adamw-dp2", tmp_path / "out")
    assert result.exit_code == 3 and "universal checkpoint already" in result.stderr.replace("\n", " ")


def test_a_source_that_changes_meanwhile_leaves_no_checkpoint(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, write = tmp_path / "source", conversion.save
    shutil.copytree(native / "z1-fp32-adamw-dp2", source)

    def touches(*arguments: Any) -> None:
        os.utime(next((source / "step4").glob("*optim_states.pt")), ns=(1, 1))
        write(*arguments)

    monkeypatch.setattr(conversion, "save", touches)
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3 and "overwritten" in result.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == [source]
    monkeypatch.undo()
    assert run(source, tmp_path / "out").exit_code == 0


class Code:
    """Runs where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(9)",)


@pytest.mark.parametrize("name", ["z1-fp32-adamw-dp2", "z3-fp32-adamw-dp2"])
def test_code_in_a_client_state_is_not_handed_on(native: Path, tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(native / name, source)
    for path in (source / "step4").glob("*model_states.pt"):
        tree = torch.load(path, weights_only=False)
        torch.save({**tree, "odd": Code()}, path)
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3 and "builtins.exec" in result.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == [source]


def test_where_nothing_can_be_written_there_is_an_error(native: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(native / "z1-fp32-adamw-dp2", source)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    wrong_names = ("dangling", "source/step4/zero", "latest_universal", "new/..")
    not_writable = ("file/out", "x" * 250)
    for place in wrong_names + not_writable:
        result = run(source, f"{tmp_path}/{place}")
        assert result.exit_code == (2 if place in wrong_names else 3), (place, result.output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "source"]


def test_a_truncated_source_leaves_no_checkpoint(native: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(native / "z1-fp32-adamw-dp2", source)
    shard = next((source / "step4").glob("*zero_pp_rank_1*optim_states.pt"))
    os.truncate(shard, shard.stat().st_size // 2)
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3 and shard.name in result.stderr.replace("\n", "")
    assert not (tmp_path / "out").exists() and not (tmp_path / "latest_universal").exists()

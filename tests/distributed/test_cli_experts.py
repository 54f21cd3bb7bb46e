"""The command line on checkpoints with experts: every fact against the model that saved them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import elastic_ckpt
from benchmarks import scale_models
from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.tools.opened import open_folder
from tests.big_models import check_places, described
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.conftest import Launch
from tests.distributed.expert_jobs import Experts
from tests.distributed.jobs import truth_of

#: What is saved, and the same state after a load at other degrees.
SOURCE = Experts(4, 1, 2, "fp32")
SAVE = Save(SOURCE, SOURCE.world, "expert_jobs.save_each")
RESAVED = [Experts(2, 1, 1, "fp32"), Experts(2, 2, 2, "fp32"), Experts(2, 0, 2, "fp32")]
WITHOUT_ZERO = RESAVED[-1]
EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "expp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def saved(saves: Saves, launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them: what ranks save of what other ranks have saved is no save of cells."""
    folder = tmp_path_factory.mktemp("experts")
    shutil.copytree(saves.folder(SAVE), folder / SOURCE.name)
    arguments = {"folder": str(folder), "runs": RESAVED, "source": str(folder / SOURCE.name)}
    for text, run in zip(launch(2, "expert_tool_jobs.resave", arguments), RESAVED, strict=False):
        assert "ZeRO-1, DP=4, EP=2" in text, text  # of the source
        assert f"ZeRO-{run.stage}, DP=2" + (", EP=2" if run.ep == 2 else ", at step") in text, text
    return folder


def command(*arguments: Any, code: int = 0) -> Any:
    """The JSON of a command, which is all there is on standard output."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Iterator[Any]:
    """``damaged(run, *names)``: a copy of a checkpoint without some files."""

    def make(run: Experts, *names: str) -> Path:
        folder = tmp_path / f"{run.name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(saved / run.name, folder)
        for name in names:
            (folder / "step4" / name).unlink()
        return folder

    yield make


@pytest.mark.parametrize("run", [SOURCE, *RESAVED], ids=lambda run: run.name)
def test_inspect_shows_the_degree_and_the_experts_of_each_layer(run: Experts, saved: Path) -> None:
    found = command("inspect", saved / run.name)
    assert found["ok"] and found["source"]["ep"] == run.ep
    assert list(found["experts"].values()) == [4, 8]
    weights = {entry["name"] for entry in found["parameters"] if entry["role"] in ("trained", "weight")}
    assert weights == truth_of(saved / SOURCE.name)["masters"].keys()
    if run.stage:  # without ZeRO, states are numbered
        assert sum(group["members"] for group in found["groups"]) == len(weights)
        assert {each["key"]: each["tensors"] for each in found["contents"]}["exp_avg"] == len(weights)
    text = CliRunner().invoke(app, ["inspect", str(saved / run.name)]).output
    assert (f"EP={run.ep}" in text) == (run.ep > 1) and "1 layer of 4, 1 layer of 8" in text


@pytest.mark.parametrize("run", [SOURCE, WITHOUT_ZERO], ids=lambda run: run.name)
def test_missing_files_of_experts_are_all_named(run: Experts, damaged: Any) -> None:
    lost = [EXPERT.format(0, 3), EXPERT.format(1, 5)]
    folder = damaged(run, *lost)
    found = command("verify", folder, code=1)["findings"]
    assert {Path(one["file"]).name for one in found if one["code"] == "missing"} == set(lost)
    result = CliRunner().invoke(app, ["latest", str(folder)])
    assert result.exit_code == 1 and EXPERT.format(0, 3) in result.output, result.output
    with pytest.raises(DamagedError):
        elastic_ckpt.find_latest(folder)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_a_missing_optimizer_of_experts_is_named(ranks: tuple[int, ...], damaged: Any) -> None:
    folder = damaged(WITHOUT_ZERO, *(OPTIMIZER.format(rank) for rank in ranks))
    found = command("verify", folder, code=1)["findings"]
    assert OPTIMIZER.format(ranks[0]) in {Path(one["file"]).name for one in found}, found


def test_exchanged_and_foreign_files_of_experts_are_found(saved: Path, damaged: Any) -> None:
    exchanged = damaged(SOURCE) / "step4"
    first, second = exchanged / EXPERT.format(0, 1), exchanged / EXPERT.format(0, 2)
    first.rename(exchanged / "aside")
    second.rename(first)
    (exchanged / "aside").rename(second)
    found = command("verify", exchanged, code=1)["findings"]
    assert {Path(one["file"]).name for one in found} == {first.name, second.name}, found
    other = damaged(WITHOUT_ZERO)
    weights = torch.load(other / "step4" / EXPERT.format(1, 5))
    torch.save({name: value + 1 for name, value in weights.items()}, other / "step4" / EXPERT.format(1, 5))
    foreign = damaged(SOURCE)
    shutil.copy(other / "step4" / EXPERT.format(1, 5), foreign / "step4" / EXPERT.format(1, 5))
    (one,) = command("verify", foreign, code=1)["findings"]
    assert one["code"] == "damaged" and EXPERT.format(1, 5) in json.dumps(one), one


@pytest.mark.parametrize("run", [SOURCE, WITHOUT_ZERO], ids=lambda run: run.name)
def test_every_byte_of_experts_is_verified(run: Experts, saved: Path, damaged: Any) -> None:
    assert command("verify", "--full", saved / run.name)["findings"] == []
    folder = damaged(run)
    path = folder / "step4" / EXPERT.format(1, 6)
    weights = torch.load(path)
    content, value = bytearray(path.read_bytes()), next(iter(weights.values())).numpy().tobytes()
    content[content.index(value) + len(value) - 4] ^= 1  # its last element
    path.write_bytes(content)
    assert [one["code"] for one in command("verify", "--full", folder, code=1)["findings"]] == ["checksum"]
    next(iter(weights.values())).view(-1)[3] = torch.nan
    torch.save(weights, path)
    if run.stage:  # there are masters, by file
        (one,) = command("verify", "--full", folder, code=1)["findings"]
        assert one["code"] == "damaged" and path.name in json.dumps(one), one


@pytest.mark.parametrize("run", RESAVED[:2], ids=lambda run: run.name)
def test_one_state_at_two_degrees_is_equal(run: Experts, saved: Path) -> None:
    found = command("diff", saved / SOURCE.name, saved / run.name)
    assert found["differences"] == [], found
    assert found["equal"] > 3 * 54


@pytest.mark.parametrize("run", [SOURCE, *RESAVED], ids=lambda run: run.name)
def test_all_experts_are_exported_bit_by_bit(run: Experts, saved: Path, tmp_path: Path) -> None:
    with_states = run.stage > 0
    if not with_states:
        with pytest.raises(MismatchError, match="export without --optimizer"):
            elastic_ckpt.export(saved / run.name, tmp_path / "out", optimizer=True, progress=False)
    report = elastic_ckpt.export(saved / run.name, tmp_path / "out", optimizer=with_states, progress=False)
    exported, truth = load_file(tmp_path / "out" / "model.safetensors"), truth_of(saved / SOURCE.name)
    states = load_file(tmp_path / "out" / "optimizer.safetensors") if with_states else {}
    assert states.keys() == {f"{key}.{name}" for name, key in truth["states"] if with_states}
    expected = {f"{key}.{name}": value for (name, key), value in truth["states"].items()}
    assert all(torch.equal(value, expected[name]) for name, value in states.items())
    assert report.tensors - len(states) == len(exported) == len(truth["masters"]) + 1
    assert exported.keys() - {"ticks"} == truth["masters"].keys()
    assert all(torch.equal(exported[name], value) for name, value in truth["masters"].items())


@pytest.mark.parametrize("run", [SOURCE, RESAVED[0]], ids=lambda run: run.name)
def test_a_conversion_is_refused_since_deepspeed_would_load_other_experts(
    run: Experts, saved: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["convert", str(saved / run.name), str(tmp_path / "universal")])
    assert result.exit_code == 3 and not (tmp_path / "universal").exists(), result.output
    assert "it has experts, whose names are those of DeepSpeed's own layers" in " ".join(result.output.split())
    assert "load it as it is" in result.output


def test_a_load_on_other_ranks_is_planned(saved: Path) -> None:
    found = command("plan", saved / SOURCE.name, "--dp", 2, "--all")
    truth = truth_of(saved / SOURCE.name)
    nbytes = sum(3 * value.numel() * value.element_size() for value in truth["masters"].values())
    assert sum(rank["nbytes_read"] for rank in found["ranks"]) == nbytes + 8  # and a buffer


@cells(
    [
        Cell(run.name, SAVE, "expert_tool_jobs.compare", run.world, {"run": run})
        for run in (Experts(4, 1, 4, "fp32"), Experts(4, 2, 1, "fp32"), Experts(4, 0, 2, "fp32"))
    ]
)
def test_a_plan_foretells_what_a_job_of_any_degree_reads(cell: Cell, facts: list[Any]) -> None:
    """Down to each range of each tensor, by live engines."""
    assert len(facts) == cell.ranks
    for found in facts:
        for foretold, live in (found.coordinates, found.layouts, found.states, found.reads):
            assert foretold == live, found.where


MATRICES = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}
#: A job as the files in ``benchmarks/models`` describe jobs.
DESCRIBED = {
    "name": "tiny",
    "description": "Two layers of experts.",
    "parameters": 8 * 8 * (1 + 12 * 2) + (4 + 8) * 8 + 2 * 8,
    "saved": {
        "tag": "step2",
        "step": 2,
        "ds_version": "0.19.8",
        "tp": 1,
        "dp": 4,
        "ep": 2,
        "stages": [0],
        "optimizer": "DeepSpeedZeroOptimizer",
        "weights_dtype": "bfloat16",
    },
    "sizes": {"h": 8, "a": 4, "b": 8},
    "states": ["exp_avg", "exp_avg_sq"],
    "groups": [
        {"holds": "matrices", "hyperparameters": MATRICES},
        {"holds": "vectors", "hyperparameters": MATRICES | {"weight_decay": 0.0}},
        {"holds": "experts", "hyperparameters": MATRICES},
    ],
    "layers": [
        {"prefix": "embed", "first": 0, "parameters": [{"name": "weight", "shape": ["h", "h"]}]},
        *(
            {
                "prefix": f"layers.{number}",
                "first": 1 + number,
                "parameters": [
                    {"name": "norm.weight", "shape": ["h"]},
                    {"name": "moe.deepspeed_moe.gate.wg.weight", "shape": [size, "h"]},
                ],
            }
            for number, size in enumerate("ab")
        ),
        *(
            {
                "prefix": f"layers.{number}.moe",
                "first": 1 + number,
                "experts": experts,
                "parameters": [{"name": f"w{n}.weight", "shape": ["h", "h"]} for n in (1, 2)],
            }
            for number, experts in enumerate((4, 8))
        ),
    ],
}


def test_an_imagined_checkpoint_of_experts_is_the_real_one(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Save(DESCRIBED, 4, "expert_tool_jobs.save_as_described", {"group_numel": 300})
    monkeypatch.setattr(scale_models, "_EXPERT_GROUP_NUMEL", 300)
    imagined = scale_models.scale_metadata(scale_models.ScaleModel.model_validate(DESCRIBED))
    real = open_folder(str(saves.folder(save)), None, ElasticConfig()).checkpoint.metadata
    ours, theirs = described(imagined), described(real)
    # torch adds options of its own, and a number of steps to states
    for found in (ours, theirs):
        found["parameters"] = {name: replace(saved, scalars=()) for name, saved in found["parameters"].items()}
        keys = [MATRICES.keys() | ({"moe", "name"} if group.get("moe") else set()) for group in found["groups"]]
        found["groups"] = [{key: group[key] for key in each} for each, group in zip(keys, found["groups"], strict=True)]
    assert len(ours["groups"]) > 4
    for what in ours:
        assert ours[what] == theirs[what], what
    check_places(imagined, real)


def test_a_degree_that_no_job_can_have_is_refused(saved: Path) -> None:
    for options in (("--dp", 3, "--ep", 3), ("--dp", 4, "--zero", 3), ("--dp", 4, "--ep", 8)):
        found = command("plan", saved / SOURCE.name, *options, code=1)
        assert found["problem"] == "there is no such job with MoE layers", found

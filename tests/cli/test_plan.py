"""``elastic-ckpt plan`` of models that nobody has saved: what it prints, and how it ends."""

from __future__ import annotations

import cProfile
import importlib
import json
import pstats
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.scale_models import ScaleModel, scale_metadata
from elastic_ckpt.cli import app
from elastic_ckpt.cli.plan import some_of
from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from tests.big_models import catalog_of, small_model
from tests.oracle.proof import proof_of

H = 16384


@pytest.fixture(autouse=True)
def _folders_of_big_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a model is the folder of its checkpoint."""

    def opened(folder: str, *more: Any) -> Any:
        if folder not in (*ScaleModel.names(), "small", "excluded"):
            return open_folder(folder, *more)
        metadata = scale_metadata(small_model()) if folder in ("small", "excluded") else catalog_of(folder)
        if folder == "excluded":
            source = replace(metadata.source, zero_stage=2, frozen_recorded=False)
            metadata = replace(metadata, source=source)
        state = SimpleNamespace(batch=BatchSizes(None, None, None))
        checkpoint = SimpleNamespace(metadata=metadata, training_state=state)
        return SimpleNamespace(metadata=metadata, found=SimpleNamespace(foreign="no file"), checkpoint=checkpoint)

    monkeypatch.setattr(importlib.import_module("elastic_ckpt.cli.plan"), "open_folder", opened)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})


def told(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON document, which is all there is on standard output."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_the_topology_of_the_save_is_the_default() -> None:
    found = told("small", "--all")
    degrees = {key: found["target"][key] for key in ("dp", "tp", "pp", "zero_stage", "ranks")}
    assert degrees == {"dp": 3, "tp": 2, "pp": 2, "zero_stage": 1, "ranks": 12}
    proof = proof_of(VirtualJob(scale_metadata(small_model()), Topology(3, 2, 2, 1), LoadOptions()))
    assert proof.holds and proof.ranks == 12
    assert found["ranks_planned"] == len(found["ranks"]) == 12
    # at the saved topology a rank reads its own partition, masters and two moments
    own = [rank for rank in found["ranks"] if rank["coordinates"]["pp_rank"] == 0]
    assert all(len(rank["files"]) == 1 for rank in own)
    for rank in own:
        (path,) = rank["files"]
        place = rank["coordinates"]
        assert path.endswith(f"zero_pp_rank_{place['partition_rank']}_mp_rank_{place['tp_rank']:02d}_optim_states.pt")
    assert found["nbytes_read"]["total"] == sum(rank["nbytes_read"] for rank in found["ranks"])
    assert found["nbytes_read"]["total"] == 4 * proof.numel_written


def test_a_big_job() -> None:
    found = told("104b", "--dp", "8", "--tp", "4", "--pp", "2", "--zero", "3")
    assert found["source"]["files"] == 512 + 128 + 34 * 4
    assert (
        " ".join(found["source"]) == "format folder tag zero_stage partition_degree ds_version tp pp sequence ep files"
    )
    assert found["ranks_planned"] == 64 and "ranks" not in found
    # 32 layers, positions, two norms; tied embeddings on two stages; and copies of what is not cut, on four ranks
    numel = 32 * (12 * H * H + 13 * H) + 2 * (50688 + 2048) * H + 2 * H + 3 * (2 * 2048 * H + 2 * H + 32 * 6 * H)
    assert abs(found["nbytes_read"]["total"] - 12 * numel) < 64 * 8 * 1000
    assert 0 <= found["memory"]["total"] - found["nbytes_read"]["total"] < 64 * 12 * 1000  # padding
    assert ["refuses ZeRO-3" in note for note in found["notes"]] == [True]


def test_of_big_jobs_some_ranks_are_planned_unless_all_are_asked_for() -> None:
    found = told("bloom-176b")
    assert (found["target"]["ranks"], found["ranks_planned"]) == (384, 64)
    result = run("bloom-176b")
    assert "64 of them; --all plans all" in result.output
    assert "ZeRO-1, DP=8, TP=4, PP=12: 384 ranks" in result.output
    ranks = some_of(384, 64)
    assert (len(set(ranks)), ranks[0], ranks[-1]) == (64, 0, 383)
    assert {rank % 4 for rank in ranks} == set(range(4))  # of every tensor-parallel rank
    assert some_of(64, 64) == list(range(64)) and some_of(5, 5) == list(range(5))


@pytest.mark.parametrize(("model", "gigabytes"), [("70b", "7.60"), ("104b", "11.8")])
def test_well_known_models_are_planned_as_typed(model: str, gigabytes: str) -> None:
    words = ("--model", model, "--dp", "8", "--tp", "8", "--pp", "4", "--rank", "194")
    result = run(*words, "--gpu-memory", "80GB")
    assert result.exit_code == 0, result.output
    first = f"Loads: yes. {model} -> ZeRO-1 DP 8 TP 8 PP 4, {gigabytes}GB per GPU, bfloat16. Fits into 80.0GB."
    assert result.stdout.splitlines()[0] == first
    found = told(*words, "--gpu-memory", "4GiB", code=1)
    assert found["loads"] and found["fits"] is False and found["answer"].endswith("Does not fit into 4.29GB.")
    (note,) = told("--model", model, "--tp", "2", "--pp", "4")["notes"]  # one for all stages
    assert note.startswith("tensor-parallel layout of parameters according to: the preset") and "(" not in note
    (note,) = told("--model", model, "--tp", "2")["notes"]
    assert re.search(r" \(\d+\)$", note)
    refused = run("--model", model, "--tp", "7")
    assert refused.exit_code == 1 and "file:" not in refused.stderr
    assert run("--model", model, "folder").exit_code == run("--model", "1b").exit_code == 2


def test_wrong_usage_has_no_answer() -> None:
    result = run("104b", "--tp", "8", "--preset", "megatron-cor")
    assert result.exit_code == 2 and result.stdout == "" and "--preset megatron-core" in result.stderr
    assert "Loads" not in result.stderr and "file:" not in result.stderr
    assert "loads" not in told("104b", "--tp", "8", "--preset", "megatron-cor", code=2)


def test_whether_it_fits_is_unknown_where_frozen_weights_are_missing() -> None:
    result = run("excluded", "--gpu-memory", "80GB")
    assert result.exit_code == 0 and "Fits" not in result.stdout
    unknown = "Whether it fits into 80.0GB is unknown: frozen weights, if the model has any, are not in the checkpoint."
    assert result.stdout.splitlines()[0].endswith(unknown)
    found = told("excluded", "--gpu-memory", "80GB")
    assert found["fits"] is None and "exclude_frozen_parameters=True" in found["notes"][0]
    assert any("exclude_frozen_parameters=True" in note for note in told("excluded")["notes"])
    refused = told("excluded", "--gpu-memory", "0.0001MB", code=1)
    assert refused["fits"] is False and "Does not fit" in refused["answer"]


def test_the_storage_of_a_model_that_nobody_has_saved_is_assumed(tmp_path: Path) -> None:
    assert told("--model", "70b", "--rank", "0")["storage"] == "local (assumed)"
    assert '"reading": {"storage": "network"}' in " ".join(run("--model", "70b", "--rank", "0").stdout.split())
    config = tmp_path / "config.json"
    config.write_text('{"elastic_checkpoint": {"reading": {"storage": "network"}}}')
    found = told("--model", "70b", "--rank", "0", "--config", str(config))
    assert found["storage"] == "network (as configured)"


def test_experts_are_planned_at_another_expert_parallel_degree() -> None:
    found = told("mixtral-8x7b", "--dp", "16", "--ep", "4", "--all")
    assert (found["source"]["ep"], found["target"]["ep"], found["ranks_planned"]) == (8, 4, 16)
    assert found["nbytes_read"]["total"] == 12 * 46_702_792_704
    experts, dense = 3 * 14336 * 4096 * 8 * 32, 46_702_792_704 - 3 * 14336 * 4096 * 8 * 32
    assert found["nbytes_read"]["most"] == 12 * (experts + dense) // 16
    ranks = {rank["coordinates"]["ep_rank"] for rank in found["ranks"]}
    assert ranks == set(range(4))
    assert {rank["memory"] for rank in found["ranks"]} == {found["nbytes_read"]["most"]}
    refused = told("mixtral-8x7b", "--dp", "16", "--ep", "16", code=1)
    assert refused["problem"] == "there is no such job with MoE layers"


def test_a_model_of_256_experts_in_each_of_58_layers_is_planned_in_few_calls() -> None:
    """Of Python's functions, for 45,000 parameters: none for each of 1,024 ranks."""
    with cProfile.Profile() as profile:
        found = told("deepseek-v3", "--dp", "1024", "--ep", "32", "--rank", "700")
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert calls < 40_000_000, calls
    (rank,) = found["ranks"]
    assert rank["coordinates"]["ep_rank"] == 700 % 32
    assert abs(rank["nbytes_read"] - 12 * 671_026_404_352 // 1024) < 1 << 20


def test_a_zero3_checkpoint_of_512_ranks_is_read_by_1024() -> None:
    found = told("70b", "--dp", "1024")
    assert (found["source"]["zero_stage"], found["source"]["partition_degree"], found["ranks_planned"]) == (3, 512, 64)
    owned = 12 * 68_976_648_192 // 1024  # all parameters divide
    assert found["nbytes_read"]["least"] == found["nbytes_read"]["most"] == owned
    (one,) = told("70b", "--dp", "1024", "--rank", "1000")["ranks"]
    assert (one["nbytes_read"], len(one["files"])) == (owned, 1)
    assert one["reads"] == 3 * (80 * 9 + 3)  # of half a partition each
    assert told("70b", "--dp", "512", "--rank", "7")["ranks"][0]["reads"] < 200


def test_one_rank_in_detail() -> None:
    found = told("bloom-176b", "--rank", "100", "--tp", "8", "--dp", "4", "--pp", "6", "--tp-preset", "bloom")
    assert [rank["rank"] for rank in found["ranks"]] == [100]
    place = {
        "partition_degree": 4,
        "partition_rank": 0,
        "tp": 8,
        "tp_rank": 4,
        "pp": 6,
        "pp_rank": 3,
        "ep": 1,
        "ep_rank": 0,
    }
    assert place.items() <= found["ranks"][0]["coordinates"].items()
    assert any('the preset "bloom"' in note for note in found["notes"])
    result = run("bloom-176b", "--rank", "100", "--tp", "8", "--dp", "4", "--pp", "6", "--tp-preset", "bloom")
    assert "fp32 masters" in result.output and re.search(r"│ 100 +│ +3 │ +0 │ +4 │", result.output)
    assert any(path.endswith("bf16_zero_pp_rank_0_mp_rank_26_optim_states.pt") for path in found["ranks"][0]["files"])


def test_a_refusal_says_why_and_what_would_help() -> None:
    result = run("104b", "--tp", "8")
    first = "Loads: no. ZeRO-1 DP 4 TP 4 PP 32 -> ZeRO-1 DP 4 TP 8 PP 32"
    assert result.exit_code == 1 and result.stdout == f"{first}\n", "the first line is the answer"
    for words in (
        "MismatchError: the tensor-parallel degree changes",
        "2.self_attention.query_key_value.weight",
        "tp_rules",
    ):
        assert words in result.stderr
    assert "Loads" not in result.stderr
    refused = told("104b", "--tp", "8", code=1)
    assert refused["answer"] == first
    every = "2.self_attention.query_key_value.weight and 31 like it"
    assert (refused["loads"], refused["error"], refused["parameter"]) == (False, "MismatchError", every)
    configs = [each["config"] for each in refused["remedies"] if "config" in each]
    rule = {"pattern": r"\d+\.self_attention\.query_key_value\.weight", "kind": "column"}
    assert {"tp_rules": [rule]} in configs and "--preset bloom" in refused["remedy"]
    preset = ("--tp-preset", "megatron-deepspeed-interleaved")
    assert told("104b", "--tp", "8", *preset, "--rank", "0")["ranks_planned"] == 1
    assert told("104b", "--tp", "3", *preset, code=1)["expected"] == "a multiple of 3"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing argument 'DIR...'"),
        (("104b", "--rank", "3", "--all"), "--rank plans one rank"),
        (("104b", "--rank", "512"), "has the ranks 0 to 511"),
        (("104b", "--dp", "65536"), "the limit is 1048576"),
        (("104b", "--gpu-memory", "80"), "not a size: write 80GB"),
        (("104b", "--zero", "4"), "Invalid value for '--zero'"),
        (("104b", "--tp-preset", "nobody"), "nobody"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.replace("│", " ").split())


def test_no_checkpoint_ends_with_3(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert result.exit_code == 3
    assert "there is no DeepSpeed checkpoint here" in result.stderr
    assert told(str(tmp_path), code=3)["error"] == "NotFoundError"


def test_the_scatter_is_drawn_of_the_planned_ranks(tmp_path: Path) -> None:
    path = tmp_path / "scatter.svg"
    assert run("small", "--dp", "2", "--rank", "1", "--plot", str(path)).exit_code == 0
    assert "rank 1 reads" in path.read_text() and "rank 0 reads" not in path.read_text()
    assert run("small", "--dp", "2", "--plot", "/nowhere/at/all.svg").exit_code == 2


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "elastic_ckpt.cli.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = run("small", "--plot", str(tmp_path / "scatter.png"))
    assert result.exit_code == 2 and "pip install 'matplotlib>=3.6'" in result.stderr
    assert told("small", "--plot", "scatter.png", code=2)["problem"] == "--plot needs matplotlib"

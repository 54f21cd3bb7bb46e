"""``elastic-ckpt plan`` of models that nobody has saved: what it prints, and how it ends."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.cli.plan import bandwidth_of
from elastic_ckpt.cli.plan_view import bytes_matrix
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from elastic_ckpt.tools.virtual.forecast import Memory, RankForecast, Reads
from elastic_ckpt.tools.virtual.scale import ScaleModel, scale_metadata
from tests.oracle.proof import proof_of
from tests.tools.test_scale import catalog_of, small_model

H = 16384


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in a file of the user's own."""
    path = tmp_path_factory.mktemp("models") / "small.json"
    path.write_text(small_model().model_dump_json())
    return str(path)


@pytest.fixture(autouse=True)
def _one_catalog_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one of a big model takes a second."""

    def made(model: ScaleModel) -> CheckpointMetadata:
        return catalog_of(model.name) if model.name in ScaleModel.names() else scale_metadata(model)

    monkeypatch.setattr(importlib.import_module("elastic_ckpt.cli.plan"), "scale_metadata", made)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})


def told(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON document, which is all there is on standard output."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_the_topology_of_the_save_is_the_default(small: str) -> None:
    found = told("--model", small, "--all")
    degrees = {key: found["target"][key] for key in ("dp", "tp", "pp", "zero_stage", "ranks")}
    assert degrees == {"dp": 3, "tp": 2, "pp": 2, "zero_stage": 1, "ranks": 12}
    proof = proof_of(VirtualJob(scale_metadata(small_model()), Topology(3, 2, 2, 1), LoadOptions()))
    assert proof.holds and proof.ranks == 12
    assert found["ranks_planned"] == len(found["ranks"]) == 12
    # at the saved topology a rank reads its own partition, masters and two moments
    own = [rank for rank in found["ranks"] if rank["place"]["pp_rank"] == 0]
    assert all(len(rank["files"]) == 1 for rank in own)
    for rank in own:
        (path,) = rank["files"]
        place = rank["place"]
        assert path.endswith(f"zero_pp_rank_{place['dp_rank']}_mp_rank_{place['tp_rank']:02d}_optim_states.pt")
    assert found["nbytes_read"]["total"] == sum(rank["reads"]["nbytes"] for rank in found["ranks"])
    assert found["nbytes_read"]["total"] == 4 * proof.numel_written


def test_a_big_job_by_the_node_and_in_detail() -> None:
    found = told(
        "--model",
        "104b",
        "--dp",
        "8",
        "--tp",
        "4",
        "--pp",
        "2",
        "--zero",
        "3",
        "--offload",
        "cpu",
        "--nodes",
        "4",
        "--bandwidth",
        "5GB/s",
    )
    assert found["source"]["files"] == 512 + 128 + 34 * 4
    assert " ".join(found["source"]) == "format folder tag zero_stage dp ds_version tp pp sequence ep files"
    assert found["cluster"] == {"ranks": 64, "nodes": 4, "bandwidth": 5e9, "ranks_per_node": 16}
    assert found["ranks_planned"] == 64 and "ranks" not in found
    # 32 layers, positions, two norms; tied embeddings on two stages; and copies of what is not cut, on four ranks
    numel = 32 * (12 * H * H + 13 * H) + 2 * (50688 + 2048) * H + 2 * H + 3 * (2 * 2048 * H + 2 * H + 32 * 6 * H)
    assert abs(found["nbytes_read"]["total"] - 12 * numel) < 64 * 8 * 1000
    memory = found["memory"]
    assert memory["offloaded"] and memory["host"] == memory["masters"] + sum(s["nbytes"] for s in memory["states"])
    assert memory["device"] == memory["weights"] + memory["gradients"] == 3 * memory["weights"]
    assert memory["masters"] == 2 * memory["weights"]
    slowest = max(node["nbytes"] for node in found["nodes"])
    assert found["seconds"] == {
        "reading": slowest / 5e9,
        "node_nbytes": slowest,
        "bandwidth": 5e9,
        "is_estimate": False,
    }
    assert ["refuses ZeRO-3" in warning for warning in found["warnings"]] == [True]


def test_of_big_jobs_some_nodes_are_planned_unless_all_are_asked_for() -> None:
    found = told("--model", "bloom-176b")
    assert (found["target"]["ranks"], found["ranks_planned"], len(found["nodes"])) == (384, 64, 8)
    assert found["seconds"]["is_estimate"]
    result = run("--model", "bloom-176b")
    assert "64 of them; --all plans every one" in result.output
    assert "ZeRO-1, DP=8, TP=4, PP=12: 384 ranks" in result.output


def test_experts_are_planned_at_another_expert_parallel_degree() -> None:
    found = told("--model", "mixtral-8x7b", "--dp", "16", "--ep", "4", "--all")
    assert (found["source"]["ep"], found["target"]["ep"], found["ranks_planned"]) == (8, 4, 16)
    assert found["nbytes_read"]["total"] == 12 * 46_702_792_704
    experts, dense = 3 * 14336 * 4096 * 8 * 32, 46_702_792_704 - 3 * 14336 * 4096 * 8 * 32
    assert found["nbytes_read"]["most"] == 12 * (experts + dense) // 16
    ranks = {rank["place"]["ep_rank"] for rank in found["ranks"]}
    assert ranks == set(range(4))
    weights = {rank["memory"]["weights"] for rank in found["ranks"]}
    assert weights == {2 * (experts // 4 + dense)}
    refused = told("--model", "mixtral-8x7b", "--dp", "16", "--ep", "16", code=1)["refused"]
    assert refused["problem"] == "there is no such job with MoE layers"


def test_a_model_of_256_experts_in_each_of_58_layers_is_planned_in_seconds() -> None:
    started = time.process_time()
    found = told("--model", "deepseek-v3", "--dp", "1024", "--ep", "32", "--rank", "700")
    assert time.process_time() - started < 40
    (rank,) = found["ranks"]
    assert rank["place"]["ep_rank"] == 700 % 32
    assert abs(rank["reads"]["nbytes"] - 12 * 671_026_404_352 // 1024) < 1 << 20


def test_a_zero3_checkpoint_of_512_ranks_is_read_by_1024() -> None:
    found = told("--model", "70b", "--dp", "1024")
    assert (found["source"]["zero_stage"], found["source"]["dp"], found["ranks_planned"]) == (3, 512, 64)
    owned = 12 * 68_976_648_192 // 1024  # all parameters divide
    assert found["nbytes_read"]["least"] == found["nbytes_read"]["most"] == owned
    reads = told("--model", "70b", "--dp", "1024", "--rank", "1000")["ranks"][0]["reads"]
    assert (reads["nbytes"], reads["files"]) == (owned, 1)
    assert reads["calls"] == 3 * (80 * 9 + 3)  # of half a partition each
    assert told("--model", "70b", "--dp", "512", "--rank", "7")["ranks"][0]["reads"]["calls"] < 200


def test_one_rank_in_detail() -> None:
    found = told("--model", "bloom-176b", "--rank", "100", "--tp", "8", "--dp", "4", "--pp", "6")
    assert [rank["rank"] for rank in found["ranks"]] == [100]
    place = {"dp": 4, "dp_rank": 0, "tp": 8, "tp_rank": 4, "pp": 6, "pp_rank": 3, "ep": 1, "ep_rank": 0}
    assert found["ranks"][0]["place"] == place
    assert any('the preset "bloom"' in note for note in found["notes"])
    result = run("--model", "bloom-176b", "--rank", "100", "--tp", "8", "--dp", "4", "--pp", "6")
    assert "rank 100: pipeline stage 3, data-parallel rank 0, tensor-parallel rank 4" in result.output
    assert "fp32 masters" in result.output and "bf16_zero_pp_rank_0_mp_rank_26_optim_states.pt" in result.output


def test_a_refusal_says_why_and_what_would_help() -> None:
    result = run("--model", "104b", "--tp", "8")
    assert result.exit_code == 1
    assert result.stdout == ""
    for words in (
        "refused: the tensor-parallel degree changes",
        "2.self_attention.query_key_value.weight",
        "--tp-preset",
    ):
        assert words in result.stderr
    refused = told("--model", "104b", "--tp", "8", code=1)["refused"]
    assert refused["error"] == "MismatchError"
    assert refused["parameter"] == "2.self_attention.query_key_value.weight"
    assert "megatron-deepspeed-interleaved" in refused["option"]
    assert (
        told("--model", "104b", "--tp", "8", "--tp-preset", "megatron-deepspeed-interleaved", "--rank", "0")[
            "ranks_planned"
        ]
        == 1
    )
    other = told("--model", "104b", "--tp", "3", "--tp-preset", "megatron-deepspeed-interleaved", code=1)["refused"]
    assert other["expected"] == "a multiple of 3" and "option" not in other


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "either the folder of a checkpoint, or --model"),
        (("somewhere", "--model", "104b"), "either the folder of a checkpoint, or --model"),
        (("--model", "104b", "--rank", "3", "--all"), "--rank plans one rank"),
        (("--model", "104b", "--rank", "512"), "has the ranks 0 to 511"),
        (("--model", "104b", "--dp", "65536"), "and 1048576 are the most"),
        (("--model", "104b", "--zero", "4"), "Invalid value for '--zero'"),
        (("--model", "104b", "--bandwidth", "fast"), "'fast' is no bandwidth"),
        (("--model", "105b"), 'there is no model "105b"'),
        (("--model", "104b", "--tp-preset", "nobody"), "nobody"),
        (
            ("--model", "104b", "--dp", "1", "--pp", "1", "--plot", "/nowhere/at/all/plot.png"),
            "the picture cannot be written",
        ),
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


def test_bandwidths() -> None:
    texts = ("5GB/s", "800 MB/s", "25Gbit/s", "1.5TB", "64kB/s", "2GiB/s", "7B/s")
    assert [bandwidth_of(text) for text in texts] == [5e9, 8e8, 25e9 / 8, 1.5e12, 64e3, 2 * 1024**3, 7]


def test_the_picture(small: str, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    result = run("--model", small, "--dp", "2", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_bytes_by_rank_and_file() -> None:
    def rank(number: int, by_file: dict[int, int]) -> RankForecast:
        return RankForecast(number, Reads(0, 0, 0, 0, 0, 0, 0), Memory(0, (), 0, 0, 0, False), by_file)

    matrix, files = bytes_matrix([rank(0, {7: 5}), rank(1, {}), rank(4, {3: 2, 7: 1})])
    assert files == [3, 7]
    assert np.array_equal(matrix, [[0, 5], [0, 0], [2, 1]])


def test_without_matplotlib_the_picture_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    result = run("--model", "104b", "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr


def test_the_scatter_is_drawn_of_the_planned_ranks(small: str, tmp_path: Path) -> None:
    path = tmp_path / "scatter.svg"
    assert run("--model", small, "--dp", "2", "--rank", "1", "--svg", str(path)).exit_code == 0
    assert "rank 1 reads" in path.read_text() and "rank 0 reads" not in path.read_text()
    assert run("--model", small, "--dp", "2", "--svg", "/nowhere/at/all.svg").exit_code == 2

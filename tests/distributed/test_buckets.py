"""Checkpoints in object stores: read by every rank from where they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Convert, Launch
from tests.distributed.model import Setup
from tests.storage.buckets import Bucket, serve_bucket

SETUPS = [Setup(1), Setup(2, "bf16"), Setup(3)]
SAVED_AT = 2


@pytest.fixture(scope="module")
def saved(launch: Launch, convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch(SAVED_AT, "save", {"folder": str(folder), "setups": SETUPS, "model": "BigLM"})
    (folder / "universal").mkdir()
    convert(folder, folder / "universal", ["z1-fp32-adamw-dp2"])
    return folder


@pytest.fixture(scope="module")
def bucket(saved: Path) -> Iterator[Bucket]:
    with serve_bucket() as bucket:
        for path in saved.iterdir():
            bucket.put(path, path.name)
        yield bucket


def case_of(bucket: Bucket, saved: Path, source: str, setup: Setup, **section: Any) -> dict[str, Any]:
    """A load of a folder into another engine."""
    truth = source.removeprefix("universal/")
    options = {"mode": "require", "storage_options": bucket.options, **section}
    return {"url": f"s3://bucket/{source}", "folder": str(saved / truth), "setup": setup, "section": options}


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_reads_its_own_bytes(bucket: Bucket, saved: Path, launch: Launch, ranks: int) -> None:
    sources = {setup: f"{setup.name}-dp{SAVED_AT}" for setup in SETUPS}
    moved = zip(SETUPS, [Setup(3), Setup(1, "bf16"), Setup(2)], strict=True)
    cases = [case_of(bucket, saved, sources[setup], target) for setup, target in moved]
    cases += [case_of(bucket, saved, f"universal/{sources[SETUPS[0]]}", target) for target in (Setup(3), Setup(1))]
    bucket.asked.clear()
    found = launch(ranks, "bucket_jobs.load", cases)
    assert len(found) == ranks * len(cases)
    for each in found:
        assert each.differences == {}, each.where
        assert "s3://bucket/" in each.text and "SECRET" not in each.text and each.report.verified is not None
        for rank in each.report.ranks:
            assert rank.requests.count > 1 and rank.requests.nbytes > rank.read.nbytes > 0
        assert "network (object store)" in each.text and "requests per rank" in each.text


def test_bytes_that_are_transferred_are_those_that_ranks_own(bucket: Bucket, saved: Path, launch: Launch) -> None:
    case = case_of(bucket, saved, f"{Setup(3).name}-dp{SAVED_AT}", Setup(2))
    bucket.asked.clear()
    first, *_ = launch(3, "bucket_jobs.load", [case])
    owned = sum(rank.read.nbytes for rank in first.report.ranks)
    by_object: dict[str, int] = {}
    for method, path, nbytes in bucket.asked:
        if method == "GET" and "optim_states" in path:
            by_object[path] = by_object.get(path, 0) + nbytes
    metadata_nbytes = 3 * len(by_object) * (1 << 19)  # the ends of archives, and their pickles
    assert owned <= sum(by_object.values()) <= 1.02 * owned + metadata_nbytes, (owned, by_object)


def test_an_overwrite_between_two_looks_is_an_error(bucket: Bucket, saved: Path, launch: Launch) -> None:
    name = f"{Setup(1).name}-dp{SAVED_AT}"
    bucket.put(saved / name, "moving")
    case = {**case_of(bucket, saved, name, Setup(1)), "url": "s3://bucket/moving"}
    raw = (saved / name / "step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").read_bytes()
    obstore.put(bucket.store, "moving/step4/zero_pp_rank_1_mp_rank_00_optim_states.pt", raw[:-1000])
    found = launch(2, "bucket_jobs.refuse", [case])
    for each in found:
        assert each.changed == frozenset() and "DamagedError" in each.kinds and len(each.texts) == 1


def test_what_is_not_there_is_said(bucket: Bucket, saved: Path, launch: Launch) -> None:
    case = case_of(bucket, saved, f"{Setup(1).name}-dp{SAVED_AT}", Setup(1))
    cases = {
        "no such bucket": {**case, "url": "s3://nobody/run"},
        "there is no DeepSpeed checkpoint": {**case, "url": "s3://bucket/nothing"},
        "the checkpoint to load is not there": {**case, "arguments": {"tag": "step5"}},
        "there is no DeepSpeed checkpoint to load": {
            **case,
            "url": "s3://bucket/nothing",
            "arguments": {"tag": "step5"},
            "section": {**case["section"], "mode": "auto"},
        },
        '"mode" is "off"': {**case, "section": {**case["section"], "mode": "off"}},
    }
    found = launch(2, "bucket_jobs.refuse", list(cases.values()))
    for each, words in zip(found, [*cases, *cases], strict=True):
        (text,) = each.texts
        assert words in text and each.changed == frozenset() and "SECRET" not in text, text


def test_ranks_go_on_after_a_store_that_does_not_answer(bucket: Bucket, saved: Path, launch: Launch) -> None:
    case = case_of(bucket, saved, f"{Setup(1).name}-dp{SAVED_AT}", Setup(1))
    bucket.refusal = 404, "Unknown"
    try:
        found = launch(2, "bucket_jobs.refuse", [case], 150)  # whose last collective would hang
    finally:
        bucket.refusal = None
    for each in found:
        (text,) = each.texts
        assert "does not answer as it should" in text and each.changed == frozenset(), text


def test_commands_read_buckets_as_they_read_folders(bucket: Bucket, saved: Path, tmp_path: Path) -> None:
    name = f"{Setup(3).name}-dp{SAVED_AT}"
    url, folder, config = f"s3://bucket/{name}", str(saved / name), tmp_path / "ds.json"
    config.write_text(json.dumps({"elastic_checkpoint": {"storage_options": bucket.options}}))

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "--config", str(config)], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert "SECRET" not in result.output
        return result.output

    for words in (("inspect",), ("verify", "--full"), ("plan", "--dp", "3")):
        of_url, of_folder = (run(*words, place, "--json").replace(place, "PLACE") for place in (url, folder))
        assert json.loads(of_url).keys() == json.loads(of_folder).keys()
        assert "PLACE" in of_url
    assert " requests " in run("plan", url, "--dp", "3") and " requests " not in run("plan", folder, "--dp", "3")
    assert run("latest", url).strip() == f"{url}/step4"
    assert "equal: " in run("diff", url, folder)
    run("convert", url, str(tmp_path / "universal"), "--to", "universal")
    run("verify", str(tmp_path / "universal"))
    run("export", url, str(tmp_path / "weights"))

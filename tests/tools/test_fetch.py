"""What is brought from an object store, and what stays there."""

# Covers elastic_ckpt/cli/fetch.py, which the command runs.

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.errors import ConfigError, DamagedError, ElasticCkptError
from elastic_ckpt.storage import Entry
from elastic_ckpt.storage.remote import RemoteFolder
from elastic_ckpt.tools.fetch import fetch
from tests.storage.buckets import Bucket, serve_bucket

URL = "s3://bucket/out/checkpoint-500"
SMALL = ["latest", "trainer_state.json", "rng_state_0.pth", "tokenizer/tokenizer.json"]
TENSORS = [
    "global_step500/mp_rank_00_model_states.pt",
    "global_step500/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step500_universal/zero/a.weight/fp32.pt",
    "pytorch_model_fsdp_0/__0_0.distcp",
    "model-00001-of-00002.safetensors",
    "pytorch_model.bin",
]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("out")
    for name in (*SMALL, *TENSORS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    with serve_bucket() as bucket:
        bucket.put(folder, "out/checkpoint-500")
        yield bucket


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_tensors_stay_and_their_folders_are_made(bucket: Bucket, tmp_path: Path) -> None:
    fetched = fetch(URL, tmp_path / "here", bucket.options)
    assert files_in(tmp_path / "here") == set(SMALL) == set(fetched.names) and set(fetched.left) == set(TENSORS)
    assert (tmp_path / "here" / "global_step500").is_dir(), "which the Trainer looks for"
    for name in SMALL:
        assert (tmp_path / "here" / name).read_text() == name
    assert fetched.nbytes == sum(map(len, SMALL)) and fetched.left_nbytes == sum(map(len, TENSORS))


def test_all_is_all_and_what_is_there_is_kept(bucket: Bucket, tmp_path: Path) -> None:
    fetch(URL, tmp_path, bucket.options)
    bucket.asked.clear()
    fetch(URL, tmp_path, bucket.options, everything=True)
    assert files_in(tmp_path) == {*SMALL, *TENSORS}
    assert bucket.read_nbytes == sum(map(len, TENSORS))


def test_an_object_that_was_overwritten_is_fetched_again(bucket: Bucket, tmp_path: Path) -> None:
    for content in (b"step100", b"step200"):
        obstore.put(bucket.store, "moving/latest", content)
        fetch("s3://bucket/moving", tmp_path, bucket.options)
        assert (tmp_path / "latest").read_bytes() == content
        time.sleep(1)  # S3 counts whole seconds


def test_nothing_to_fetch_is_an_error(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="nothing to fetch"):
        fetch("s3://bucket/nothing", tmp_path, bucket.options)


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/outside"])
def test_names_do_not_lead_out_of_the_folder(
    bucket: Bucket, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteFolder, "entries", lambda *_: [Entry(name, 1, 1, "version")])
    with pytest.raises(DamagedError, match="leads out"):
        fetch(URL, tmp_path / "here", bucket.options, everything=True)
    assert not list(tmp_path.rglob("outside"))


def test_work_grows_with_the_number_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are compared by hash: entries, of which each comparison is counted, never are."""
    compared = []

    class Counted(Entry):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return super().__eq__(other)

        __hash__ = Entry.__hash__

    small = [f"step4/{number}.json" for number in range(20)]
    names = [f"step4/{number}_optim_states.pt" for number in range(200)] + ["a/" * 500 + "x.distcp"]
    listed = [Counted(name, 1, 1, "version") for name in [*small, *names]]
    monkeypatch.setattr(RemoteFolder, "entries", lambda *_: listed)
    monkeypatch.setattr("elastic_ckpt.tools.fetch._is_current", lambda *_: True)
    fetched = fetch(URL, tmp_path / "here", {})
    assert (set(fetched.names), set(fetched.left)) == (set(small), set(names))
    assert compared == []


def test_a_file_in_the_place_of_a_folder_is_named(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").write_text("in the way")
    with pytest.raises(ElasticCkptError, match="cannot be written"):
        fetch(URL, tmp_path, bucket.options)


def test_the_command_reads_options_of_the_config_and_does_not_print_them(bucket: Bucket, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"elastic_checkpoint": {"storage_options": bucket.options}}))
    result = CliRunner().invoke(app, ["fetch", URL, str(tmp_path / "here"), "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert '"fallback_dirs"' in result.output and URL in result.output and "SECRET" not in result.output
    assert files_in(tmp_path / "here") == set(SMALL)


def test_a_path_is_taken_as_it_is_meant(bucket: Bucket, tmp_path: Path) -> None:
    fetch(URL, tmp_path / "a" / ".." / "here", bucket.options)
    assert files_in(tmp_path / "here") == set(SMALL)
    with pytest.raises(ConfigError, match="nothing to fetch from a folder"):
        fetch(str(tmp_path), tmp_path / "there", {})
    with pytest.raises(ConfigError, match="nothing is written to an object store"):
        fetch(URL, Path("s3://bucket/copy"), bucket.options)

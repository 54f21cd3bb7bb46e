"""Checkpoints in object stores: read by every rank from where they are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed import damage
from tests.distributed.cells import Cell, Change, Save, Saves, cells, crossing
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.model import Setup
from tests.storage.buckets import serve_bucket


def saved(stage: int, precision: str = "fp32", converted: bool = False) -> Save:
    return Save(Setup(stage, precision), more={"model": "BigLM"}, converted=converted)


#: What is saved, and an engine of another kind.
MOVED = [
    (saved(1), Setup(3)),
    (saved(2, "bf16"), Setup(1, "bf16")),
    (saved(3), Setup(2)),
    (saved(1, converted=True), Setup(3)),
    (saved(1, converted=True), Setup(1)),
]


@cells([crossing(save, target, ranks, "bucket_jobs.load_served") for ranks in (1, 3) for save, target in MOVED])
def test_every_rank_reads_its_own_bytes(cell: Cell, facts: list[Loaded]) -> None:
    assert len(facts) == cell.ranks
    for each in facts:
        assert each.differences == {}, each.where
        assert "s3://bucket/" in each.text and "SECRET" not in each.text and each.report.verified is not None
        for rank in each.report.ranks:
            assert rank.requests.count > 1 and rank.requests.nbytes > rank.read.nbytes > 0
        assert "network (object store)" in each.text and "requests per rank" in each.text


@cells([crossing(saved(3), Setup(2), 3, "bucket_jobs.transfer")])
def test_bytes_that_are_transferred_are_those_that_ranks_own(cell: Cell, facts: list[SimpleNamespace]) -> None:
    (found,) = facts
    sent_nbytes = sum(found.nbytes_by_object.values())
    metadata_nbytes = 3 * len(found.nbytes_by_object) * (1 << 19)  # the ends of archives, and their pickles
    assert found.owned_nbytes <= sent_nbytes <= 1.02 * found.owned_nbytes + metadata_nbytes, found


def refused(name: str, error: str, words: str, change: Change | None = None, **case: Any) -> Cell:
    setup = {"setup": Setup(1)}
    expected, fits = Refuses(error, (words,)), (saved(1), setup)
    return Cell(name, saved(1), "bucket_jobs.refuse_served", 2, setup | case, change, expected=expected, fits=fits)


CUT = damage.truncate(damage.OPTIMIZER.format(1), 0.9)
NOTHING = "s3://bucket/nothing"
NO_TAG = {"tag": "step5"}


@cells(
    [
        refused("cut", "DamagedError", "", CUT),
        refused("no bucket", "ElasticCkptError", "no such bucket", url="s3://nobody/run"),
        refused("no folder", "ElasticCkptError", "there is no DeepSpeed checkpoint", url=NOTHING),
        refused("no tag", "ElasticCkptError", "the checkpoint to load is not there", arguments=NO_TAG),
        refused(
            "no folder with the tag",
            "ElasticCkptError",
            "there is no DeepSpeed checkpoint to load",
            url=NOTHING,
            arguments=NO_TAG,
            section={"mode": "auto"},
        ),
        refused("switched off", "ElasticCkptError", '"mode" is "off"', section={"mode": "off"}),
        # whose last collective would hang
        refused("no answer", "ElasticCkptError", "does not answer as it should", refusal=(404, "Unknown")),
    ]
)
def test_what_is_not_there_is_said_by_all_ranks(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)
    assert len(facts) == cell.ranks and "SECRET" not in str([each.texts for each in facts])


KEPT = Save(Setup(1, optimizer="diary"), more={"model": "BigLM"})


@cells([Cell("diary", KEPT, "bucket_jobs.follow", 2, {"setup": KEPT.setup, "section": {"mode": "auto"}})])
def test_what_only_deepspeeds_own_loader_restores_is_fetched_as_the_error_says(
    cell: Cell, facts: list[tuple[Refused, dict[str, str]]]
) -> None:
    for refused, differences in facts:
        Refuses("UnsupportedError", ("fetch",)).check([refused])
        assert differences == {}


def test_commands_read_buckets_as_they_read_folders(saves: Saves, tmp_path: Path) -> None:
    """Without ranks."""
    folder, config = str(saves.folder(saved(3))), tmp_path / "ds.json"
    with serve_bucket() as bucket:
        bucket.put(Path(folder), "run")
        config.write_text(json.dumps({"elastic_checkpoint": {"storage_options": bucket.options}}))
        read_as_a_folder("s3://bucket/run", folder, config, tmp_path)


def read_as_a_folder(url: str, folder: str, config: Path, written: Path) -> None:
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
    run("convert", url, str(written / "universal"), "--to", "universal")
    run("verify", str(written / "universal"))
    run("export", url, str(written / "weights"))

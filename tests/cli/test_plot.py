"""The plot of a plan: its words and numbers are those of the plans, and its ribbons tile the memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.scale_models import scale_metadata
from elastic_ckpt.cli.plot import draw, ribbons
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.report import size
from elastic_ckpt.tools.virtual import Topology, VirtualJob, bytes_by_file
from tests.big_models import small_model


@pytest.fixture(scope="module", params=[Topology(2, 2, 2, 1), Topology(4, 2, 1, 3)], ids=str)
def job(request: pytest.FixtureRequest) -> VirtualJob:
    return VirtualJob(scale_metadata(small_model()), request.param, LoadOptions())


def texts_of(path: Path) -> list[str]:
    return [each.text or "" for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_its_words_are_those_of_the_plans(job: VirtualJob, tmp_path: Path) -> None:
    ranks, path = range(job.topology.ranks), tmp_path / "plan.svg"
    draw(job, ranks, path)
    read = [bytes_by_file(job.planned(rank)[1].reads) for rank in ranks]
    texts = texts_of(path)
    assert any(f"{size(sum(sum(each.values()) for each in read))} of " in text for text in texts)
    assert any(text.endswith(str(job.topology)) for text in texts)


def test_a_rank_and_its_files_are_named(job: VirtualJob, tmp_path: Path) -> None:
    draw(job, [1], tmp_path / "plan.svg")
    read = bytes_by_file(job.planned(1)[1].reads)
    texts = texts_of(tmp_path / "plan.svg")
    assert {f"rank 1 reads {size(sum(read.values()))}", "fp32 masters", "exp_avg", "exp_avg_sq"} <= {*texts}
    assert any(text.startswith(f"{size(sum(read.values()))} of {len(read)} files go to 1 of ") for text in texts)


def test_ribbons_tile_the_memory_of_each_rank(job: VirtualJob) -> None:
    """What no ribbon reaches is padding; none begins or ends outside of its file."""
    for rank in range(job.topology.ranks):
        plan = job.planned(rank)[1].reads
        begins = list(accumulate((target.numel * ITEMSIZE[target.dtype] for target in plan.targets), initial=0))
        spans = []
        for number in bytes_by_file(plan):
            for outline in ribbons(plan, number, 0, begins, 1, 1):
                (left, _), *_, (right, _), _ = outline.vertices
                assert 0 <= left <= right <= job.metadata.files[number].nbytes
                spans.append((outline.vertices[3][0], outline.vertices[4][0]))
        assert all(first >= last for (_, last), (first, _) in pairwise(sorted(spans))), "two ribbons overlap"
        gaps = sum(gap.numel * ITEMSIZE[target.dtype] for target in plan.targets for gap in target.gaps)
        assert sum(last - first for first, last in spans) == begins[-1] - gaps


def test_names_are_escaped_and_no_formulas(tmp_path: Path) -> None:
    metadata = scale_metadata(small_model())
    odd = f"{metadata.source.folder}/<$a_b$ & 'b'>\x07.pt"
    files = tuple(replace(file, path=odd) for file in metadata.files)
    job = VirtualJob(replace(metadata, files=files), Topology(2, 2, 2, 1), LoadOptions())
    draw(job, [0], tmp_path / "plan.svg")  # of few files, so that there is room for names
    assert any(r"<$a_b$ & 'b'>\x07.pt" in text for text in texts_of(tmp_path / "plan.svg"))


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_the_suffix_tells_the_format(job: VirtualJob, tmp_path: Path, suffix: str, magic: bytes) -> None:
    draw(job, [0], tmp_path / f"plan{suffix}")
    assert (tmp_path / f"plan{suffix}").read_bytes().startswith(magic)


@pytest.mark.parametrize("path", ["/nowhere/at/all.svg", "plan.doc"])
def test_a_path_that_cannot_be_written_is_an_error_of_the_user(job: VirtualJob, path: str) -> None:
    with pytest.raises(ConfigError, match="the plot cannot be written"):
        draw(job, [0], Path(path))

"""The diagram of a scatter: valid XML whose numbers are those of the plans."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.scale_models import scale_metadata
from elastic_ckpt.cli.plan import scatter, write_scatter
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.report import size
from elastic_ckpt.tools.virtual import Topology, VirtualJob, bytes_by_file
from tests.test_benchmarks_scale import small_model

_SVG = "{http://www.w3.org/2000/svg}"


def planned(job: VirtualJob) -> list[tuple[int, ReadPlan]]:
    return [(rank, job.planned(rank)[1].reads) for rank in range(job.topology.ranks)]


@pytest.fixture(scope="module", params=[Topology(2, 2, 2, 1), Topology(4, 2, 1, 3)], ids=str)
def job(request: pytest.FixtureRequest) -> VirtualJob:
    return VirtualJob(scale_metadata(small_model()), request.param, LoadOptions())


def test_its_numbers_are_those_of_the_plans(job: VirtualJob) -> None:
    plans = planned(job)
    drawn = ElementTree.fromstring(scatter(job, plans))
    titles = [element.text or "" for element in drawn.iterfind(f"{_SVG}g/{_SVG}title")]
    found = [re.fullmatch(r"rank (\d+) reads ([\d,]+) bytes of (.+)", title) for title in titles]
    shown = {(int(m[1]), m[3]): int(m[2].replace(",", "")) for m in found if m}
    folder = job.metadata.source.folder
    wanted = {
        (rank, str(Path(job.metadata.files[file].path).relative_to(folder))): nbytes
        for rank, plan in plans
        for file, nbytes in bytes_by_file(plan).items()
    }
    assert len(titles) == len(found) and shown == wanted
    words = "".join(drawn.itertext())
    assert size(sum(wanted.values())) in words and str(job.topology) in words


def test_ribbons_tile_the_memory_of_each_rank(job: VirtualJob) -> None:
    """What no ribbon reaches is padding; nothing is drawn outside of a bar."""
    plans = planned(job)
    drawn = ElementTree.fromstring(scatter(job, plans))
    bars = [element for element in drawn.iterfind(f"{_SVG}rect") if element.get("fill") == "#333333"]
    assert len(bars) == len(plans)
    spans = []
    for path in drawn.iter(f"{_SVG}path"):
        match = re.fullmatch(r"M([\d.]+) .* ([\d.]+) \d+H([\d.]+)C.*Z", path.get("d") or "")
        assert match
        spans.append((float(match[2]), float(match[3])))
    for (_, plan), bar in zip(plans, bars, strict=True):
        left = float(bar.get("x", "nan"))
        right = left + float(bar.get("width", "nan"))
        here = [(first, last) for first, last in spans if left - 0.1 <= first and last <= right + 0.1]
        padding = sum(gap.numel for target in plan.targets for gap in target.gaps) / sum(
            target.numel for target in plan.targets
        )
        assert all(first >= last - 0.2 for (_, last), (first, _) in pairwise(sorted(here))), "two ribbons overlap"
        covered = sum(last - first for first, last in here) / (right - left)
        assert covered == pytest.approx(1 - padding, abs=0.02)
        spans = [span for span in spans if span not in here]
    assert spans == []


def test_names_are_escaped() -> None:
    metadata = scale_metadata(small_model())
    odd = f"{metadata.source.folder}/<a & 'b'>\x07.pt"
    files = tuple(replace(file, path=odd) for file in metadata.files)
    job = VirtualJob(replace(metadata, files=files), Topology(2, 2, 2, 1), LoadOptions())
    drawn = ElementTree.fromstring(scatter(job, planned(job)[:1]))  # of few files, so that there is room for names
    for tag in ("title", "text"):
        assert any("<a & 'b'>\\x07.pt" in (element.text or "") for element in drawn.iter(f"{_SVG}{tag}"))


def test_a_path_that_cannot_be_written_is_an_error_of_the_user(job: VirtualJob) -> None:
    with pytest.raises(ConfigError, match="the diagram cannot be written"):
        write_scatter(job, [0], Path("/nowhere/at/all.svg"))

"""The worked examples of ``docs/extending.md`` work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.engines.optimizers import KNOWN, OptimizerParam
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import execute
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.sharding.rules import Preset
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from tests.blocks import REPO, blocks

PAGE = REPO / "docs" / "extending.md"


def shown(language: str, number: int) -> str:
    return [block for block in blocks(language) if block.page == PAGE][number].text


@pytest.fixture
def raw(tmp_path: Path) -> tuple[CheckpointInfo, dict[str, torch.Tensor], Any]:
    """A folder in the format of the page, its values, and the reader of the page."""
    index = json.loads(shown("json", 0))
    ((_, entry),) = index["tensors"].items()
    values = {key: torch.randn(entry["shape"]) for key in entry["files"]}
    for key, file in entry["files"].items():
        (tmp_path / file).write_bytes(values[key].numpy().tobytes())
    (tmp_path / "raw.json").write_text(json.dumps(index))
    names: dict[str, Any] = {}
    exec(shown("python", 0), names)
    return CheckpointInfo("raw", str(tmp_path), "", sort_names([], False)), values, names["read_raw"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_format_is_planned_and_read_at_another_topology(raw: Any, stage: int) -> None:
    found, values, read_raw = raw
    checkpoint = read_raw(found, MetadataOptions())
    assert checkpoint.training_state.counters == {"global_steps": 7}
    job = VirtualJob(checkpoint.metadata, Topology(dp=1 if stage == 0 else 3, zero_stage=stage), LoadOptions())
    loaded: dict[str, list[torch.Tensor]] = {key: [] for key in values}
    for rank in range(job.topology.ranks):
        plan = job.planned(rank)[1].reads
        tensors = [torch.full((target.numel,), torch.nan) for target in plan.targets]
        execute(plan, tensors, ReadOptions())
        for target, tensor in zip(plan.targets, tensors, strict=True):
            loaded[target.key].append(tensor)
    for key, value in values.items():
        assert torch.equal(torch.cat(loaded[key])[: value.numel()], value.view(-1))


def test_a_file_of_the_format_that_is_cut_short_is_refused(raw: Any) -> None:
    found, _, read_raw = raw
    Path(found.path("1.bin")).write_bytes(b"1234")
    with pytest.raises(DamagedError, match="not as long as its tensor"):
        read_raw(found, MetadataOptions())


def test_the_optimizer_has_the_states_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in list(KNOWN):
        monkeypatch.setitem(KNOWN, key, KNOWN[key])  # all is put back, and what is added goes
    exec(shown("python", 1), {})
    (name,) = (name for name in KNOWN if name.endswith(".Adan"))
    master = torch.zeros(6)
    optimizer = torch.optim.SGD([master])
    states = KNOWN.pop(name)(optimizer).states(OptimizerParam(master, 6, 0, 0))
    assert states is not None
    assert [(state.key, state.layout) for state in states] == [
        (key, "elementwise") for key in ("exp_avg", "exp_avg_diff", "exp_avg_sq")
    ]


def test_the_rules_are_a_preset_that_cuts_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "my-code.json"
    path.write_text(shown("json", 1))
    preset = Preset.load(str(path))
    by_pattern = {rule.pattern: rule for rule in preset.rules}
    (gate_up,) = (rule for pattern, rule in by_pattern.items() if "gate_up" in pattern)
    layout = gate_up.layout([(4, 3), (4, 3)], {})  # two of gate, then two of up, on each rank
    assert (layout.shape, layout.dim) == ((8, 3), 0)
    assert layout.ranges == (((0, 2), (4, 6)), ((2, 4), (6, 8)))


def test_what_the_page_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in ("formats/detect.py", "formats/base.py", "load/metadata.py", "formats/dcp.py", "engines/optimizers.py"):
        assert path in text and (REPO / "elastic_ckpt" / path).is_file()
    for path in (
        "core/shard_specs.py",
        "engines/compat.py",
        "engines/versions.py",
        "engines/versions.py",
        "sharding/specs.py",
    ):
        assert path in text and (REPO / "elastic_ckpt" / path).is_file()

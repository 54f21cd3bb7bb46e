"""Checkpoints that are generated one rank after another are those of a job of real processes, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import elastic_ckpt
from benchmarks.generated import Layout, write
from benchmarks.model import KEYS, values
from elastic_ckpt.config import read_config

pytestmark = pytest.mark.nightly
LAYOUTS = [
    *(Layout("tiny", stage, 2) for stage in (1, 2, 3)),
    Layout("tiny", 1, 2, ep=2, experts=4),
    Layout("tiny", 1, 2, pp=2),
    Layout("tiny", 1, 2, tp=2),
]
#: How its tensor-parallel ranks divide parameters, which its shapes do not say.
RULES = [
    {"pattern": ".*(attention|up)\\.(weight|bias)", "kind": "column"},
    {"pattern": ".*(projection|down)\\.weight", "kind": "row"},
    {"pattern": ".*", "kind": "replicated"},
]


@pytest.fixture(scope="module")
def both(extensions_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same checkpoints, of two ranks one after another and of a job of two."""
    folders = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    for folder, one_by_one in zip(folders, (True, False), strict=True):
        write(LAYOUTS, folder, Path(extensions_dir), one_by_one)
    return folders


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_generated_checkpoint_is_its_real_twin_byte_by_byte(both: tuple[Path, Path], layout: Layout) -> None:
    alone, together = (
        {path.relative_to(folder): path.read_bytes() for path in (folder / layout.name).rglob("*") if path.is_file()}
        for folder in both
    )
    assert len(alone) > 3 and alone.keys() == together.keys()
    assert [str(path) for path in alone if alone[path] != together[path]] == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_element_of_a_generated_checkpoint_is_known(both: tuple[Path, Path], layout: Layout) -> None:
    config = read_config({"elastic_checkpoint": {"tp_rules": RULES}})
    checkpoint = elastic_ckpt.open(both[0] / layout.name, config=config)
    assert len(checkpoint) > 20
    for name, master in checkpoint.items():
        found = checkpoint.optimizer_state(name) | {"fp32": master}
        for key in KEYS:
            assert torch.equal(found[key].view(-1), values(name, key, 0, master.numel())), (name, key)

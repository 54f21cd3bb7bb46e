"""Checkpoints that are generated one rank after another are those of a job of real processes, byte by byte.

The launcher of the benchmarks starts these ranks, since it is part of what is compared: so these are no cells.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import elastic_ckpt
from benchmarks import sparse
from benchmarks.generated import Layout, write
from benchmarks.launching import Launcher
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


def test_two_ranks_of_a_larger_job_hold_every_element_of_sparse_files(tmp_path: Path, extensions_dir: str) -> None:
    def wrong() -> list[list[str]]:
        launcher = Launcher(tmp_path / "logs", Path(extensions_dir))
        return [point["wrong"] for point in sparse.measure(tmp_path, launcher, "1M", saved=3, ranks=4, node=2)]

    assert wrong() == [[], []]
    (file,) = tmp_path.glob("1M-sparse3/*/*zero_pp_rank_0_*_optim_states.pt")
    known, content = values("tokens.weight", "exp_avg", 0, 64).numpy().tobytes(), file.read_bytes()
    assert content.count(known) == 1
    file.write_bytes(content.replace(known, known[::-1]))
    assert wrong() == [["exp_avg of tokens.weight"], []]

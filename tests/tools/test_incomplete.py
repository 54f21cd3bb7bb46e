"""Checkpoints that lack files: what the others show, and which are missing."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.tools.incomplete import missing_paths, remains_of
from elastic_ckpt.tools.inspection import inspect_folder

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def lacking(folder: Path, *ranks: int) -> Path:
    """A folder of optimizer-states files that nobody can read, without model-states files."""
    tag = folder / "step4"
    tag.mkdir(parents=True)
    for rank in ranks:
        (tag / OPTIMIZER.format(rank)).write_bytes(b"\0" * 7)
    return tag


def test_without_a_file_that_can_be_read_the_files_are_known(tmp_path: Path) -> None:
    tag = lacking(tmp_path, 0, 2)
    found = look_at(str(tmp_path), "step4")
    assert found is not None
    rest = remains_of(found, trust_pickle=False)
    assert [(Path(file.path).name, file.nbytes) for file in rest.metadata.files] == [
        (OPTIMIZER.format(0), 7),
        (OPTIMIZER.format(2), 7),
    ]
    assert not rest.is_topology_known and rest.contents == rest.parameters == []
    assert missing_paths(found, trust_pickle=False) == rest.missing == (str(tag / OPTIMIZER.format(1)),)


def test_an_inspection_does_not_claim_a_topology_that_nothing_states(tmp_path: Path) -> None:
    partition = {"optimizer_state_dict": {"partition_count": 2}}
    tag = lacking(tmp_path)
    torch.save(partition, tag / OPTIMIZER.format(0))
    shown = inspect_folder(str(tmp_path), "step4", ElasticConfig())
    assert shown["topology"] == "topology not known" and not shown["ok"]
    assert {finding.kind for finding in shown["findings"]} == {"missing"}
    assert [Path(file["path"]).name for file in shown["files"]] == [OPTIMIZER.format(0)]

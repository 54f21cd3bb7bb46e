"""The tree of every file that DeepSpeed saves, against torch's own reader: values, types, attributes.

Reading takes no ranks: this is no cell. It reads what the session has saved for others.
"""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled
from tests.trees import described


def test_every_file_of_a_save_is_read_like_torch_reads_it(native: Path, universal: Path, unpartitioned: Path) -> None:
    paths = [path for folder in (native, universal, unpartitioned) for path in sorted(folder.rglob("*.pt"))]
    distinct = {path.read_bytes(): path for path in paths}
    assert len(distinct) > 100
    for path in distinct.values():
        theirs = torch.load(path, weights_only=False)  # imports the classes that stand-ins become
        file = open_pickled(str(path))
        assert described(materialise(file, file.tree)) == described(theirs), path

"""What a rank's own files say, where they are all that it can look at.

So it is where each node saves to a disk of its own, and where files are too old a format to be read piece by piece.
DeepSpeed's own loader reads no more than these either.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from elastic_ckpt import distributed
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import PickledFile, TensorRef, is_unzipped, open_pickled, replace_leaves
from elastic_ckpt.formats.safe_globals import safe_globals


def on_own_disks(engine: Any, found: Found) -> bool:
    """Whether nodes have disks of their own, and with them other files below the same path. Collective.

    Looked at only where the config says so (``use_node_local_storage``).
    """
    if not engine.use_node_local_storage() or found.format != "native":
        return False
    everybody = distributed.share(_listing(found.folder))
    return any(other != everybody[0] for other in everybody)


def _listing(folder: str) -> list[tuple[str, int, int, int]]:
    """What tells a folder's files from others of their names; empty where there is no such folder."""
    try:
        entries = [(entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
    except OSError:
        return []
    return sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in entries)


def own_part(engine: Any, found: Found) -> Found:
    """The folder as this rank sees it, with no data-parallel rank's files but its own. Local."""
    files = sort_names(os.listdir(found.folder), is_universal=False)
    group = getattr(engine.optimizer, "dp_process_group", None) or engine.seq_data_parallel_group
    rank = dist.get_rank(group=group)
    mine = replace(
        files,
        optimizer={place: name for place, name in files.optimizer.items() if place[0] == rank},
        model_zero3={place: name for place, name in files.model_zero3.items() if place[0] == rank},
    )
    return replace(found, files=mine)


def open_any(path: str) -> PickledFile:
    """A file's object tree, of a legacy pickle archive too, which is read whole for it. Local.

    Of that one scalars stay tensors, and the rest cannot be materialised.
    """
    if not is_unzipped(path):
        return open_pickled(path)
    with safe_globals():
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    return PickledFile(path, os.path.getsize(path), replace_leaves(loaded, _without_data))


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return leaf
    return TensorRef(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), tuple(leaf.stride()), byte_offset=0)

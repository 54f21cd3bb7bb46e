"""Files of ranks that the last save of a tag did not have: DeepSpeed saves into a tag's folder without emptying it.

A save overwrites the files of its own ranks. If it has fewer than an earlier save of the tag, the files of the others
stay, and DeepSpeed, which opens those of its own ranks alone, resumes beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.shards import OptimizerShard


def find_leftovers(found: CheckpointInfo, indexed: Mapping[str, Any]) -> frozenset[str]:
    """Those of ``indexed``, by name, that another save has left there, on ranks that the checkpoint's does not have.

    The first rank's model-states file states the number of data-parallel ranks. What ranks from that number on have is
    left over if each of their files states another number or cannot be read, and each file of the ranks below that can
    be read states this one: files of a job whose ranks are counted otherwise stay.
    """
    files = found.files
    left = set[str]()
    zero_files: dict[int, list[tuple[int, str]]] = {}  # by model-parallel rank: the data-parallel one, and the name
    for (dp, mp), name in (*files.model_zero3.items(), *files.optimizer.items()):
        zero_files.setdefault(mp, []).append((dp, name))
    for mp in files.mp_ranks:
        own = zero_files.get(mp, [])
        ranks = _ranks_stated_by(indexed.get(files.model.get(mp) or files.model_zero3.get((0, mp), "")))
        beyond = [name for dp, name in own if dp >= ranks]
        below = {_ranks_stated_by(indexed[name]) for dp, name in own if dp < ranks}
        if ranks > 0 and below <= {ranks, -1} and not {ranks, 0} & {_ranks_stated_by(indexed[name]) for name in beyond}:
            left.update(beyond)
    return frozenset(left)


def _ranks_stated_by(item: Any) -> int:
    """The number of data-parallel ranks of the save that wrote a file; 0 if it does not say, -1 if it is unreadable."""
    if isinstance(item, ModelShard):
        return item.stated.partition_degree or 0
    return max(item.partition_count, default=0) if isinstance(item, OptimizerShard) else -1

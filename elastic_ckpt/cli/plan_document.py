"""A survey of a job as plain data, for ``elastic-ckpt plan --json``. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.tools.forecast import Memory, RankForecast
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from elastic_ckpt.tools.virtual.survey import Setting, Survey, heaviest, spread


def document(job: VirtualJob, found: Survey, setting: Setting, name: str, in_detail: bool) -> Mapping[str, Any]:
    """All that is known; ``in_detail``: of each rank that was planned, too."""
    ranks, most = found.ranks, heaviest(found.ranks)
    told: dict[str, Any] = {
        "name": name,
        "source": dataclasses.asdict(job.metadata.source) | {"files": len(job.metadata.files)},
        "target": dataclasses.asdict(job.topology) | {"ranks": job.topology.ranks, "offload": setting.offload},
        "precision": setting.precision,
        "ranks_planned": len(ranks),
        "nbytes_read": spread([each.reads.nbytes for each in ranks]),
        "nbytes_compared": spread([each.reads.nbytes_compared for each in ranks]),
        "nbytes_received": spread([each.reads.nbytes_received for each in ranks]),
        "reads": spread([each.reads.calls for each in ranks]),
        "files": spread([each.reads.files for each in ranks]),
        "memory": _memory(most.memory) | {"rank": most.rank},
        "cluster": dataclasses.asdict(setting.cluster) | {"ranks_per_node": setting.cluster.ranks_per_node},
        "nodes": found.nodes,
        "seconds": dataclasses.asdict(found.time),
        "warnings": warnings_of(job.topology),
        "notes": found.notes,
    }
    if in_detail:
        told["ranks"] = [_rank(job, each) for each in ranks]
    return told


def _rank(job: VirtualJob, each: RankForecast) -> dict[str, Any]:
    files = {job.metadata.files[file].path: nbytes for file, nbytes in sorted(each.by_file.items())}
    stands = job.topology.place(each.rank)
    place = {key: getattr(stands, key) for key in ("dp", "dp_rank", "tp", "tp_rank", "pp", "pp_rank")}
    return {"rank": each.rank, "place": place, "reads": each.reads, "memory": _memory(each.memory), "files": files}


def _memory(memory: Memory) -> dict[str, Any]:
    states = [{"key": key, "dtype": dtype, "nbytes": nbytes} for key, dtype, nbytes in memory.states]
    return dataclasses.asdict(memory) | {"states": states, "device": memory.device, "host": memory.host}


def warnings_of(topology: Topology) -> list[str]:
    """What DeepSpeed would not do, although the checkpoint could be loaded so."""
    if topology.pp > 1 and topology.zero_stage > 1:
        return [
            f"DeepSpeed's pipeline engine refuses ZeRO-{topology.zero_stage}: with pipeline parallelism, take stage 0 "
            "or 1. What follows is what such a job would read"
        ]
    return []

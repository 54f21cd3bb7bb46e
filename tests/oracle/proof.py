"""A proof over all ranks of a job that its plans restore everything, each element once."""

from __future__ import annotations

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from tests.oracle.coverage import Coverage, Proof


def proof_of(job: VirtualJob) -> Proof:
    """Plan every rank of the job and prove that together they write each saved element exactly once."""
    coverage = Coverage(job.metadata)
    for rank in range(job.topology.ranks):
        coverage.add(*job.planned(rank))
    return coverage.proof()


def proof_of_folder(folder: str, topology: Topology, with_states: bool = True) -> Proof:
    """:func:`proof_of` a job that resumes the checkpoint in a folder."""
    opened = open_folder(folder, None, ElasticConfig(), with_states)
    return proof_of(
        VirtualJob(opened.checkpoint.metadata, topology, LoadOptions.of(opened.config, optimizer_states=with_states))
    )

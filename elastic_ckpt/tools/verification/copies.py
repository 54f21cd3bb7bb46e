"""Reads the replicas of tensor-parallel ranks and pipeline stages, and compares their values; imports torch."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.metadata import WEIGHTS, CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, listed
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import find_drift, united, without_untrained
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.sharding.rules import Preset
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding
from elastic_ckpt.tools.logical import LogicalReader

_ONE_OF_A_MODULE = (
    "DeepSpeed synchronizes the tied weights of a tied module alone, which are equal; at other stages only one copy "
    "can be kept"
)


def check_copies(metadata: CheckpointMetadata, config: ElasticConfig, threads: int) -> Iterator[Finding]:
    """Findings on replicas that differ.

    Without a live model, only rules determine which tensors are replicated over tensor-parallel ranks; tensors without
    a rule get a note. Rules match names as ``"rename"`` changes them, by which the findings go too. Raises
    :class:`ConfigError` if there is no such preset, :class:`MismatchError` if ``"rename"`` gives two tensors one name.
    """
    metadata = rename_saved(metadata, config.rename)
    folder = metadata.source.folder
    errors: dict[str, ElasticCkptError] = {}
    reader = LogicalReader(metadata, LoadOptions.of(config), errors)
    resharding, unknown = reader.resharding, set(errors)
    options = ReadOptions(threads=threads, progress=False)
    differences = find_drift(metadata.files, reader.replica_checks, options)
    of_stages = {each.check.name for each in differences if each.check.is_of_stages}
    synchronized = {_module(name) for name, _ in metadata.replicas if name not in of_stages}
    kept, _ = without_untrained(differences, reader.of_first_stage)
    for drift in united(kept):
        name, key = drift.check.name, drift.check.key
        if name in resharding.guessed and (name, key) not in metadata.replicas:
            unknown.add(name)
            continue
        what = "" if key in WEIGHTS else f" of {key}"
        message = f"{drift.copies} copies{what}, which should be equal, are {drift.apart}"
        level = NOTE if name in resharding.averaged else ERROR
        if name in of_stages and _module(name) in synchronized:
            level, message = (
                NOTE,
                f"the pipeline stages' {drift.copies} copies{what} are {drift.apart}: {_ONE_OF_A_MODULE}",
            )
        yield Finding(level, "drift", message, name, folder)
    if unknown:
        message = (
            "whether the copies of these on tensor-parallel ranks have drifted apart, since no rule says which are "
            f"copies and which are cut: {listed(unknown)}; name the code base with --tp-preset "
            f'({", ".join(Preset.names())}), or give "tp_rules" with --config'
        )
        yield Finding(NOTE, "not-checked", message, file=folder)


def _module(name: str) -> str:
    """The tied module of a parameter: ``tied_modules.embed``."""
    return ".".join(name.split(".")[:2])
